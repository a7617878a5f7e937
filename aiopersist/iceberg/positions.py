"""The positions that a publication deletes, found in bounded memory: part by part, and if there are many
differences, by ranges of keys.

1. *Dirty* parts, which may have anything but insertions at or before the time, are read: their hidden rows,
   and the differences (`surplus.py`). Row groups that are clean by their statistics are not fetched.
2. Differences that need too much memory are divided at a key, and each half is begun anew.
3. Where copies are a surplus, all parts that may have their keys are read until enough are deleted.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from aiopersist.base.errors import NegativeMultiplicity
from aiopersist.base.frontier import Time
from aiopersist.base.resource import run_bounded
from aiopersist.data.jsonable import to_json
from aiopersist.data.lazy import np, pa, pc
from aiopersist.data.part.keys import at_or_beyond, has_conditions
from aiopersist.data.part.part import PartIndex, read_row_groups
from aiopersist.data.part.select import apply_where
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.order import row_key
from aiopersist.iceberg.surplus import Positions, Surplus, differences, hidden, placed, summed, visible
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.state.record import HollowPart

T = TypeVar("T")
Missing = Callable[[pa.Table], Awaitable[None]]
"""Takes rows `key`, `val`, `diff` of which so many copies are missing."""


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys at or beyond `lower` and before `upper`; `None` is no bound. Both are scalars."""

    lower: Any = None
    upper: Any = None

    @property
    def condition(self) -> Any:
        """The expression for its rows; `None` for all rows."""
        bounds = [] if self.lower is None else [at_or_beyond(self.lower)]
        bounds += [] if self.upper is None else [~at_or_beyond(self.upper)]
        return None if not bounds else bounds[0] if len(bounds) == 1 else bounds[0] & bounds[1]


class Dirty:
    """Chooses the data that is not clean by its statistics: all diffs are 1, and all times at or before
    `as_of`. `past`: the times are, in any case."""

    def __init__(self, as_of: Time, *, past: bool = False) -> None:
        self._as_of = as_of if isinstance(as_of, tuple) else (as_of,)
        self._past = past

    @classmethod
    def of(cls, named: Named, as_of: Time) -> Dirty | None:
        """Of the row groups of a part; `None` if its statistics do not tell what a reader sees."""
        batch, part = named
        past = Selection(as_of=as_of).covers(batch)
        if part.truncated is not None or (part.rewrite is not None and not past):
            return None
        return cls(as_of, past=past)

    def may_be_in(self, stats: Mapping[str, Any] | None) -> bool:
        """Whether data with these statistics may be dirty."""
        diff = (stats or {}).get("diff")
        are_insertions = diff is not None and diff["min"] == diff["max"] == 1
        return not (are_insertions and (self._past or self._are_past(stats or {})))

    def is_absent(self, metadata: Any) -> bool:
        """Whether a part is clean by the statistics in its Parquet footer. Int times only."""
        groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
        return all(self._is_clean(group) for group in groups)

    def _is_clean(self, group: Any) -> bool:
        columns = (group.column(number) for number in range(group.num_columns))
        stats = {column.path_in_schema: column.statistics for column in columns}
        diff, time = (_bounds(stats.get(name)) for name in ("diff", "time"))
        return diff == (1, 1) and (self._past or (time is not None and time[1] <= self._as_of[0]))

    def _are_past(self, stats: Mapping[str, Any]) -> bool:
        names = ["time"] if len(self._as_of) == 1 else [f"time.{i}" for i in range(len(self._as_of))]
        return all(
            (entry := stats.get(name)) is not None and entry["max"] is not None and entry["max"] <= at
            for name, at in zip(names, self._as_of, strict=True)
        )


@dataclass(eq=False)
class Deletions:
    """See the header. `limit` is the memory of differences, in bytes."""

    fetch: Fetch
    parts: Sequence[Named]
    reader: str
    as_of: Time
    missing: Missing
    limit: int
    _positions: dict[str, list[Positions]] = field(default_factory=lambda: defaultdict(list))

    async def run(self) -> dict[str, Positions]:
        """The sorted positions by blob key. `NegativeMultiplicity` for a row with fewer than zero copies."""
        spans = [KeySpan()]
        while spans:
            span = spans.pop()
            split = await self._run(span)
            if split is not None:
                spans += [replace(span, lower=split), replace(span, upper=split)]
        return {key: await self.compute(_joined, positions) for key, positions in self._positions.items()}

    async def _run(self, span: KeySpan) -> Any:
        """Delete in a span; or do nothing and return the key at which to divide it."""
        differences = _Differences(self, span.condition)
        await self._of_parts(differences.add)
        if differences.split is not None:
            return differences.split
        sums = await differences.summed()
        for key, positions in differences.hidden:
            self._positions[key].append(positions)
        copies = await self.compute(_above_zero, sums)
        if copies.num_rows:
            await self.missing(copies)
        surplus = await self.compute(Surplus.of, sums)
        if surplus is not None:
            await self._of_parts(partial(self._delete, surplus, asyncio.Lock()))
            if surplus.first_needed() is not None:
                raise await self.compute(_negative, surplus, self.fetch)
        return None

    async def _of_parts(self, work: Callable[[Named, str], Awaitable[None]]) -> None:
        """Do the work for each part in a blob, for some at once."""
        jobs = [partial(work, named, named[1].key) for named in self.parts if named[1].key is not None]
        await run_bounded(self.fetch.stack.settings.fetch_max_outstanding_parts, jobs)

    async def _delete(self, surplus: Surplus, turn: asyncio.Lock, named: Named, key: str) -> None:
        """Delete copies that are too many, as far as this part has them."""
        part = named[1]
        if surplus.first_needed() is None or not await self.compute(surplus.keys.may_be_in, part.stats):
            return
        async with aclosing(self.placed(named, surplus.keys, None)) as tables:
            async for table in tables:
                async with turn:
                    positions = await self.compute(_surplus_positions, table, part, self.as_of, surplus)
                self._positions[key].append(positions)
                if surplus.first_needed() is None:
                    return

    async def placed(self, named: Named, chooser: Any, condition: Any) -> AsyncGenerator[pa.Table, None]:
        """The rows of a part with their positions, row group by row group: those for which the condition is
        true, of row groups whose statistics the `chooser` does not exclude."""
        part, fetch = named[1], self.fetch
        schema = fetch.shard.schema(part.schema_id)
        async with aclosing(
            fetch.row_groups(part, self.reader, Selection(keys=chooser, where=condition))
        ) as ranges:
            async for index, offset, data, numbers in ranges:
                firsts = list(accumulate((group.rows for group in index.row_groups), initial=0))
                for number in numbers:
                    yield await self.compute(
                        _decoded,
                        index,
                        (offset, data),
                        number,
                        schema,
                        firsts[number],
                        fetch.schema,
                        condition,
                    )

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """The result of the work, on a worker thread."""
        return await self.fetch.stack.compute(work, *args)


