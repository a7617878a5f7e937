"""The schema of an Iceberg table: the types of key and value, and the name mapping for parts without ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from aiopersist.base.errors import Unsupported
from aiopersist.data.lazy import pa
from aiopersist.data.types.field_ids import Path
from aiopersist.data.types.nested import ELEMENT

SHOWN = ("key", "val")  # columns; engines do not show the others, which the files have, too
UTC = frozenset({"UTC", "Etc/UTC", "Z", "+00:00"})

Ids = Mapping[Path, int]


def schema_json(schema: pa.Schema, ids: Ids, schema_id: int) -> dict[str, Any]:
    """The schema of the table. `Unsupported` names the first field whose type not all engines can read, or a
    dotted name of two fields."""
    _check_names(ids)
    fields = [_field(schema.field(name), (name,), ids) for name in SHOWN]
    return {"type": "struct", "schema-id": schema_id, "fields": fields}


def name_mapping(schema: pa.Schema, ids: Ids) -> list[dict[str, Any]]:
    """The ids of all columns by name: engines read files without ids by it, and refuse a file with a column
    that it lacks."""
    return [_mapped(field, (field.name,), ids) for field in schema]


def leaves(schema: pa.Schema) -> dict[str, tuple[Path, pa.DataType]]:
    """The paths and types of the leaf columns that statistics may have bounds of, by dotted name."""
    out: dict[str, tuple[Path, pa.DataType]] = {}
    for name in SHOWN:
        _add_leaves(schema.field(name).type, (name,), out)
    return out


def _check_names(ids: Ids) -> None:
    """Engines tell fields apart by their dotted names."""
    for name, count in Counter(map(".".join, ids)).items():
        if count > 1:
            raise Unsupported(f"two fields have the name {name}, and Iceberg does not tell them apart")


def _add_leaves(t: pa.DataType, path: Path, out: dict[str, tuple[Path, pa.DataType]]) -> None:
    if pa.types.is_struct(t):
        for field in t:
            _add_leaves(field.type, (*path, field.name), out)
    elif not pa.types.is_nested(t):
        out[".".join(path)] = path, t


def _field(field: pa.Field, path: Path, ids: Ids) -> dict[str, Any]:
    t = _type(field.type, path, ids)
    return {"id": ids[path], "name": field.name, "required": not field.nullable, "type": t}


def _type(t: pa.DataType, path: Path, ids: Ids) -> str | dict[str, Any]:
    if pa.types.is_struct(t):
        return {"type": "struct", "fields": [_field(f, (*path, f.name), ids) for f in t]}
    if pa.types.is_list(t):
        inner = (*path, ELEMENT)
        return {
            "type": "list",
            "element-id": ids[inner],
            "element": _type(t.value_type, inner, ids),
            "element-required": not t.value_field.nullable,
        }
    name = primitive(t)
    if name is None:
        raise Unsupported(f"{'.'.join(path)} is {t}, a type that not all readers of Iceberg tables have")
    return name


def primitive(t: pa.DataType) -> str | None:
    """Iceberg's name of a type that is not nested; `None` for a type that Iceberg, or an engine, lacks."""
    is_ = pa.types
    if is_.is_decimal128(t):
        return f"decimal({t.precision}, {t.scale})"
    if is_.is_fixed_size_binary(t):
        return f"fixed[{t.byte_width}]"
    if is_.is_timestamp(t) and t.unit != "ns":
        return "timestamp" if t.tz is None else "timestamptz" if t.tz in UTC else None
    for name, matches in (
        ("string", is_.is_string(t) or is_.is_large_string(t)),
        ("binary", is_.is_binary(t) or is_.is_large_binary(t)),
        ("boolean", is_.is_boolean(t)),
        ("int", is_.is_int8(t) or is_.is_int16(t) or is_.is_int32(t)),
        ("long", is_.is_int64(t)),
        ("float", is_.is_float32(t)),
        ("double", is_.is_float64(t)),
        ("date", is_.is_date32(t)),
    ):
        if matches:
            return name
    return None


def _mapped(field: pa.Field, path: Path, ids: Ids) -> dict[str, Any]:
    t = field.type
    inner: list[dict[str, Any]] = []
    if pa.types.is_struct(t):
        inner = [_mapped(f, (*path, f.name), ids) for f in t]
    elif pa.types.is_list(t) or pa.types.is_fixed_size_list(t):
        inner = [_mapped(t.value_field.with_name(ELEMENT), (*path, ELEMENT), ids)]
    fields = {"fields": inner} if inner else {}
    return {"field-id": ids[path], "names": [field.name], **fields}
