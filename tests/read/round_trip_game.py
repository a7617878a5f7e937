"""A game of random schemas and rows, which are written by every call, under random limits, and read by
every call, between compactions, and compared with a list of updates in plain Python. All of it comes from
a seed."""

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pyarrow as pa

import aiopersist as ap
from aiopersist.data.updates import consolidate
from tests.read.round_trip_reads import Reads
from tests.read.round_trip_values import INT_MAX, Values, adapted, python_value, stored

Row = tuple[Any, Any, Any, int]
Time = int | tuple[int, int]


class Shard:
    """One shard, and what it should hold."""

    def __init__(self, name: str, values: Values, time: int) -> None:
        self.name = name
        self.time = time
        self.fields = [_field(values, "key"), _field(values, "val")]
        self.versions = [self.fields]
        self.rows: list[Row] = []
        self.upper = 0
        self.since = 0
        self.writers: list[tuple[Any, list[pa.Field]]] = []

    def schema(self) -> ap.Schema[Any, Any, Any]:
        return ap.Schema(*self.fields, time=self.time)

    def frontier(self, at: int) -> ap.Antichain:
        """For product times: those of which the greatest component is at least `at`."""
        if self.time == 1 or at == 0:
            return ap.Antichain(at if self.time == 1 else (0, 0))
        return ap.Antichain((0, at), (at, 0))

    def advanced(self, time: Time) -> Time:
        return ap.advance(time, self.frontier(self.since))

    def evolve(self, fields: list[pa.Field]) -> None:
        self.rows = [
            (
                *(adapted(f.type, g.type, v) for f, g, v in zip(self.fields, fields, row[:2], strict=True)),
                *row[2:],
            )
            for row in self.rows
        ]
        self.fields = fields
        self.versions.append(fields)


def _field(values: Values, name: str) -> pa.Field:
    while True:
        field = values.field(name, depth=values.rng.choice([0, 1, 2, 3]))
        try:
            ap.Schema(field, None)
        except TypeError:
            continue
        return field


