"""The query of a snapshot: a condition on rows, a choice of columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from aiopersist.base.frontier import Time
from aiopersist.data.lazy import pa
from aiopersist.data.part.select import check_where, decode_projected, project, prune, resolve_columns
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import contents, sort_and_consolidate, sum_columns
from aiopersist.data.updates.updates import decode_rows
from aiopersist.parts.fetch import Named
from aiopersist.parts.runs import plan_runs

Columns = Sequence[str]


@dataclass(frozen=True)
class Query:
    """`paths`: the paths of the chosen columns, by name; `None`: key and value. `keys`: only these keys, as
    in `Selection`. `sums=False`: updates that are not summed, in any order. `after`: only changes after that
    time. `may_match`: a faster test than `where` whether a part may have such rows."""

    schema: Schema[Any, Any, Any]
    where: Any = None
    paths: dict[str, tuple[str, ...]] | None = None
    keys: WantedKeys | None = None
    sums: bool = True
    after: Time | None = None
    may_match: Callable[[Named], bool] | None = None

    @classmethod
    def of(cls, schema: Schema[Any, Any, Any], where: Any, columns: Columns | None) -> Query:
        """`InvalidUsage` of kind `INVALID_COLUMN` for a bad condition or an unknown column."""
        if where is not None:
            check_where(where, schema)
        return cls(schema, where, None if columns is None else resolve_columns(columns, schema))

    @property
    def prunes(self) -> bool:
        """Whether statistics may exclude parts."""
        return self.where is not None or self.keys is not None or self.may_match is not None

    def matching(self, parts: list[Named]) -> list[Named]:
        """The parts that may hold matching rows, by their statistics."""
        if self.keys is not None:
            parts = [(batch, part) for batch, part in parts if self.keys.may_be_in(part.stats)]
        if self.may_match is not None:
            parts = [named for named in parts if self.may_match(named)]
        if self.where is None:
            return parts
        kept = prune(self.where, [part.stats for _, part in parts], self.schema)
        return [named for named, keep in zip(parts, kept, strict=True) if keep]

    def runs(self, parts: list[Named]) -> list[list[Named]]:
        """Their runs, with only the parts that may hold matching rows. Planned of all parts, since the runs
        of a batch count them."""
        kept = {id(part) for _, part in self.matching(parts)}
        runs = ([named for named in run if id(named[1]) in kept] for run in plan_runs(parts))
        return [run for run in runs if run]

    def projected(self, table: pa.Table) -> pa.Table:
        """The chosen columns of updates, not summed."""
        return table if self.paths is None else project(table, self.paths)

    @property
    def order(self) -> tuple[str, ...]:
        """The first chosen columns that sort rows in key order: the key, or its first fields."""
        paths, key = list((self.paths or {}).items()), self.schema.arrow_schema.field("key")
        if paths and paths[0][1] == ("key",):
            return (paths[0][0],)
        fields = key.type if pa.types.is_struct(key.type) and not key.nullable else ()
        pairs = zip(paths, fields, strict=False)
        alike = takewhile(lambda pair: pair[0][1] == ("key", pair[1].name), pairs)
        return tuple(name for (name, _), _ in alike)

    def folded(self, projections: Sequence[pa.Table]) -> pa.Table:
        """The projections as one table, partly summed."""
        return sort_and_consolidate(pa.concat_tables(projections))

    def summed(self, tables: Sequence[pa.Table]) -> pa.Table:
        """The contents, from tables of updates or of projections; `DiffOverflow`."""
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        if not self.sums:
            return table
        return contents(table, self.schema) if self.paths is None else sum_columns(table, self.schema)

    def rows(self, table: pa.Table) -> list[tuple[Any, ...]]:
        """Contents as tuples of the types of the schema."""
        if self.paths is None:
            return decode_rows(table, self.schema)
        return decode_projected(table, self.paths, self.schema)
