"""Life, cost; see `test_snapshots.py`."""

import asyncio
import random
import uuid
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.read.snapshots_kit import BOUNDS, filled, random_history
from tests.support.internals import shard_of
from tests.support.schemas import INT_MAX, SCHEMA
from tests.support.shards import rows_until


def requests(client: ap.Client) -> dict[str, int]:
    return {op: client.metrics[op].count for op in client.metrics if op != "consensus.now"}


# --- life ---------------------------------------------------------------------------------------------


async def test_it_stays_what_it_is(client: ap.Client) -> None:
    """While others append, and give up its history."""
    writer = await filled(client, 5)
    reader = await client.reader("s", SCHEMA)
    mover = await client.reader("s", SCHEMA, hold=0)
    async with reader.snapshot(3) as snapshot:
        rows = aiter(snapshot)
        first = await anext(rows)
        await writer.compare_and_append([("a", 0, 5, 1), ("k", 1, 5, -1)], 5, 6)
        await mover.downgrade_since(5)
        assert [first, *[row async for row in rows]] == rows_until(3)
        assert await snapshot.rows() == rows_until(3)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
async def test_iterations_survive_cancelled_waits(bounds: Any) -> None:
    """Every row once, in order, however often a wait is given up."""
    rng, url = random.Random(3), f"mem://{uuid.uuid4().hex}"
    faults = Faults(latency_s=(0, 0.002))
    blob, consensus = FaultyBlob(ap.open_blob(url), faults), FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(blob_cache_bytes=0, **bounds)
    async with ap.open(blob=blob, consensus=consensus, settings=options) as client:
        model = await random_history(client, rng)
        reader = await client.reader("s", SCHEMA)
        async with reader.snapshot() as snapshot:
            for items in (aiter(snapshot), snapshot.batches()):
                seen: list[Any] = []
                while True:
                    try:
                        async with asyncio.timeout(rng.choice([0, 0.0005, 0.002])):
                            seen.append(await anext(items))  # type: ignore[call-overload]
                    except TimeoutError:
                        continue
                    except StopAsyncIteration:
                        break
                rows = (
                    seen
                    if seen and isinstance(seen[0], tuple)
                    else [tuple(r.values()) for b in seen for r in b.to_pylist()]
                )
                assert rows == model.contents(snapshot.as_of)


async def test_closing_ends_every_use(client: ap.Client) -> None:
    await filled(client)
    reader = await client.reader("s", SCHEMA)
    snapshot = await reader.snapshot(4)
    rows, batches = aiter(snapshot), snapshot.batches()
    await anext(rows)
    await snapshot.aclose()
    await snapshot.aclose()
    calls = [snapshot.rows, snapshot.to_arrow, snapshot.to_polars, snapshot.to_pandas]
    calls += [lambda: anext(rows), lambda: anext(batches), lambda: anext(aiter(snapshot))]
    for call in calls:
        with pytest.raises(ap.InvalidUsage, match="CLOSED"):
            await call()
    assert not shard_of(reader).register.pins
    async with reader.snapshot(4) as again:
        assert await again.rows() == rows_until(4)


async def test_an_iteration_that_failed_does_not_look_like_one_that_ended(mem: ap.Client) -> None:
    writer = await mem.writer("s", SCHEMA)
    await writer.compare_and_append([("k", 1, 0, INT_MAX), ("k", 1, 1, 1)], 0, 2)
    async with (await mem.reader("s", SCHEMA)).snapshot() as snapshot:
        rows = aiter(snapshot)
        for _ in range(3):
            with pytest.raises(ap.DiffOverflow):
                await anext(rows)


