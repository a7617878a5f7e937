"""Which rows are to be gone. Pure."""

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
    """The updates that are among the wanted rows."""

    keys: list[str]
    """Of each of them, as canonical JSON."""
    time: int
    """The latest of their times: once since has reached it, compactions leave nothing of what was deleted.
    -1: there are none."""


class RowsToErase:
    """The rows of these keys, and those for which a condition is true."""

    def __init__(self, kind: TableSchema[Any, Any], keys: Collection[str], where: Any) -> None:
        self.kind = kind
        self.keys = frozenset(keys)
        """As canonical JSON, as positions of subscriptions have them."""
        self.where = where

    def of(self, updates: pa.Table) -> MatchingUpdates:
        """Those of `updates` that are among them. These have the columns of the kind."""
        found = list(self._parted(updates))
        times = [pc.max(some.column("time")).as_py() for some in found if some.num_rows]
        return MatchingUpdates([key for some in found for key in _texts(some, "key")], max(times, default=-1))

    def entries(self, contents: pa.Table) -> dict[str, str]:
        """The values by key of those of `contents` that are among them, as texts."""
        found: dict[str, str] = {}
        for some in self._parted(contents):
            found.update(zip(_texts(some, "key"), _texts(some, "val"), strict=True))
        return found

    def _parted(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Those of `rows` with the keys, then the others for which the condition is true."""
        if self.keys:
            near = self.by_keys.of(rows)  # keys of several fields may be mixed
            yield near.filter(pa.array([key in self.keys for key in _texts(near, "key")], pa.bool_()))
        if self.where is not None:
            fits = apply_where(rows, self.where, self.kind.schema)
            yield fits.filter(pa.array([key not in self.keys for key in _texts(fits, "key")], pa.bool_()))

    @cached_property
    def by_keys(self) -> WantedKeys:
        """The keys, as reads look for them; at least one."""
        return wanted_keys(self.kind, sorted(self.keys))


def _texts(rows: pa.Table, name: str) -> list[str]:
    return column_texts(rows.column(name)) if rows.num_rows else []
