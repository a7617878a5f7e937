"""A small append beside one bare compare-and-set of the same backend, and beside the same by hand."""

import asyncio
import itertools
import statistics
import subprocess
import sys
import uuid
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

import aiopersist as ap
from benches import byhand

SCHEMA = ap.Schema(key=bytes, val=bytes)
KINDS = ["mem", "files+sqlite", "files+postgres", "s3+postgres"]


def records(place: Any, folder: Path) -> byhand.Records:
    """The same backend with nothing but its driver."""
    if place.consensus.startswith("mem:"):
        return byhand.MemoryRecords()
    if place.consensus.startswith("sqlite:"):
        return byhand.SqliteRecords(folder / "hand.db")
    return byhand.PostgresRecords(place.consensus, f"hand_{uuid.uuid4().hex[:12]}")


@pytest.mark.parametrize("place", KINDS, indirect=True)
@pytest.mark.parametrize("n", [10, 100])
def test_append(place: Any, n: int, run: Any, rounds: Any, tmp_path: Path) -> None:
    client = run(ap.open(blob=place.blob, consensus=place.consensus))
    writer = run(client.writer("shard", SCHEMA))
    consensus, hand = ap.open_consensus(place.consensus), records(place, tmp_path)
    times, seqnos, hand_seqnos = itertools.count(), itertools.count(-1), itertools.count()
    updates = byhand.rows(n, 0)
    payload = byhand.record(updates)

    async def ours() -> None:
        time = next(times)
        await writer.compare_and_append([(k, v, time, d) for k, v, _, d in updates], time, time + 1)

    async def by_hand() -> None:
        time = next(hand_seqnos)
        await hand.put(time, byhand.record([(k, v, time, d) for k, v, _, d in updates]))

    async def bare() -> None:
        seqno = next(seqnos)
        assert await consensus.compare_and_set("bench/bare", None if seqno < 0 else seqno, payload)

    medians = rounds({"by hand": by_hand, "ours": ours, "our bare compare-and-set": bare}, 300)
    assert medians["ours"] > 0
    for resource in (client, consensus, hand):
        run(resource.aclose())


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
@pytest.mark.parametrize("n", [10, 100])
def test_append_on_a_busy_machine(place: Any, n: int, run: Any, rounds: Any, tmp_path: Path) -> None:
    """The same while two other processes compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        test_append(place, n, run, rounds, tmp_path)
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("maintenance", [False, True], ids=["quiet", "maintained"])
@pytest.mark.parametrize("kind", ["tuples", "table"])
@pytest.mark.parametrize("n", [10, 100])
def test_in_process(n: int, kind: str, maintenance: bool, run: Any, enabled: bool, capsys: Any) -> None:
    """What an append costs in the process itself: in memory, without and with the background."""
    from benches.conftest import report

    warmup, appends = (1000, 3000) if enabled else (5, 5)
    make = byhand.table if kind == "table" else byhand.rows

    async def measured() -> float:
        seconds = []
        async with ap.open("mem://", maintenance=maintenance) as client, client.writer("t", SCHEMA) as w:
            for time in range(warmup + appends):
                updates = make(n, time)
                began = perf_counter()
                await w.compare_and_append(updates, time, time + 1)
                seconds.append(perf_counter() - began)
        return statistics.median(seconds[warmup:])

    median = run(measured())
    report(capsys, f"in the process, {n} rows, {kind}, maintenance {maintenance}", us=round(median * 1e6))
    assert median > 0


@pytest.mark.parametrize("place", ["mem", "files+sqlite", "files+postgres"], indirect=True)
def test_write_together(place: Any, run: Any, enabled: bool, capsys: Any) -> None:
    """64 tasks that write one row each, again and again, to one shard: calls per second."""
    from benches.conftest import report

    tasks, each, rounds = (64, 20, 15) if enabled else (4, 2, 1)
    row = byhand.rows(1, 0)[0][:2]

    async def best() -> float:
        seconds = []
        async with (
            ap.open(blob=place.blob, consensus=place.consensus) as client,
            client.writer("t", SCHEMA) as w,
        ):

            async def task() -> None:
                for _ in range(each):
                    await w.write([row])

            for _ in range(rounds):
                began = perf_counter()
                await asyncio.gather(*(task() for _ in range(tasks)))
                seconds.append(perf_counter() - began)
        return statistics.median(seconds)

    per_second = tasks * each / run(best())
    report(capsys, f"writes of one row by {tasks} tasks, {place.consensus[:8]}", per_second=round(per_second))
    assert per_second > 0


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
def test_many_shards(place: Any, run: Any, rounds: Any, capsys: Any) -> None:
    """64 shards in one process, 10 rows each: appends per second."""
    from benches.conftest import report

    shards = 64
    client = run(ap.open(blob=place.blob, consensus=place.consensus))

    async def writers() -> list[Any]:
        return [await client.writer(f"shard-{i}", SCHEMA) for i in range(shards)]

    handles = run(writers())
    consensus = ap.open_consensus(place.consensus)
    times, seqnos = itertools.count(), itertools.count(-1)
    updates = byhand.rows(10, 0)
    payload = byhand.record(updates)
    keys = [f"bench/{uuid.uuid4()}" for _ in range(shards)]

    async def ours() -> None:
        time = next(times)
        rows = [(k, v, time, d) for k, v, _, d in updates]
        await asyncio.gather(*(w.compare_and_append(rows, time, time + 1) for w in handles))

    async def bare() -> None:
        seqno = next(seqnos)
        expected = None if seqno < 0 else seqno
        assert all(await asyncio.gather(*(consensus.compare_and_set(k, expected, payload) for k in keys)))

    medians = rounds({"64 bare compare-and-sets": bare, "64 appends": ours}, 60)
    report(capsys, "appends per second", ours=round(shards / medians["64 appends"]))
    run(client.aclose())
    run(consensus.aclose())