async def test_a_lost_part_is_never_an_empty_one() -> None:
    """The store lost it while the reader is registered: `Corruption`."""
    url = f"mem://{uuid.uuid4().hex}"
    blob = ap.open_blob(url)
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0)
    async with ap.open(blob=blob, consensus=ap.open_consensus(url), settings=options) as client:
        await filled(client, 3)
        reader = await client.reader("s", SCHEMA)
        parts = [key async for key, _ in blob.list("") if key.endswith(".parquet")]
        snapshot = await reader.snapshot(2)
        await blob.delete(parts[1:2])
        for _ in range(2):
            with pytest.raises(ap.Corruption) as caught:
                await snapshot.rows()
            assert caught.value.shard_id == reader.shard_id
        with pytest.raises(ap.Corruption):
            async for _ in snapshot:
                pass


# --- cost ---------------------------------------------------------------------------------------------


async def test_a_known_complete_time_of_inline_data_costs_no_request(location: Any) -> None:
    async with ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as client:
        writer = await filled(client)
        reader = await client.reader("s", SCHEMA)
        before = requests(client)
        for time in (0, 4, 2):
            async with reader.snapshot(time) as snapshot:
                assert await snapshot.rows() == rows_until(time)
                assert [row async for row in snapshot] == rows_until(time)
        assert requests(client) == before
        async with reader.snapshot() as snapshot:  # one linearizable read
            await snapshot.rows()
        after = requests(client)
        assert sum(after.values()) - sum(before.values()) == 1
        await writer.aclose()


async def test_parts_cost_at_most_two_requests_each(location: Any) -> None:
    options = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0)
    place = {"blob": location.blob, "consensus": location.consensus}
    async with ap.open(**place, settings=options, maintenance=False) as client:
        await filled(client, 6)
        reader = await client.reader("s", SCHEMA)
        for form in ("rows", "batches"):
            before = requests(client)
            async with reader.snapshot(3) as snapshot:  # four parts; those after it are not touched
                if form == "rows":
                    assert await snapshot.rows() == rows_until(3)
                else:
                    assert sum([b.num_rows async for b in snapshot.batches()]) == 4
            asked = {op: count - before.get(op, 0) for op, count in requests(client).items()}
            assert sum(asked.values()) == 4, asked


@pytest.mark.parametrize(
    ("runs", "row_group", "memory"),
    [(3, 64 * 1024, 2**28), (40, 64 * 1024, 2**28), (8, 2**22, 2**21)],
    ids=["few runs", "many runs", "large row groups"],
)
async def test_batches_need_bounded_memory(runs: int, row_group: int, memory: int) -> None:
    """Many runs, as much again in each: what is held is a row group of each, or what a read may have."""
    rows = 240_000 // runs
    options = ap.Settings(
        read_memory_bytes=memory,
        inline_writes_single_max_bytes=0,
        row_group_bytes=row_group,
        blob_cache_bytes=0,
        blob_target_size=2**30,
    )
    schema = ap.Schema(key=bytes, val=int)
    async with ap.open("mem://", settings=options, maintenance=False) as client:
        writer = await client.writer("big", schema)
        for run in range(runs):
            keys = [b"%032d" % ((i * 7919 + run) % 1_000_003) for i in range(rows)]
            table = pa.table(
                {
                    "key": keys,
                    "val": pa.array([run] * rows),
                    "time": pa.array([run] * rows),
                    "diff": pa.array([1] * rows),
                }
            )
            await writer.compare_and_append(table, run, run + 1)
            del table, keys
        reader = await client.reader("big", schema)
        async with reader.snapshot() as snapshot:
            total = (await snapshot.to_arrow()).nbytes
            pa.default_memory_pool().release_unused()
            before, peak, seen, last = pa.total_allocated_bytes(), 0, 0, b""
            async for batch in snapshot.batches():
                assert batch.column("key")[0].as_py() >= last
                last = batch.column("key")[-1].as_py()
                seen += batch.num_rows
                peak = max(peak, pa.total_allocated_bytes() - before)
            assert seen == runs * rows
            assert total > 12_000_000
            assert peak < max(total // 4, min(6 * runs * row_group, 2 * memory)), (peak, total)
