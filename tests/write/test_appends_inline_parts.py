"""Inline parts, append, product times, write; see `test_appends.py`."""

import asyncio
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.internals import stack_of
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, open_at, rows, shard_of, updates_of
from tests.write.appends_kit import left_behind

# --- inline parts -------------------------------------------------------------------------------------


async def test_the_state_stays_bounded_and_reads_do_not_notice(location: StoreUrls) -> None:
    """Goal: beyond the total, inline parts are merged into blobs; every time reads as before."""
    limits = {"inline_writes_single_max_bytes": 600, "inline_writes_total_max_bytes": 3000}
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        for n in range(12):
            text = f"{n:02}" + "x" * 150
            await w.compare_and_append([(text, n, n, 1), ("sum", 0, n, 1)], n, n + 1)
            assert shard_of(client).state.inline_bytes <= 3000 + 600
        state = await shard_of(client).open()
        assert len([key async for key, _ in stack_of(client).blob.list("") if key.endswith(".parquet")]) >= 1
        assert any(part.key for batch in state.batches.values() for part in batch.parts)
        for n in range(12):
            found = await rows(client, n)
            assert len(found) == n + 2
            assert found[-1] == ("sum", 0, n + 1)
        assert len(await updates_of(client)) == 24


async def test_writes_that_were_moved_in_time_are_flushed_as_they_are_read(mem: ap.Client) -> None:
    """Goal: a part whose times are rewritten on reading keeps the rewritten ones in the merged blob."""
    limits = ap.Settings(inline_writes_single_max_bytes=600, inline_writes_total_max_bytes=3000)
    async with ap.open("mem://", settings=limits) as client:
        writers = [await client.writer("t", SCHEMA) for _ in range(4)]

        async def write(number: int) -> list[int]:
            return [await writers[number].write([(f"{number}-{n}", 0)]) for n in range(15)]

        times = await asyncio.gather(*map(write, range(4)))
        expected = sorted((f"{w}-{n}", 0, t, 1) for w, ts in enumerate(times) for n, t in enumerate(ts))
        assert await updates_of(client) == expected
        assert any(p.key for b in shard_of(client).state.batches.values() for p in b.parts)


@pytest.mark.parametrize("size", [10, 15_000, 20_000])
async def test_small_is_inline_and_large_is_a_blob(mem: ap.Client, size: int) -> None:
    async with mem.writer("t", SCHEMA) as w:
        await w.compare_and_append([("x" * size, 1, 0, 1)], 0, 1)
        _, _, blobs = await left_behind(mem)
        assert len(blobs) == (1 if size > 16384 else 0)
        assert await rows(mem) == [("x" * size, 1, 1)]


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
@pytest.mark.parametrize("form", [list, iter], ids=["tiny", "general"])
async def test_the_size_of_one_update_is_bounded(inline: int, form: Any) -> None:
    limits = ap.Settings(update_size_max=100, inline_writes_single_max_bytes=inline)
    async with ap.open("mem://", settings=limits) as client, client.writer("t", SCHEMA) as w:
        before = await left_behind(client)
        with pytest.raises(ap.InvalidUpdate) as caught:
            await w.compare_and_append(form([("a", 1, 0, 1), ("x" * 101, 1, 0, 1)]), 0, 1)
        assert caught.value.row == 1
        with pytest.raises(ap.InvalidUpdate):
            await w.write(form([("x" * 101, 1)]))
        assert await left_behind(client) == before
        await w.compare_and_append(form([("x" * 80, 1, 0, 1)]), 0, 1)