class Game:
    """See the header. `play` raises `AssertionError` where what is read is not what was written."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.values = Values(rng, far=rng.random() < 0.3)
        self.time = rng.choice([1, 1, 1, 2])
        self.diffs = rng.choice([[1, -1, 2], [1, -1, 2], [1, -1, INT_MAX, -INT_MAX - 1]])
        self.shards = [Shard("one", self.values, self.time), Shard("two", self.values, self.time)]
        self.many = [12] if rng.random() < 0.9 else [60, 300]
        """Rows of the larger appends; where each is a part of its own there are few."""
        few = self.many == [12]
        self.pool: dict[str, list[Any]] = {}
        self.settings = ap.Settings(
            inline_writes_single_max_bytes=rng.choice([0, 0, 300, 16384]),
            inline_writes_total_max_bytes=rng.choice([600, 3000, 1 << 20]),
            blob_target_size=rng.choice([0, 100, 1000, 1 << 27] if few else [20000, 1 << 27]),
            row_group_bytes=rng.choice([1, 100, 1 << 23] if few else [2000, 1 << 23]),
            stats_budget_bytes=rng.choice([0, 100, 1024]),
            compaction_memory_bytes=rng.choice([1, 64 * 2000, 1 << 28]),
            read_memory_bytes=rng.choice([1, 1 << 28]),
            rollup_every=rng.choice([1, 128]),
        )

    async def play(self, patch: Callable[[Any, str, Any], None]) -> None:
        patch(consolidate, "TUPLE_ROWS_MAX", self.rng.choice([0, 3, 24]))
        async with ap.open("mem://", settings=self.settings, maintenance=False) as client:
            self.client = client
            for shard in self.shards:
                shard.writers.append((await client.writer(shard.name, shard.schema()), shard.fields))
                reader = await client.reader(shard.name, hold=shard.frontier(0))
                shard.holder = reader
            for _ in range(self.rng.choice([1, 2, 3, 5])):
                await self._turn()
            for shard in self.shards:
                await self._check(shard)
                await client.admin.force_compaction(shard.name)
                await self._check(shard)
                report = await client.admin.fsck(shard.name)
                assert report.ok, report.problems

    async def _turn(self) -> None:
        shard, dice = self.rng.choice(self.shards), self.rng.random()
        if dice < 0.12:
            await self._evolve(shard)
        elif dice < 0.22:
            await self.client.admin.force_compaction(shard.name)
        elif dice < 0.32 and shard.upper > 1:
            shard.since = self.rng.randrange(shard.since, shard.upper)
            await shard.holder.downgrade_since(shard.frontier(shard.since))  # type: ignore[attr-defined]
        elif dice < 0.42:
            await self._check(shard)
        elif dice < 0.5:
            await self._append_many()
        else:
            await self._append(shard)

    # --- writing -----------------------------------------------------------------------------------

    async def _evolve(self, shard: Shard) -> None:
        fields = [f.with_type(self.values.evolved(f.type)) for f in shard.fields]
        number, _ = await self.client.schema(shard.name)
        try:
            wanted = ap.Schema(*fields, time=self.time)
        except TypeError:
            return
        await self.client.compare_and_evolve_schema(shard.name, number, wanted)
        shard.evolve(fields)
        self.pool.clear()
        shard.writers.append((await self.client.writer(shard.name, wanted), fields))

    def _rows(self, shard: Shard, fields: list[pa.Field], lower: int, upper: int) -> list[Row]:
        n = self.rng.choice([0, 1, 2, 5, *self.many]) if upper > lower else 0
        key, val = (self._pool(shard, f) for f in fields)
        choice = self.rng.choice
        return [(choice(key), choice(val), self._time(lower, upper), choice(self.diffs)) for _ in range(n)]

    def _pool(self, shard: Shard, field: pa.Field) -> list[Any]:
        """Few values, so that updates meet."""
        name = f"{shard.name}{field}"
        if name not in self.pool:
            self.pool[name] = [self.values.value(field) for _ in range(self.rng.choice([1, 3, 10, 40]))]
        return self.pool[name]

    def _time(self, lower: int, upper: int) -> Time:
        high = self.rng.randrange(lower, upper)
        if self.time == 1:
            return high
        low = self.rng.randrange(high + 1)
        return self.rng.choice([(low, high), (high, low)])

    async def _append(self, shard: Shard) -> None:
        writer, fields = self.rng.choice(shard.writers)
        lower, upper = shard.upper, shard.upper + self.rng.choice([1, 1, 3, 10])
        if self.rng.random() < 0.05:
            upper += 2**62 // 32  # times that are large
        ways = [self._whole, self._built, self._transmitted, self._wider]
        if self.time == 1:
            ways += [self._written, self._rewritten]
        rows = await self.rng.choice(ways)(shard, writer, fields, lower, upper)
        self._took(shard, fields, rows, max(upper, shard.upper))

    def _took(self, shard: Shard, fields: list[pa.Field], rows: list[Row], upper: int) -> None:
        types = list(zip(fields, shard.fields, strict=True))
        shard.upper = upper
        for key, val, time, diff in rows:
            both = [
                adapted(f.type, g.type, stored(f.type, v))
                for (f, g), v in zip(types, (key, val), strict=True)
            ]
            shard.rows.append((*both, time, diff))

    async def _whole(self, shard: Shard, w: Any, fields: Any, lower: int, upper: int) -> list[Row]:
        rows = self._rows(shard, fields, lower, upper)
        given = self._given(fields, rows)
        await w.compare_and_append(given, shard.frontier(lower), shard.frontier(upper))
        return rows

    async def _built(self, shard: Shard, w: Any, fields: Any, lower: int, upper: int) -> list[Row]:
        rows = self._rows(shard, fields, lower, upper)
        batch = await self._batch(shard, w, fields, rows, lower, upper)
        await w.append_batch(batch, shard.frontier(lower), shard.frontier(upper))
        return rows

    async def _batch(self, shard: Shard, w: Any, fields: Any, rows: list[Row], lower: int, upper: int) -> Any:
        async with w.builder(shard.frontier(lower)) as builder:
            rest = rows
            while rest:
                n = self.rng.choice([1, 1, 3, 10, 60])
                some, rest = rest[:n], rest[n:]
                python = self._python(fields, some)
                if python is not None and self.rng.random() < 0.4:
                    for row in python:
                        await builder.add(*row)
                else:
                    await builder.extend(self._given(fields, some))
            return await builder.finish(shard.frontier(upper))

    async def _transmitted(self, shard: Shard, w: Any, fields: Any, lower: int, upper: int) -> list[Row]:
        rows = self._rows(shard, fields, lower, upper)
        batches = []
        for part in (rows[::2], rows[1::2]):
            batch = await self._batch(shard, w, fields, part, lower, upper)
            batches.append(await w.batch_from_transmittable(batch.to_transmittable()))
            if self.rng.random() < 0.3:
                await batches[-1].flush_to_blob()
        await w.compare_and_append_batch(batches, shard.frontier(lower), shard.frontier(upper))
        return rows

    async def _wider(self, shard: Shard, w: Any, fields: Any, lower: int, upper: int) -> list[Row]:
        least = self.rng.choice([0, lower])
        most = upper + self.rng.choice([0, 2])
        rows = self._rows(shard, fields, least, most)
        batch = await self._batch(shard, w, fields, rows, least, most)
        await w.append_batch(batch, shard.frontier(least), shard.frontier(upper))
        return [row for row in rows if lower <= _greatest(row[2]) < upper]

    async def _rewritten(self, shard: Shard, w: Any, fields: Any, lower: int, upper: int) -> list[Row]:
        rows = self._rows(shard, fields, lower, upper)
        batch = await self._batch(shard, w, fields, rows, lower, upper)
        target = upper + self.rng.choice([0, 1])
        batch.rewrite_ts(target, target + 1)
        if self.rng.random() < 0.3:
            await batch.flush_to_blob()
        await w.append_batch(batch, lower, target + 1)
        shard.upper = target + 1
        return [(key, val, target, diff) for key, val, _, diff in rows]

    async def _written(self, shard: Shard, w: Any, fields: Any, lower: int, upper: int) -> list[Row]:
        rows = self._rows(shard, fields, lower, lower + 1)
        python = self._python(fields, rows)
        if python is None or self.rng.random() < 0.5:
            given = self._table(fields, rows).drop_columns(["time"])
        else:
            given = [(key, val, diff) for key, val, _, diff in python]
        time = await w.write(given)
        rows = [(key, val, time, diff) for key, val, _, diff in rows]
        await w.compare_and_append([], w.upper, upper + 1)
        shard.upper = upper + 1
        return rows

    async def _append_many(self) -> None:
        appends, told = [], []
        for shard in self.shards:
            w, fields = self.rng.choice(shard.writers)
            lower, upper = shard.upper, shard.upper + 2
            rows = self._rows(shard, fields, lower, upper)
            given: Any = self._given(fields, rows)
            if self.rng.random() < 0.4:
                given = await self._batch(shard, w, fields, rows, lower, upper)
            appends.append(ap.Append(w, given, shard.frontier(lower), shard.frontier(upper)))
            told.append((shard, fields, rows, upper))
        await self.client.compare_and_append_many(appends)
        for one in told:
            self._took(*one)

    # --- the forms of rows -------------------------------------------------------------------------

    def _given(self, fields: list[pa.Field], rows: list[Row]) -> Any:
        python, way = self._python(fields, rows), self.rng.randrange(8)
        if python is not None and way < 3:
            return [python, tuple(python), iter(python)][way]
        table = self._table(fields, rows)
        if way == 3:
            return table.to_reader()
        if way == 4:
            return iter(table.to_batches())
        if way == 5 and python is not None:
            cut = len(rows) // 2
            return _later([table.slice(0, cut), *python[cut:]])
        return pa.RecordBatchReader.from_batches(table.schema, table.to_batches()) if way == 6 else table

    def _table(self, fields: list[pa.Field], rows: list[Row]) -> pa.Table:
        time = pa.int64() if self.time == 1 else pa.list_(pa.int64(), 2)
        schema = pa.schema([*fields, pa.field("time", time), pa.field("diff", pa.int64())])
        times = [pa.array([row[i] for row in rows], schema.field(i).type) for i in (2, 3)]
        halves = [self._column(field, [row[i] for row in rows]) for i, field in enumerate(fields)]
        return pa.table([*halves, *times], ["key", "val", "time", "diff"])

    def _column(self, field: pa.Field, values: list[Any]) -> pa.ChunkedArray:
        n = self.rng.choice([1, 7, 100])
        arrays = [self.values.array(field, values[i : i + n]) for i in range(0, len(values), n)]
        if len({array.type for array in arrays}) != 1:
            arrays = [self.values.array(field, values)]
        return pa.chunked_array(arrays)

    def _python(self, fields: list[pa.Field], rows: list[Row]) -> list[Any] | None:
        try:
            return [
                (*(python_value(f.type, v) for f, v in zip(fields, row[:2], strict=True)), *row[2:])
                for row in rows
            ]
        except (OverflowError, ValueError):
            return None

    # --- reading -----------------------------------------------------------------------------------

    async def _check(self, shard: Shard) -> None:
        if not shard.upper:
            return
        reads = Reads(self.rng, self.client, shard, self.values)
        for _ in range(self.rng.choice([1, 2])):
            await reads.read()


def _greatest(time: Time) -> int:
    return max(time) if isinstance(time, tuple) else time


async def _later(items: list[Any]) -> AsyncIterator[Any]:
    for item in items:
        await asyncio.sleep(0)
        yield item
