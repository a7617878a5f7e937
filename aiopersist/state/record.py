"""Frozen records with a JSON form, which make up the state; and the hollow part.

Records are JSON in the stores, so `psql` and `jq` can read them. They are structs of msgspec, which take a
fifth of the time of pydantic models to make, compare, write and read, and half the memory. Each commit does
all of this.

A type that JSON lacks has `to_plain()` and `from_plain(plain, *kinds)`; `kinds` are its type arguments.

A constructor checks nothing: the values come from the library, and each version is read back before it is
written. Values that are read are checked by type, without conversions. Unknown fields are refused, since a
later format has a later number. A field with its default is not written.
"""

from binascii import Error, a2b_base64, b2a_base64
from collections.abc import Callable, Iterable
from functools import cache
from math import inf
from typing import Annotated, Any, Self, TypedDict, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from aiopersist.base.frontier import Antichain, antichain_of

T = TypeVar("T")


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A frozen value with a JSON form. See the header."""

    def replace(self, **values: Any) -> Self:
        """This record with some values replaced."""
        return msgspec.structs.replace(self, **values)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """In a view (a pydantic model) a record has its JSON form, with all fields."""
        from pydantic_core import core_schema

        def all_fields(record: Self) -> dict[str, Any]:
            names = zip(cls.__struct_encode_fields__, cls.__struct_fields__, strict=True)
            return {encoded: to_builtins(getattr(record, name)) for encoded, name in names}

        def read(value: Any) -> Any:
            return msgspec.convert(value, cls, dec_hook=decoded, str_keys=True)

        return core_schema.json_or_python_schema(
            core_schema.no_info_plain_validator_function(read),
            core_schema.is_instance_schema(cls),
            serialization=core_schema.plain_serializer_function_ser_schema(all_fields),
        )


class InlineBytes(bytes):
    """Bytes; base64 in JSON, with the alphabet for URLs."""


def encode(record: Struct) -> bytes:
    """The record as JSON, without the fields that have their defaults."""
    return _encoder.encode(record)


def to_builtins(value: Any) -> Any:
    """A record, or one of its values, as Python values for JSON."""
    return msgspec.to_builtins(value, enc_hook=_encoded, str_keys=True)


@cache
def decoder(kind: type[T]) -> Callable[[bytes], T]:
    """A decoder of JSON to that type; it raises `ValueError` or `RecursionError` for other bytes."""
    return msgspec.json.Decoder(kind, dec_hook=decoded).decode


def _encoded(value: Any) -> Any:
    if type(value) is Antichain:
        return value.elements
    if type(value) is InlineBytes:
        return b2a_base64(value, newline=False).translate(_TO_URL_SAFE).decode()
    if isinstance(value, str):  # a subclass
        return str.__str__(value)
    return value.to_plain()


def decoded(kind: Any, value: Any) -> Any:
    """The value of that type from its JSON form."""
    if kind is Antichain:
        return antichain_of(value)
    if kind is InlineBytes:
        return _from_base64(value)
    return (get_origin(kind) or kind).from_plain(value, *get_args(kind))


_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_encoder = msgspec.json.Encoder(enc_hook=_encoded)


def _from_base64(text: Any) -> InlineBytes:
    """Bytes from base64 with either alphabet, as earlier versions of the library read them."""
    if not isinstance(text, str):
        raise ValueError(f"expected base64, got {type(text).__name__}")
    try:
        return InlineBytes(a2b_base64(text.replace("-", "+").replace("_", "/"), strict_mode=True))
    except Error as error:
        raise ValueError(f"expected base64: {error}") from error


class StoredStats(TypedDict):
    """The statistics of one column; the bounds are values of its type as JSON, or null."""

    min: Any
    max: Any
    nulls: Annotated[int, Meta(ge=0)]


class HollowPart(Record, frozen=True, kw_only=True):
    """The metadata of a part: where it lies, and how a reader checks it."""

    key: str | None = None
    """Its blob key; `None` for an inline part."""
    inline: InlineBytes | None = None
    """The encoded part, if it is inline."""
    size: int
    """Bytes of the encoded part."""
    rows: int
    goodbytes: int | None = None
    """The goodbytes of its updates: a bound of their memory, which may be a thousand times the encoded size.
    `None` for an inline part, whose encoded size is no smaller."""
    footer_bytes: int = 0
    """The length of the index at the end of the blob."""
    checksum: str
    """The checksum of the index, or of all bytes of an inline part."""
    schema_id: int = 0
    key_lower: Any = None
    stats: dict[str, StoredStats] | None = None
    rewrite: Antichain | None = None
    """Readers advance the times of the part to it."""
    truncated: tuple[Antichain, Antichain] | None = None
    """Lower and upper of the append that truncated it: readers leave out updates outside of them. The part
    has its own copy, since its batch may be merged with its neighbours."""


def goodbytes_at_most(part: HollowPart) -> float:
    """An upper bound of the goodbytes of its updates; infinite if the part has no such number."""
    return part.size if part.key is None else inf if part.goodbytes is None else part.goodbytes


def inline_bytes(parts: Iterable[HollowPart]) -> int:
    """Bytes of the inline parts."""
    return sum([part.size for part in parts if part.inline is not None])