# --- append -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_replicas_write_the_same_data_once(location: StoreUrls, inline: int) -> None:
    """Goal: overlapping and repeated appends of definite data, racing from two clients, land once."""
    data = [(f"k{n}", n, n, 1) for n in range(30)]

    async def replica(client: ap.Client, width: int) -> None:
        async with client.writer("t", SCHEMA) as w:
            for lower in range(0, 30, width):
                upper = min(lower + width, 30)
                await w.append([u for u in data if lower <= u[2] < upper], lower, upper)

    limits = {"inline_writes_single_max_bytes": inline}
    async with open_at(location, **limits) as one, open_at(location, **limits) as two:
        await asyncio.gather(replica(one, 4), replica(two, 7), replica(two, 5))
        assert await updates_of(one) == sorted(data)


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_append_drops_what_is_covered(location: StoreUrls, inline: int) -> None:
    async with open_at(location, inline_writes_single_max_bytes=inline) as client:
        async with client.writer("t", SCHEMA) as w:
            await w.append([("a", 1, 0, 1), ("b", 1, 4, 1)], 0, 5)
            before = await left_behind(client)
            await w.append([("a", 1, 0, 1), ("b", 1, 4, 1)], 0, 5)  # again
            await w.append([("a", 1, 0, 1)], 0, 3)  # a part of it
            await w.append([], 5, 5)
            assert await left_behind(client) == before
            await w.append([("b", 1, 4, 1), ("c", 1, 5, 1), ("d", 1, 9, 1)], 3, 10)
            assert w.upper == f(10)
            with pytest.raises(ap.UpperMismatch) as caught:
                await w.append([("e", 1, 12, 1)], 12, 13)
            assert (caught.value.expected, caught.value.current) == (f(12), f(10))
            with pytest.raises(ap.InvalidUsage) as usage:
                await w.append([], 12, 11)
            assert usage.value.kind is KIND.INVALID_BOUNDS
            with pytest.raises(ap.InvalidUpdate):
                await w.append([("a", "x", 0, 1)], 0, 3)  # checked, though covered
        assert await updates_of(client) == [("a", 1, 0, 1), ("b", 1, 4, 1), ("c", 1, 5, 1), ("d", 1, 9, 1)]


async def test_append_of_product_times(mem: ap.Client) -> None:
    """Goal: covered, overlapping and incomparable uppers of a partial order."""
    async with mem.writer("t", PRODUCT) as w:
        await w.append([("a", 1, (0, 0), 1)], (0, 0), f((0, 2), (2, 0)))
        before = await left_behind(mem)
        await w.append([("a", 1, (0, 0), 1)], (0, 0), f((0, 1), (1, 0)))
        assert await left_behind(mem) == before
        for lower, upper in (((1, 1), (5, 5)), ((0, 0), (1, 1))):
            with pytest.raises(ap.UpperMismatch):
                await w.append([], lower, upper)
        await w.append([("a", 1, (0, 0), 1), ("b", 1, (2, 2), 1)], (0, 0), (3, 3))
        assert await rows(mem, (2, 2), PRODUCT) == [("a", 1, 1), ("b", 1, 1)]


# --- product times ------------------------------------------------------------------------------------


async def test_product_times(client: ap.Client) -> None:
    async with client.writer("t", PRODUCT) as w:
        assert w.upper == f((0, 0))
        await w.compare_and_append([("a", 1, (0, 0), 1), ("b", 2, (0, 5), 1)], (0, 0), f((1, 0), (0, 6)))
        await w.compare_and_append([("a", 1, (0, 9), -1)], f((1, 0), (0, 6)), f((1, 0)))
        assert await rows(client, (0, 5), PRODUCT) == [("a", 1, 1), ("b", 2, 1)]
        assert await rows(client, (0, 9), PRODUCT) == [("b", 2, 1)]
        for call, kind in (
            (lambda: w.compare_and_append([], f((1, 0)), f((0, 1))), KIND.INVALID_BOUNDS),  # incomparable
            (lambda: w.compare_and_append([], 1, 2), KIND.INVALID_TIME),
            (lambda: w.compare_and_append([], (1, 0, 0), (2, 0, 0)), KIND.INVALID_TIME),
            (lambda: w.write([("a", 1)]), KIND.INVALID_TIME),
            (
                lambda: w.compare_and_append([("a", 1, (0, 7), 1)], (1, 0), (2, 0)),
                KIND.UPDATE_NOT_BEYOND_LOWER,
            ),
            (lambda: w.compare_and_append([("a", 1, (2, 7), 1)], (1, 0), (2, 0)), KIND.UPDATE_BEYOND_UPPER),
        ):
            with pytest.raises(ap.InvalidUsage) as caught:
                await call()
            assert caught.value.kind is kind
        for bad in ((0, 1, 2), 1, [1, 0], (-1, 0), (2**63, 0)):
            with pytest.raises(ap.InvalidUpdate):
                await w.compare_and_append([("a", 1, bad, 1)], (1, 0), (2, 0))


