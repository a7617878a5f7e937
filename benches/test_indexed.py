"""Many streams in one `Indexed`: group commit beside one command at a time, many streams at the pace of
the clock, small commits in a large state, and the speed of draining and compaction."""

import asyncio
import random
import statistics
import time
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Stream
from benches.conftest import report

CALLERS = 100


async def compacted(ix: Indexed) -> int:
    """A step, and all that it asks for."""
    requests = await ix.step()

    async def one(request: Any) -> None:
        await ix.apply(request.stream, await ix.compact(request))

    await asyncio.gather(*map(one, requests))
    return len(requests)


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
def test_group_commit(place: Any, rounds: Any, run: Any, enabled: bool, capsys: Any) -> None:
    """A hundred callers at once, and one after the other; beside as many bare compare-and-sets."""
    times = iter(range(1, 10**9))

    async def life() -> tuple[Any, Any, Any, Any, Any]:
        client = await ap.open(blob=place.blob, consensus=place.consensus, maintenance=False)
        ix = await client.indexed("x", background=False)
        stream = await ix.register("s", str, int)
        consensus = ap.open_consensus(place.consensus)
        assert await consensus.compare_and_set("bare", None, b"x" * 600)
        return client, ix, stream, consensus, iter(range(10**9))

    client, ix, stream, consensus, seqnos = run(life())

    async def write() -> int:
        at = next(times)
        seqno: int = await ix.write([(stream, [("key", at, at, 1)])])
        return seqno

    versions: list[int] = []

    async def at_once() -> None:
        before = client.metrics["consensus.compare_and_set"].count
        seqnos = await asyncio.gather(*(write() for _ in range(CALLERS)))
        assert len(set(seqnos)) == CALLERS
        versions.append(client.metrics["consensus.compare_and_set"].count - before)

    async def one_by_one() -> None:
        for _ in range(CALLERS):
            await write()

    async def bare() -> None:
        for _ in range(CALLERS):
            assert await consensus.compare_and_set("bare", next(seqnos), b"x" * 600)

    contenders = {"bare compare-and-sets": bare, "one at a time": one_by_one, "at once": at_once}
    medians = rounds(contenders, 15 if enabled else 1)
    figures = {f"{name}, ms each": m * 1e3 / CALLERS for name, m in medians.items()}
    report(capsys, f"{CALLERS} writes", **figures, versions_at_once=versions[-1])
    assert versions[-1] <= 2
    run(consensus.aclose())
    run(client.aclose())
    if enabled:
        assert medians["at once"] < medians["one at a time"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_a_thousand_streams_at_the_pace_of_the_clock(
    place: Any, run: Any, enabled: bool, benchmark: Any, capsys: Any
) -> None:
    """Each of them is written and sealed by a call of its own every second, with the background task on."""
    streams, seconds = (1000, 60) if enabled else (50, 2)
    figures: dict[str, Any] = {}

    async def life() -> None:
        late = []
        async with (
            ap.open(blob=place.blob, consensus=place.consensus) as client,
            client.indexed("x") as ix,
        ):
            every = await asyncio.gather(*(ix.register(f"s{n}", str, int) for n in range(streams)))
            cas = client.metrics["consensus.compare_and_set"]
            begun, used, at_first = time.monotonic(), time.process_time(), cas.bytes
            for second in range(seconds):
                began = time.monotonic()
                await asyncio.gather(*(_turn(ix, stream, second) for stream in every))
                late.append(time.monotonic() - began)
                await asyncio.sleep(max(begun + second + 1 - time.monotonic(), 0))
            figures["behind the clock at the end, s"] = round(time.monotonic() - begun - seconds, 2)
            figures["all written and sealed after, s"] = round(statistics.median(late), 3)
            figures["slowest, s"] = round(max(late), 3)
            figures["cores used"] = round((time.process_time() - used) / (time.monotonic() - begun), 2)
            figures["versions"] = cas.count
            figures["bytes of versions per write"] = round((cas.bytes - at_first) / streams / seconds)
            figures["inline bytes in the state"] = ix._shard.state.inline_bytes
            counters = ix.counters()
            figures["compactions"] = counters["compactions"]
            assert counters["writes"] == streams * seconds
            assert counters["failed_steps"] == 0

    benchmark.pedantic(lambda: run(life()), rounds=1)
    report(capsys, f"{streams} streams, {seconds} s", **figures)


async def _turn(ix: Indexed, stream: Stream[str, int], second: int) -> None:
    await ix.write([(stream, [("key", second, second, 1)])])
    await ix.seal([stream], second + 1)
    await ix.allow_compaction([(stream, second)])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_small_commits_among_many_streams(
    place: Any, run: Any, enabled: bool, benchmark: Any, capsys: Any
) -> None:
    """An hour of steps, one a second: ten of the streams are written, sealed and drained in each. What a
    commit costs, and what it writes, stays what it is."""
    streams, steps = (1000, 3600) if enabled else (40, 40)
    figures: dict[str, Any] = {}

    async def life() -> None:
        seconds, sizes = [], []
        async with (
            ap.open(blob=place.blob, consensus=place.consensus, maintenance=False) as client,
            client.indexed("x", background=False) as ix,
        ):
            every = await asyncio.gather(*(ix.register(f"s{n}", str, int) for n in range(streams)))
            cas = client.metrics["consensus.compare_and_set"]
            for step in range(steps):
                some = random.Random(step).sample(every, 10)
                before, began = cas.bytes, time.perf_counter()
                await ix.write([(stream, [("key", step, step, 1)]) for stream in some])
                seconds.append(time.perf_counter() - began)
                sizes.append(cas.bytes - before)
                await ix.seal(some, step + 1)
                await ix.allow_compaction([(stream, step) for stream in some])
                await compacted(ix)
            assert (await ix.description("s0")).upper.time is not None
            figures["trace bytes at the end"] = ix.counters()["trace_bytes"]
        tenth = steps // 10
        halves = [
            statistics.median(part[at])
            for part in (seconds, sizes)
            for at in (slice(tenth, 2 * tenth), slice(-tenth, None))
        ]
        figures["commit, first tenth, ms"], figures["commit, last tenth, ms"] = (
            round(halves[0] * 1e3, 2),
            round(halves[1] * 1e3, 2),
        )
        figures["bytes written, first tenth"], figures["bytes written, last tenth"] = halves[2], halves[3]

    benchmark.pedantic(lambda: run(life()), rounds=1)
    report(capsys, f"{steps} small commits among {streams} streams", **figures)
    assert figures["bytes written, last tenth"] < 1.2 * figures["bytes written, first tenth"]
    if enabled:
        assert figures["commit, last tenth, ms"] < 2 * figures["commit, first tenth, ms"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["files+sqlite", "s3+postgres"], indirect=True)
def test_drain_and_compaction(place: Any, run: Any, enabled: bool, benchmark: Any, capsys: Any) -> None:
    """Updates in random order of times, sealed at once: written, drained, and made one batch; beside polars,
    which sorts the same in memory."""
    rows = 2_000_000 if enabled else 5_000
    chance = random.Random(1)
    figures: dict[str, Any] = {}

    def table(least: int) -> pa.Table:
        keys = pa.array([f"key-{chance.randrange(10**8):08}" for _ in range(rows)])
        times = pa.array([least + chance.randrange(100) for _ in range(rows)])
        ones = pa.array([1] * rows)
        return pa.table({"key": keys, "val": ones, "time": times, "diff": ones})

    async def life() -> None:
        first, second = table(0), table(100)
        async with (
            ap.open(blob=place.blob, consensus=place.consensus, maintenance=False) as client,
            client.indexed("x", background=False) as ix,
        ):
            stream = await ix.register("s", str, int)

            async def timed(what: str, n: int, work: Any) -> Any:
                began = time.perf_counter()
                result = await work
                figures[f"{what}, rows/s"] = f"{n / (time.perf_counter() - began):,.0f}"
                return result

            await timed("written", rows, ix.write([(stream, first)]))
            await ix.seal([stream], 100)
            await timed("drained", rows, ix.step())
            await ix.write([(stream, second)])
            await ix.seal([stream], 200)
            await ix.allow_compaction([(stream, 200)])
            (request,) = await ix.step()
            response = await timed("compacted", 2 * rows, ix.compact(request))
            await ix.apply(stream, response)
            assert len((await ix.inspect(stream)).trace) == 1
        frame = pl.from_arrow(pa.concat_tables([first, second]))
        assert isinstance(frame, pl.DataFrame)
        began = time.perf_counter()
        frame.with_columns(time=200).group_by("key", "val", "time").agg(pl.col("diff").sum()).sort(
            "key", "val"
        )
        figures["polars in memory, rows/s"] = f"{2 * rows / (time.perf_counter() - began):,.0f}"

    benchmark.pedantic(lambda: run(life()), rounds=1)
    report(capsys, f"{rows:,} updates, twice", **figures)