@dataclass(eq=False)
class _Differences:
    """Gathers the hidden positions and the differences of parts, in rows for which a condition is true."""

    deletions: Deletions
    condition: Any
    hidden: list[tuple[str, Positions]] = field(default_factory=list)
    """By blob key."""
    split: Any = None
    """The key at which to divide the rows, once their differences need too much memory."""
    _tables: list[pa.Table] = field(default_factory=list)
    _bytes: int = 0
    _bytes_max: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def add(self, named: Named, key: str) -> None:
        """Look at a part, unless it is clean."""
        deletions, part = self.deletions, named[1]
        dirty = Dirty.of(named, deletions.as_of)
        if dirty is not None and await self._is_clean(part, dirty):
            return
        async with aclosing(deletions.placed(named, dirty, self.condition)) as tables:
            async for table in tables:
                work = _hidden_and_differences, table, part, deletions.as_of
                positions, rows = await deletions.compute(*work)
                self.hidden.append((key, positions))
                async with self._turn:
                    await self._add(rows)
                if self.split is not None:
                    return

    async def _is_clean(self, part: HollowPart, dirty: Dirty) -> bool:
        """By the statistics in the state; without any of diffs, as parts of earlier releases are, by its
        footer."""
        if part.stats is not None and "diff" in part.stats:
            return not dirty.may_be_in(part.stats)
        deletions = self.deletions
        index = await deletions.fetch.index(part, deletions.reader)
        return await deletions.compute(dirty.is_absent, index.metadata)

    async def summed(self) -> pa.Table:
        """The sums of all differences, also of inline parts."""
        deletions = self.deletions
        inline = [named for named in deletions.parts if named[1].key is None]
        selection = Selection(as_of=deletions.as_of, where=self.condition)
        seen = await deletions.fetch.table(inline, selection, deletions.reader)
        tables = [*self._tables, seen.select(["key", "val", "diff"])]
        return await deletions.compute(summed, tables, deletions.fetch.schema)

    async def _add(self, rows: pa.Table) -> None:
        compute, limit = self.deletions.compute, self.deletions.limit
        self._tables.append(rows)
        self._bytes += rows.nbytes
        if self._bytes > max(limit, self._bytes_max):
            sums = await compute(summed, self._tables, self.deletions.fetch.schema)
            self._tables, self._bytes = [sums], sums.nbytes
            self._bytes_max = 2 * self._bytes
            if self._bytes > limit // 2:
                self.split = await compute(_middle, sums)


def _bounds(statistics: Any) -> tuple[Any, Any] | None:
    """The least and the greatest value of a column in a Parquet footer."""
    return (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else None


def _decoded(
    index: PartIndex,
    fetched: tuple[int, bytes],
    number: int,
    stored: Schema[Any, Any, Any],
    first: int,
    schema: Schema[Any, Any, Any],
    condition: Any,
) -> pa.Table:
    table = placed(read_row_groups(index, [fetched], [number], stored), first, schema)
    return table if condition is None else apply_where(table, condition, schema)


def _hidden_and_differences(table: pa.Table, part: HollowPart, as_of: Time) -> tuple[Positions, pa.Table]:
    """The hidden positions and the differences of placed rows."""
    seen = visible(table, part, as_of)
    return hidden(table, seen), differences(seen)


def _surplus_positions(table: pa.Table, part: HollowPart, as_of: Time, surplus: Surplus) -> Positions:
    return surplus.take(visible(table, part, as_of))


def _above_zero(sums: pa.Table) -> pa.Table:
    return sums.filter(pc.greater(sums.column("diff"), 0))


def _middle(sums: pa.Table) -> Any:
    """The first key behind the middle that is not the least one; `None` without such a key, or if the keys
    cannot be compared in a condition."""
    keys = sums.column("key")
    if not has_conditions(keys.type):
        return None
    least, (low, high) = row_key(sums, 0, ("key",)), (sums.num_rows // 2, sums.num_rows)
    while low < high and row_key(sums, low, ("key",)) == least:
        low += 1
    return keys[low] if low < high else None


def _joined(positions: list[Positions]) -> Positions:
    return np.unique(np.concatenate(positions))


def _negative(surplus: Surplus, fetch: Fetch) -> NegativeMultiplicity:
    row = surplus.first_needed()
    assert row is not None
    key, val = (to_json(surplus.rows.column(name)[row]) for name in ("key", "val"))
    return NegativeMultiplicity(key, val, shard_id=fetch.shard.id)
