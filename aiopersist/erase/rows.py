"""The rows to erase. Texts are canonical JSON. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from aiopersist.data.jsonable import column_texts
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.select import apply_where
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.table.schema import TableSchema
from aiopersist.table.view.lookup import wanted_keys


class MatchingUpdates(NamedTuple):
    """Updates of the rows to erase."""

    keys: list[str]
    """The text of the key of each update."""
    time: int
    """The latest of their times; -1: no updates. Once since has reached it, compactions drop deleted rows."""


class RowsToErase:
    """The rows to erase: those with these keys, and those for which a condition is true."""

    def __init__(self, table_schema: TableSchema[Any, Any], keys: Collection[str], where: Any) -> None:
        self.table_schema = table_schema
        self.keys = frozenset(keys)
        """Texts; positions of subscriptions have the same."""
        self.where = where

    def matches_in(self, updates: pa.Table) -> MatchingUpdates:
        """The matches among `updates`, which have the columns of the table."""
        tables = list(self._matching(updates))
        times = [pc.max(table.column("time")).as_py() for table in tables if table.num_rows]
        keys = [key for table in tables for key in _texts(table, "key")]
        return MatchingUpdates(keys, max(times, default=-1))

    def entries(self, contents: pa.Table) -> dict[str, str]:
        """The matches among `contents`: values by key, as texts."""
        values: dict[str, str] = {}
        for table in self._matching(contents):
            values.update(zip(_texts(table, "key"), _texts(table, "val"), strict=True))
        return values

    def _matching(self, rows: pa.Table) -> Iterator[pa.Table]:
        """The rows with the keys, then the others for which the condition is true."""
        if self.keys:
            candidates = self.by_keys.of(rows)  # and rows of other keys, if keys have several fields
            mask = [key in self.keys for key in _texts(candidates, "key")]
            yield candidates.filter(pa.array(mask, pa.bool_()))
        if self.where is not None:
            fits = apply_where(rows, self.where, self.table_schema.schema)
            yield fits.filter(pa.array([key not in self.keys for key in _texts(fits, "key")], pa.bool_()))

    @cached_property
    def by_keys(self) -> WantedKeys:
        """The keys in the form for reads; at least one."""
        return wanted_keys(self.table_schema, sorted(self.keys))


def _texts(rows: pa.Table, name: str) -> list[str]:
    return column_texts(rows.column(name)) if rows.num_rows else []
