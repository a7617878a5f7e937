"""The updates that a reader gets: Arrow columns that read as rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from aiopersist.data.lazy import pa, pl
from aiopersist.data.part.layout import writable
from aiopersist.data.types.schema import Schema

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T", int, tuple[int, ...])


class Update(NamedTuple, Generic[K, V, T]):
    """At `time` the multiplicity of `(key, val)` changed by `diff`."""

    key: K
    val: V
    time: T
    diff: int


class Updates(Generic[K, V, T]):
    """A table of updates in the columns of its schema. Iteration gives `Update`s."""

    __slots__ = ("_schema", "_table")

    def __init__(self, table: pa.Table, schema: Schema[K, V, T]) -> None:
        self._table: pa.Table = table
        self._schema: Schema[K, V, T] = schema

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __iter__(self) -> Iterator[Update[K, V, T]]:
        return iter(self.rows())

    def rows(self) -> list[Update[K, V, T]]:
        """All updates as named tuples."""
        columns = decode_columns(self._table, self._schema)
        return [Update(*row) for row in zip(*columns, strict=True)]

    def to_arrow(self) -> pa.Table:
        """The columns `key`, `val`, `time`, `diff`."""
        return writable(self._table)

    def to_polars(self) -> pl.DataFrame:
        return polars_frame(self._table)

    def __repr__(self) -> str:
        return f"Updates({len(self)} of {self._schema!r})"


def polars_frame(table: pa.Table) -> pl.DataFrame:
    """The table as a polars frame."""
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame


def decode_columns(table: pa.Table, schema: Schema[Any, Any, Any]) -> list[list[Any]]:
    """The values of each column of the table, in its order: keys and values by the schema's codecs,
    product times as tuples."""
    return [_decode(name, table.column(name), schema) for name in table.column_names]


def decode_rows(table: pa.Table, schema: Schema[Any, Any, Any]) -> list[tuple[Any, ...]]:
    """The rows of the table as tuples in the order of its columns: `(key, val, diff)` of contents."""
    return list(zip(*decode_columns(table, schema), strict=True))


def _decode(name: str, column: Any, schema: Schema[Any, Any, Any]) -> list[Any]:
    if name == "key":
        return schema.key.decode(column)
    if name == "val":
        return schema.val.decode(column)
    values: list[Any] = column.to_pylist()
    return list(map(tuple, values)) if pa.types.is_fixed_size_list(column.type) else values
