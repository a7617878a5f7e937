"""The positions that a publication deletes, found in bounded memory: part by part, and if there are many
differences, by ranges of keys.

1. *Dirty* parts, which may have anything but insertions at or before the time, are read: their hidden rows,
   and the differences (`surplus.py`). Row groups that are clean by their statistics are not fetched.
2. Differences that need too much memory are divided at a key, and each half is begun anew.
3. Where copies are a surplus, all parts that may have their keys are read until enough are deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, TypeVar

from aiopersist.base.errors import NegativeMultiplicity
from aiopersist.base.frontier import Time
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
        return {key: await self._compute(_joined, positions) for key, positions in self._positions.items()}

    async def _run(self, span: KeySpan) -> Any:
        """Delete in a span; or do nothing and return the key at which to divide it."""
        collected = await self._differences(span)
        if isinstance(collected, pa.Scalar):
            return collected
        sums, deleted = collected
        for key, positions in deleted:
            self._positions[key].append(positions)
        copies = await self._compute(_above_zero, sums)
        if copies.num_rows:
            await self.missing(copies)
        surplus = await self._compute(Surplus.of, sums)
        if surplus is not None:
            await self._delete(surplus)
        return None

    async def _differences(self, span: KeySpan) -> Any:
        """The sums of the differences in a span, and the hidden positions; or a key."""
        schema, condition = self.fetch.schema, span.condition
        inline = [named for named in self.parts if named[1].key is None]
        seen = await self.fetch.table(inline, Selection(as_of=self.as_of, where=condition), self.reader)
        tables, size, limit = [seen.select(["key", "val", "diff"])], 0, self.limit
        deleted: list[tuple[str, Positions]] = []
        for named in self.parts:
            part, dirty = named[1], Dirty.of(named, self.as_of)
            if part.key is None or (dirty is not None and not dirty.may_be_in(part.stats)):
                continue
            async with aclosing(self._placed(named, dirty, condition)) as placed_tables:
                async for table in placed_tables:
                    positions, rows = await self._compute(_hidden_and_differences, table, part, self.as_of)
                    deleted.append((part.key, positions))
                    tables.append(rows)
                    size += rows.nbytes
                    if size > limit:
                        tables = [await self._compute(summed, tables, schema)]
                        size = tables[0].nbytes
                        split = await self._compute(_middle, tables[0]) if size > self.limit // 2 else None
                        if split is not None:
                            return split
                        limit = max(self.limit, 2 * size)
        return await self._compute(summed, tables, schema), deleted

    async def _delete(self, surplus: Surplus) -> None:
        """Delete copies that are too many, wherever they are."""
        for named in self.parts:
            part = named[1]
            if part.key is None or not await self._compute(surplus.keys.may_be_in, part.stats):
                continue
            async with aclosing(self._placed(named, surplus.keys, None)) as placed_tables:
                async for table in placed_tables:
                    positions = await self._compute(_surplus_positions, table, part, self.as_of, surplus)
                    self._positions[part.key].append(positions)
                    if surplus.first_needed is None:
                        return
        raise await self._compute(_negative, surplus, self.fetch)

    async def _placed(self, named: Named, chooser: Any, condition: Any) -> AsyncGenerator[pa.Table, None]:
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
                    yield await self._compute(
                        _decoded,
                        index,
                        (offset, data),
                        number,
                        schema,
                        firsts[number],
                        fetch.schema,
                        condition,
                    )

    async def _compute(self, work: Callable[..., T], *args: Any) -> T:
        return await self.fetch.stack.compute(work, *args)


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
    row = surplus.first_needed
    assert row is not None
    key, val = (to_json(surplus.rows.column(name)[row]) for name in ("key", "val"))
    return NegativeMultiplicity(key, val, shard_id=fetch.shard.id)
