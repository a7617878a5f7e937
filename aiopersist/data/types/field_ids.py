"""Field ids: the numbers of columns and fields in Parquet files, by which Iceberg and other readers tell
columns apart when names change.

`key`, `val`, `time`, `diff` and the elements of product times have fixed ids. Fields within key and value
are numbered from `FIRST` on, in the order in which the schemas of the shard added them. So ids are a pure
function of these schemas: every process computes the same ones, a field keeps its id, and the state stores
none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from aiopersist.data.lazy import pa
from aiopersist.data.types.nested import ELEMENT

FIXED = {("key",): 1, ("val",): 2, ("time",): 3, ("diff",): 4, ("time", ELEMENT): 5}
FIRST = 16
FIELD_ID = b"PARQUET:field_id"

Path = tuple[str, ...]
"""The names from a column down to a field; `element` for the elements of a list."""


def field_ids(schemas: Iterable[pa.Schema]) -> dict[Path, int]:
    """The id of every field of the schemas, which are the columns of an update, oldest first."""
    ids = dict(FIXED)
    for schema in schemas:
        for name in ("key", "val"):
            for path in _paths((name,), schema.field(name).type):
                ids.setdefault(path, len(ids) - len(FIXED) + FIRST)
    return ids


def with_field_ids(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The last of the schemas of a shard, oldest first, with its ids where Arrow's writer of Parquet takes
    them: in the metadata of its fields."""
    ids = field_ids(schemas)
    return pa.schema([_with_id(field, (field.name,), ids) for field in schemas[-1]])


def _paths(path: Path, t: pa.DataType) -> Iterator[Path]:
    for field in _fields(t):
        yield (*path, field.name)
        yield from _paths((*path, field.name), field.type)


def _with_id(field: pa.Field, path: Path, ids: dict[Path, int]) -> pa.Field:
    inner = [_with_id(child, (*path, child.name), ids) for child in _fields(field.type)]
    t = _with_fields(field.type, inner) if inner else field.type
    return pa.field(field.name, t, field.nullable, {FIELD_ID: str(ids[path]).encode()})


def _fields(t: pa.DataType) -> list[pa.Field]:
    """The fields within a type, by the names that Parquet gives them."""
    is_ = pa.types
    if is_.is_struct(t):
        return list(t)
    if is_.is_map(t):
        return [t.key_field.with_name("key"), t.item_field.with_name("value")]
    return [t.value_field.with_name(ELEMENT)] if _is_list(t) else []


def _with_fields(t: pa.DataType, fields: list[pa.Field]) -> pa.DataType:
    is_ = pa.types
    if is_.is_struct(t):
        return pa.struct(fields)
    if is_.is_map(t):
        return pa.map_(*fields, keys_sorted=t.keys_sorted)
    if is_.is_fixed_size_list(t):
        return pa.list_(*fields, t.list_size)
    return pa.large_list(*fields) if is_.is_large_list(t) else pa.list_(*fields)


def _is_list(t: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_list(t) or is_.is_large_list(t) or is_.is_fixed_size_list(t))
