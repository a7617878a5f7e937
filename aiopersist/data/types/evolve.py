"""Schemas evolve by adding optional fields, at any depth, and in no other way.

Columns are adapted from one schema to another by the names of fields. A field that the new schema adds is
null; a field that it lacks is left out. The fields of both schemas have the same order. So *adding* a field
keeps a sorted table sorted, since the field is null in all rows. *Leaving out* a field does not: rows become
equal or change their order, so the result must be consolidated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiopersist.base.errors import CodecMismatch, IncompatibleSchema
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema


def check_evolution(old: Schema[Any, Any, Any], new: Schema[Any, Any, Any]) -> None:
    """`IncompatibleSchema` unless `new` is `old`, perhaps with optional fields added."""
    if old.time != new.time:
        raise IncompatibleSchema(f"times of length {old.time} cannot become times of length {new.time}")
    for name in ("key", "val"):
        _check_field(name, old.arrow_schema.field(name), new.arrow_schema.field(name))
    stored = {path for name in ("key", "val") for path in _paths(name, old.arrow_schema.field(name).type)}
    for path in old.own.keys() | new.own.keys():
        if path in stored and old.own.get(path) != new.own.get(path):
            raise IncompatibleSchema(f"{path}: codec {old.own.get(path)} cannot become {new.own.get(path)}")


def compatible_evolution(old: Schema[Any, Any, Any], new: Schema[Any, Any, Any]) -> bool:
    """Whether `new` is `old`, perhaps with optional fields added."""
    try:
        check_evolution(old, new)
    except IncompatibleSchema:
        return False
    return True


def mismatch(stored: Schema[Any, Any, Any], asked: Schema[Any, Any, Any], *, shard_id: str) -> CodecMismatch:
    """The error for a caller whose schema is not the stored one: the differences, and what to do."""
    if compatible_evolution(stored, asked):
        advice = "add these fields with client.compare_and_evolve_schema"
    else:
        advice = "client.compare_and_evolve_schema adds optional fields, and nothing else"
    text = f"it is stored as {stored}: {differences(stored, asked)} ({advice})"
    return CodecMismatch(asked, stored, differences=text, shard_id=shard_id)


def differences(stored: Schema[Any, Any, Any], asked: Schema[Any, Any, Any]) -> str:
    """Where two schemas differ, field by field."""
    lines: list[str] = []
    for name in ("key", "val"):
        lines += _differences(name, stored.arrow_schema.field(name), asked.arrow_schema.field(name))
    for path in sorted(stored.own.keys() | asked.own.keys()):
        if (codecs := [schema.own.get(path) for schema in (stored, asked)])[0] != codecs[1]:
            lines.append(f"{path} is stored by codec {codecs[0]}, asked for by {codecs[1]}")
    if stored.time != asked.time:
        lines.append(f"times are stored with length {stored.time}, asked for with {asked.time}")
    return "; ".join(lines)


def _differences(path: str, stored: pa.Field, asked: pa.Field) -> Iterator[str]:
    one, other = stored.type, asked.type
    if stored.nullable is asked.nullable and pa.types.is_list(one) and pa.types.is_list(other):
        yield from _differences(f"{path}.element", one.value_field, other.value_field)
    elif stored.nullable is asked.nullable and pa.types.is_struct(one) and pa.types.is_struct(other):
        yield from _struct_differences(path, one, other)
    elif one != other or stored.nullable is not asked.nullable:
        yield f"{path} is stored as {_text(stored)}, asked for as {_text(asked)}"


def _struct_differences(path: str, stored: pa.DataType, asked: pa.DataType) -> Iterator[str]:
    kept = [field.name for field in stored if asked.get_field_index(field.name) >= 0]
    for field in stored:
        if field.name in kept:
            yield from _differences(f"{path}.{field.name}", field, asked.field(field.name))
        else:
            yield f"{path}.{field.name} is stored as {_text(field)}, and not asked for"
    for field in asked:
        if field.name not in kept:
            yield f"{path}.{field.name} is asked for as {_text(field)}, and not stored"
    if kept != [field.name for field in asked if field.name in kept]:
        yield f"the fields of {path} are stored in another order"


def adapt(table: pa.Table, to: Schema[Any, Any, Any]) -> pa.Table:
    """The table in the types of `to`, an earlier or later version of its schema."""
    fields = [to.arrow_schema.field(name) for name in table.column_names]
    if table.schema.equals(pa.schema(fields)):
        return table
    columns = [
        pa.chunked_array([_adapted(chunk, field) for chunk in column.chunks], field.type)
        for column, field in zip(table.columns, fields, strict=True)
    ]
    return pa.table(columns, pa.schema(fields))


def _check_field(path: str, old: pa.Field, new: pa.Field) -> None:
    if old.nullable is not new.nullable:
        raise IncompatibleSchema(f"{path}: {_text(old)} cannot become {_text(new)}")
    if pa.types.is_struct(old.type) and pa.types.is_struct(new.type):
        _check_struct(path, old.type, new.type)
    elif pa.types.is_list(old.type) and pa.types.is_list(new.type):
        _check_field(f"{path}.element", old.type.value_field, new.type.value_field)
    elif old.type != new.type:
        raise IncompatibleSchema(f"{path}: {_text(old)} cannot become {_text(new)}")


def _check_struct(path: str, old: pa.DataType, new: pa.DataType) -> None:
    kept = [field.name for field in new if old.get_field_index(field.name) >= 0]
    if kept != [field.name for field in old]:
        fields = [[field.name for field in t] for t in (old, new)]
        raise IncompatibleSchema(f"{path}: fields {fields[0]} cannot become {fields[1]}")
    for field in new:
        if field.name in kept:
            _check_field(f"{path}.{field.name}", old.field(field.name), field)
        elif not field.nullable:
            raise IncompatibleSchema(f"{path}.{field.name} is new, so it must be optional")


def _adapted(array: pa.Array, to: pa.Field) -> pa.Array:
    t = to.type
    mask = array.is_null() if array.null_count else None
    if array.type == t or not pa.types.is_nested(t):
        return array
    if pa.types.is_list(t):
        elements = _adapted(array.values, t.value_field)
        return pa.ListArray.from_arrays(pa.concat_arrays([array.offsets]), elements, type=t, mask=mask)
    children = {f.name: child for f, child in zip(array.type, array.flatten(), strict=True)}
    parts = [_adapted(children[f.name], f) if f.name in children else pa.nulls(len(array), f.type) for f in t]
    return pa.StructArray.from_arrays(parts, fields=list(t), mask=mask)


def _paths(path: str, t: pa.DataType) -> Iterator[str]:
    """The dotted paths of a field and of all fields within it (`val.items.element`). Names may have dots."""
    yield path
    if pa.types.is_list(t):
        yield from _paths(f"{path}.element", t.value_type)
    for field in t if pa.types.is_struct(t) else ():
        yield from _paths(f"{path}.{field.name}", field.type)


def _text(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"