# --- write --------------------------------------------------------------------------------------------


async def test_writes_of_a_moment_share_a_commit(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        assert await w.write([("a", 1)]) == 0
        seqno = (await left_behind(client))[0]
        calls = [w.write([(f"{n}", n, 2)]) for n in range(40)]
        times = await asyncio.gather(*calls)
        assert (await left_behind(client))[0] - seqno <= 2
        assert set(times) <= {1, 2}
        await w.write([("a", 1)], diff=-1)
        await w.write(pa.table({"key": ["z"], "val": [1]}), diff=5)
        await w.write(pa.table({"key": ["y"], "val": [1], "diff": [7]}))
        found = await rows(client)
        assert found[-2:] == [("y", 1, 7), ("z", 1, 5)]
        assert len(found) == 42


async def test_a_bad_write_fails_alone(mem: ap.Client) -> None:
    async with mem.writer("t", SCHEMA) as w:
        calls = [w.write([("a", 1)]), w.write([("b", "x")]), w.write([("c", 1, None)]), w.write([("d", 1)])]
        one, two, three, four = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, four) == (0, 0)
        assert isinstance(two, ap.InvalidUpdate) and two.row == 0
        assert isinstance(three, ap.InvalidUpdate)
        with pytest.raises(ap.InvalidUsage):
            await w.write([("a", 1)], txn=("a",))  # type: ignore[arg-type]
        with pytest.raises(ap.InvalidUpdate):
            await w.write(pa.table({"key": ["a"], "val": [1], "time": [4]}))
        assert await rows(mem) == [("a", 1, 1), ("d", 1, 1)]


async def test_writes_race_with_everybody(location: StoreUrls) -> None:
    """Goal: two clients and a compare-and-append in the way: each write is there, at the time it was told."""
    async with open_at(location) as one, open_at(location) as two:

        async def writes(client: ap.Client, name: str) -> list[Any]:
            async with client.writer("t", SCHEMA) as w:
                return [(f"{name}{n}", 0, await w.write([(f"{name}{n}", 0)]), 1) for n in range(6)]

        async def hurry() -> None:
            async with two.writer("t", SCHEMA) as w:
                for _ in range(6):
                    try:
                        await w.compare_and_append([], w.upper, w.upper.time + 10)
                    except ap.UpperMismatch:
                        pass

        *written, _ = await asyncio.gather(
            writes(one, "a"), writes(one, "b"), writes(two, "c"), writes(two, "d"), hurry()
        )
        assert await updates_of(one) == sorted(row for part in written for row in part)


async def test_a_write_of_nothing_commits_nothing(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        before = await left_behind(client)
        assert await w.write([]) == 0
        assert await left_behind(client) == before
        await w.compare_and_append([], 0, 10)
        before = await left_behind(client)
        assert await w.write([]) == 9
        assert await left_behind(client) == before
        assert await w.write([], txn=("app", 1)) == 10
        assert w.upper == f(11)
        assert await w.write([], txn=("app", 1)) >= 10


@pytest.mark.parametrize("end", ["finished", "dropped"])
async def test_a_write_that_cannot_begin_is_told(mem: ap.Client, end: str) -> None:
    """Goal: if the turn itself fails, every waiting call gets the error, and no task spins."""
    async with mem.writer("t", SCHEMA) as w:
        if end == "finished":
            await w.compare_and_append([], 0, f())
        else:
            await mem.drop("t")
        calls = [asyncio.create_task(w.write([("a", n)])) for n in range(3)]
        async with asyncio.timeout(50):
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ap.UpperMismatch if end == "finished" else ap.ShardFinalized)
