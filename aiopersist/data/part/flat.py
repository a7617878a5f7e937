"""Key and value as the flat columns that other engines see.

A column is a field of the key or the value. A key or value without fields, or one that may be null, is the
column `key` or `val`. A name that occurs twice gets its half as a prefix: `key_id`, `val_id`. Names that
differ in case only are the same name here, as they are in SQL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.schema import Schema


class ColumnSource(NamedTuple):
    """The part of key or value that a column shows."""

    half: str
    """`key` or `val`."""
    field: str | None
    """A field of the struct; `None`: the whole half."""
    stored: pa.Field
    """Name and type in the shard."""

    @property
    def path(self) -> tuple[str, ...]:
        return (self.half,) if self.field is None else (self.half, self.field)

    def of(self, table: pa.Table | pa.RecordBatch) -> Any:
        """The column, of updates or contents."""
        column = table.column(self.half)
        if self.field is None:
            return column
        return pc.struct_field(
            column, [column.type.get_field_index(self.field)]
        )  # a name may look like a path


def sources(schema: Schema[Any, Any, Any], others: Collection[str] = ()) -> dict[str, ColumnSource]:
    """The columns of key and value, by their names. `others`: the names of columns beside them.
    `InvalidUsage` of kind `INVALID_COLUMN` if prefixes do not make names different."""
    all_sources = [
        source for half in ("key", "val") for source in _sources(schema.arrow_schema.field(half), half)
    ]
    counts = Counter(name.lower() for name in others)
    counts.update((source.field or source.half).lower() for source in all_sources)
    by_name: dict[str, ColumnSource] = {}
    for source in all_sources:
        name = source.field or source.half
        shown = f"{source.half}_{name}" if counts[name.lower()] > 1 else name
        if shown in others or by_name.setdefault(shown, source) is not source:
            raise invalid(f"several columns would have the name {shown!r}", shown)
    return by_name


def _sources(field: pa.Field, half: str) -> list[ColumnSource]:
    """The columns of the key or the value: none, itself, or its fields."""
    t = field.type
    if pa.types.is_null(t):
        return []
    if pa.types.is_struct(t) and not field.nullable:
        return [ColumnSource(half, f.name, f) for f in t]
    return [ColumnSource(half, None, field)]


def invalid(message: str, column: str) -> InvalidUsage:
    """The error for a column that cannot be used."""
    return InvalidUsage(UsageKind.INVALID_COLUMN, message, column=column)
