"""Every way to read a shard of a game, compared with the rows that it should hold."""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aiopersist as ap
from tests.read.round_trip_values import (
    INT_MAX,
    NAN,
    Values,
    adapted,
    at,
    leaves,
    order,
    python_value,
    scalar,
    seen,
    stored,
)

Truth = bool | None
Condition = tuple[Any, Callable[[Any, Any], Truth]]
"""As the library takes it, and what it says of a key and a val."""


class Reads:
    def __init__(self, rng: Random, client: ap.Client, shard: Any, values: Values) -> None:
        self.rng = rng
        self.client = client
        self.shard = shard
        self.values = values
        self.version = rng.randrange(len(shard.versions)) if rng.random() < 0.3 else -1
        self.fields: list[pa.Field] = shard.versions[self.version]
        self.schema = ap.Schema(*self.fields, time=shard.time)

    async def read(self) -> None:
        """As a reader of some version of the schema."""
        as_of = self._as_of()
        async with self.client.reader(self.shard.name, self.schema) as r:
            async with r.snapshot(as_of) as s:
                await self._contents(s, as_of)
                await self._query(s, as_of)
            await self._changes(r, as_of)
        await self._pieces(as_of)

    def _as_of(self) -> Any:
        as_of = self.rng.randrange(self.shard.since, self.shard.upper)
        if self.shard.time == 1:
            return as_of
        return (as_of, self.rng.randrange(as_of + 1)) if as_of >= self.shard.since else as_of

    # --- what should be there ----------------------------------------------------------------------

    def _rows(self, newest: bool = False) -> list[Any]:
        """In the version that is read."""
        types = list(zip(self.shard.fields, self.shard.fields if newest else self.fields, strict=True))
        return [
            (*(adapted(f.type, g.type, v) for (f, g), v in zip(types, row[:2], strict=True)), *row[2:])
            for row in self.shard.rows
        ]

    def _expected(self, as_of: Any, newest: bool = False) -> Counter[Any]:
        sums: Counter[Any] = Counter()
        for key, val, time, diff in self._rows(newest):
            if _at_most(time, as_of):
                sums[key, val] += diff
        return Counter({row: diff for row, diff in sums.items() if diff})

    def _sorted(self, sums: Counter[Any], types: list[pa.DataType]) -> list[Any]:
        rows = [(*row, diff) for row, diff in sums.items()]
        return sorted(rows, key=lambda row: [order(t, v) for t, v in zip(types, row[:-1], strict=True)])

    # --- contents ----------------------------------------------------------------------------------

    async def _contents(self, s: Any, as_of: Any) -> None:
        sums = self._expected(as_of)
        if _overflows(sums):
            for read in (s.to_arrow, lambda: _batches(s.batches())):
                with pytest.raises(ap.DiffOverflow):
                    await read()
            return
        wanted = self._sorted(sums, [f.type for f in self.fields])
        assert rows_of(await s.to_arrow()) == wanted
        assert rows_of(await _batches(s.batches())) == wanted
        try:
            python = [
                (
                    *(python_value(f.type, _unstored(v)) for f, v in zip(self.fields, row[:2], strict=True)),
                    row[2],
                )
                for row in wanted
            ]
        except (OverflowError, ValueError):
            return
        assert repr(await s.rows()) == repr(python)

    async def _query(self, s: Any, as_of: Any) -> None:
        where, holds = self._condition(2)
        sums = Counter({row: n for row, n in self._expected(as_of).items() if holds(*row)})
        if _overflows(sums):
            return
        wanted = self._sorted(sums, [f.type for f in self.fields])
        try:
            found = await s.to_arrow(where)
        except ap.InvalidUsage:  # Arrow cannot compare some types
            return
        assert rows_of(found) == wanted, str(where)
        assert rows_of(await _batches(s.batches(where))) == wanted, str(where)
        await self._projected(s, where, sums)

    async def _projected(self, s: Any, where: Any, sums: Counter[Any]) -> None:
        found = [p for half in (0, 1) for p in leaves((("key", "val")[half],), self.fields[half].type)]
        paths = self.rng.sample(found, min(len(found), self.rng.choice([1, 2])))
        names = [".".join(path) for path, _ in paths]
        projected: Counter[Any] = Counter()
        for row, diff in sums.items():
            projected[tuple(self._at(row, path) for path, _ in paths)] += diff
        projected = Counter({row: n for row, n in projected.items() if n})
        if _overflows(projected):
            return
        try:
            table = await s.to_arrow(where, columns=names)
        except ap.InvalidUsage:
            return
        wanted = self._sorted(projected, [t for _, t in paths])
        assert rows_of(table) == wanted
        assert rows_of(await _batches(s.batches(where, columns=names))) == wanted

    def _at(self, row: Any, path: tuple[str, ...]) -> Any:
        half = int(path[0] == "val")
        return at(self.fields[half].type, row[half], path[1:])

    # --- conditions --------------------------------------------------------------------------------

    def _condition(self, depth: int, newest: bool = False) -> Condition:
        way = self.rng.randrange(5) if depth else 0
        if way < 2:
            return self._simple()
        (a, of_a), (b, of_b) = self._condition(depth - 1), self._condition(depth - 1)
        if way == 2:
            return a & b, lambda k, v: _and(of_a(k, v), of_b(k, v))
        if way == 3:
            return a | b, lambda k, v: _not(_and(_not(of_a(k, v)), _not(of_b(k, v))))
        return ~a, lambda k, v: _not(of_a(k, v))

    def _simple(self) -> Condition:
        found = [p for half in (0, 1) for p in leaves((("key", "val")[half],), self.fields[half].type)]
        path, t = self.rng.choice(found)
        field = pc.field(*path)
        op = self.rng.choice(["==", "!=", "<", "<=", ">", ">=", "null", "valid", "in"])
        if pa.types.is_nested(t) or pa.types.is_null(t) or op in ("null", "valid"):
            if op == "valid":
                return field.is_valid(), lambda k, v: self._at((k, v), path) is not None
            return field.is_null(), lambda k, v: self._at((k, v), path) is None
        pool = [self._at(row[:2], path) for row in self._rows()] + [self.values.present(t)]
        value = self.rng.choice([v for v in pool if v is not None] or [self.values.present(t)])
        if op == "in":
            some = [value, *self.rng.sample(pool, 1)]
            array = (
                pa.array([_not_negative_zero(scalar(t, v).as_py()) for v in some], t)
                if not pa.types.is_temporal(t)
                else (
                    pa.concat_arrays(
                        [pa.array([scalar(t, v)], t) if v is not None else pa.nulls(1, t) for v in some]
                    )
                )
            )
            told = {stored(t, v) for v in some}
            return field.isin(array), lambda k, v: self._at((k, v), path) in told
        return _compare(op, field, scalar(t, value)), lambda k, v: _compared(
            op, t, self._at((k, v), path), value
        )

    # --- changes, pieces ---------------------------------------------------------------------------

    async def _changes(self, r: Any, as_of: Any) -> None:
        """A listen from `as_of` gives all later updates, advanced to since."""
        seen_rows: Counter[Any] = Counter()
        async with r.listen(as_of) as listen:
            steps = listen.steps()
            while listen.frontier != self.shard.frontier(self.shard.upper):
                step = await anext(steps)
                for key, val, time, diff in rows_of(step.updates.to_arrow()):
                    seen_rows[key, val, time] += diff
        wanted: Counter[Any] = Counter()
        for key, val, time, diff in self._rows():
            if not _at_most(time, as_of):
                wanted[key, val, _joined(time, as_of)] += diff
        assert _nonzero(seen_rows) == _nonzero(wanted)

    async def _pieces(self, as_of: Any) -> None:
        sums = self._expected(as_of, newest=True)
        if _overflows(sums):
            return
        wanted = self._sorted(sums, [f.type for f in self.shard.fields])
        async with self.client.workers.shared_read(self.shard.name, as_of) as shared:
            found = []
            for piece in await shared.pieces(self.rng.choice([1, 2, 5, 20])):
                found += rows_of(await _batches(self.client.workers.read_piece(piece)))
        assert found == wanted


