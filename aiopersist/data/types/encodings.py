"""One type in all its Arrow encodings: a text with 32-bit offsets, with 64-bit offsets, as a view, in a
dictionary or in runs is the same text. The same holds for bytes and lists.

- A column of a file gets its *natural* type, which Python types have. So a schema of Python types opens a
  table that was loaded from a file.
- A schema of natural types opens a shard that is stored in wide texts and bytes, and the other way round: it
  is *encoded as* the stored one.
"""

from __future__ import annotations

from typing import Any, TypeVar

from aiopersist.data.lazy import pa
from aiopersist.data.types.codec import Codec, Field, Plain, plain
from aiopersist.data.types.nested import ELEMENT, Instances, Lists, Structs
from aiopersist.data.types.schema import Schema, with_fields

K = TypeVar("K")
V = TypeVar("V")


def natural(of: pa.DataType) -> pa.DataType:
    """The natural type of the same values, at any depth."""
    is_ = pa.types
    if isinstance(of, pa.BaseExtensionType):
        return natural(of.storage_type)
    if is_.is_dictionary(of) or is_.is_run_end_encoded(of):
        return natural(of.value_type)
    if is_.is_struct(of):
        return pa.struct([field.with_type(natural(field.type)) for field in of])
    if is_.is_list(of) or is_.is_large_list(of) or is_.is_list_view(of) or is_.is_large_list_view(of):
        element = of.value_field
        return pa.list_(pa.field(ELEMENT, natural(element.type), element.nullable))
    if is_.is_large_string(of) or is_.is_string_view(of):
        return pa.string()
    return pa.binary() if is_.is_large_binary(of) or is_.is_binary_view(of) else of


def identity(schema: Schema[Any, Any, Any]) -> str:
    """A value that is equal for schemas that differ only in encodings."""
    fields = [field.with_type(natural(field.type)) for field in schema.arrow_schema]
    return f"{pa.schema(fields)} {sorted(schema.own.items())}"


def encoded_as(asked: Schema[K, V, Any], stored: Schema[Any, Any, Any]) -> Schema[K, V, Any]:
    """The schema with the Python types of `asked`, and wide texts and bytes where `stored` has them; `asked`
    itself if that changes nothing."""
    key, val = (
        _encoded_as(getattr(asked, name), stored.arrow_schema.field(name).type) for name in ("key", "val")
    )
    return asked if key is asked.key and val is asked.val else with_fields(asked, key, val)


def _encoded_as(field: Field, stored: pa.DataType) -> Field:
    codec = _codec_as(field.codec, stored)
    return field if codec is field.codec else field._replace(codec=codec)


def _codec_as(codec: Codec, stored: pa.DataType) -> Codec:
    is_ = pa.types
    if isinstance(codec, Lists) and is_.is_list(stored):
        element = _encoded_as(codec.element, stored.value_type)
        return codec if element is codec.element else Lists(element)
    if isinstance(codec, Structs) and is_.is_struct(stored):
        types = {field.name: field.type for field in stored}
        fields = {n: _encoded_as(f, types[n]) if n in types else f for n, f in codec.fields.items()}
        if all(fields[name] is field for name, field in codec.fields.items()):
            return codec
        return type(codec)(codec.cls, fields) if isinstance(codec, Instances) else Structs(fields)
    if (
        isinstance(codec, Plain)
        and codec.arrow_type != stored
        and natural(stored) == natural(codec.arrow_type)
    ):
        return plain(stored)
    return codec