async def _batches(batches: Any) -> pa.Table | None:
    found = [batch async for batch in batches]
    return pa.Table.from_batches(found) if found else None


def rows_of(table: pa.Table | None) -> list[Any]:
    if table is None:
        return []
    for column in table.columns:
        column.validate(full=True)
    return list(zip(*([seen(v) for v in column] for column in table.columns), strict=True))


def _unstored(value: Any) -> Any:
    return value


def _nonzero(sums: Counter[Any]) -> dict[Any, int]:
    return {row: n for row, n in sums.items() if n}


def _overflows(sums: Counter[Any]) -> bool:
    return any(not -INT_MAX - 1 <= n <= INT_MAX for n in sums.values())


def _at_most(time: Any, as_of: Any) -> bool:
    if isinstance(time, tuple):
        return all(a <= b for a, b in zip(time, as_of, strict=True))
    return bool(time <= as_of)


def _joined(time: Any, as_of: Any) -> Any:
    return tuple(map(max, time, as_of)) if isinstance(time, tuple) else time


def _and(a: Truth, b: Truth) -> Truth:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def _not(a: Truth) -> Truth:
    return None if a is None else not a


def _compare(op: str, field: Any, value: pa.Scalar) -> Any:
    ways = {
        "==": lambda: field == value,
        "!=": lambda: field != value,
        "<": lambda: field < value,
        "<=": lambda: field <= value,
        ">": lambda: field > value,
        ">=": lambda: field >= value,
    }
    return ways[op]()


def _compared(op: str, t: pa.DataType, a: Any, b: Any) -> Truth:
    if a is None:
        return None
    if a is NAN or b is NAN:
        return op == "!="
    a, b = (order(t, v) for v in (a, b))
    return {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[op]


def _not_negative_zero(value: Any) -> Any:
    """-0.0 is stored as 0.0, and `isin` of Arrow tells them apart."""
    return value + 0.0 if isinstance(value, float) else value
