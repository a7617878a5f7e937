"""Goal: several processes that maintain one location share its work and do no piece of it twice.

They are real processes on real stores. Each tells at the end what it has uploaded, deleted, named and
claimed; what is counted is compared with what is there.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.maintenance.due import has_long_tail
from aiopersist.state.compaction import plan
from tests.maintenance.maintenance_process import (
    LIMITS,
    SCRIPT,
    Record,
    RecordingBlob,
    RecordingConsensus,
    Urls,
    opened,
    stores,
    urls_in,
)
from tests.support.internals import shards_of
from tests.support.schemas import SCHEMA

SHARDS = [f"shard-{number:02}" for number in range(12)]
BEFORE_TIMES, MEANWHILE_TIMES = 14, 8  # appends to each
PAUSE_S = 0.1  # between two of a writer, beside the maintenance

Told = dict[str, Any]


class Maintaining:
    """A process that makes rounds."""

    def __init__(self, urls: Urls) -> None:
        self.process = subprocess.Popen(
            [sys.executable, SCRIPT, "shared", *urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def ready(self) -> None:
        """It is there, and waits for `tell`."""
        assert self.process.stdout is not None
        assert await asyncio.to_thread(self.process.stdout.readline) == "ready\n"

    def tell(self) -> None:
        """First: to begin. Then: to end when there is nothing left to do."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    async def told(self) -> Told:
        """What it did, by its own records."""
        out, _ = await asyncio.to_thread(self.process.communicate)
        assert self.process.returncode == 0
        told: Told = json.loads(out)
        return told


# --- writers ------------------------------------------------------------------------------------------


async def append(w: Any, chance: random.Random) -> None:
    """A batch of one run, or of some: both are there to be compacted."""
    time = w.upper.time
    rows = [(f"k{chance.randrange(20):02}", chance.randrange(3), time, 1) for _ in range(4)]
    if chance.random() < 0.8:
        await w.compare_and_append(rows, time, time + 1)
        return
    batches = [await w.batch([row], time, time + 1) for row in rows]
    await w.compare_and_append_batch(batches, time, time + 1)


async def grown(client: Any, name: str, times: int, pause_s: float = 0.0) -> None:
    """Append to it so often."""
    chance = random.Random(f"{name} {times}")
    async with client.writer(name, SCHEMA) as w:
        for _ in range(times):
            await append(w, chance)
            await asyncio.sleep(pause_s)


async def grow_all(urls: Urls, times: int, pause_s: float = 0.0) -> None:
    async with opened(urls) as client:
        await asyncio.gather(*(grown(client, name, times, pause_s) for name in SHARDS))


# --- what must hold ----------------------------------------------------------------------------------


def nothing_was_done_twice(all_told: list[Told]) -> None:
    for told in all_told:
        assert sorted(told["uploaded"]) == sorted(told["named"])  # nothing in vain, and no rollup unnamed
        assert told["requests"]["blob.set"] == len(told["uploaded"])
        assert told["round"]["compactions"] == told["replacements"]
        assert len(told["claims"]) == told["round"]["compactions"] + told["round"]["collections"]
        assert told["round"]["collections"] == len(ending(told["uploaded"], ".rollup"))
        assert not told["round"]["failures"]
    deleted = Counter(key for told in all_told for key in told["deleted"])
    assert {key: count for key, count in deleted.items() if count > 1} == {}
    assert sum(told["round"]["parts"] for told in all_told) == len(ending([*deleted], ".parquet"))


def ending(keys: list[str], end: str) -> list[str]:
    return [key for key in keys if key.endswith(end)]


async def all_is_compact(urls: Urls) -> None:
    async with opened(urls) as client:
        assert not (await client.admin.sweep_leaked_blobs()).keys
        for name in SHARDS:
            await is_compact(client, name)


async def is_compact(client: Any, name: str) -> None:
    shard = shards_of(client).at(await client.shard_id(name))
    state = await shard.open()
    assert plan(state, 2, state.at) is None
    assert not has_long_tail(state, shard.stack.settings)
    assert (state.claims, state.writers) == ({}, {})
    report = await client.admin.fsck(name)
    assert report.ok, report.problems
    async with client.reader(name, SCHEMA) as r, r.snapshot() as s:
        assert sum(diff for _, _, diff in await s.rows()) == 4 * (s.as_of + 1)


async def shared(urls: Urls, processes: int) -> list[Told]:
    """What so many processes did while writers appended, and until all was done."""
    await grow_all(urls, BEFORE_TIMES)
    working = [Maintaining(urls) for _ in range(processes)]
    for process in working:
        await process.ready()
    for process in working:
        process.tell()
    await grow_all(urls, MEANWHILE_TIMES, PAUSE_S)
    for process in working:
        process.tell()
    return [await process.told() for process in working]


async def check_that_they_share(urls: Urls, processes: int) -> None:
    all_told = await shared(urls, processes)
    nothing_was_done_twice(all_told)
    assert sum(told["round"]["compactions"] for told in all_told) > 5
    await all_is_compact(urls)


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3])
async def test_processes_share_the_work(processes: int, tmp_path: Path) -> None:
    """Goal: what each of them uploads is named, what one deletes no other deletes, and at the end all is
    compact and nothing has leaked."""
    await check_that_they_share(urls_in(tmp_path), processes)


@pytest.mark.long
async def test_processes_share_the_work_on_servers(best_s3_url: str, postgres_url: str) -> None:
    """Goal: the same on Postgres and S3."""
    urls = best_s3_url, postgres_url
    await check_that_they_share(urls, 2)


# --- one that comes late ------------------------------------------------------------------------------


class Late(RecordingConsensus):
    """Holds writes back until `go`."""

    def __init__(self, inner: Any, record: Record) -> None:
        super().__init__(inner, record)
        self.held, self.go = asyncio.Event(), asyncio.Event()

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        self.held.set()
        await self.go.wait()
        return await super().compare_and_set(key, expected, data)


async def batches(w: Any) -> None:
    """What is compacted is several neighbours."""
    for time in range(6):
        await w.compare_and_append([("k", time, time, 1)], time, time + 1)


async def runs(w: Any) -> None:
    """What is compacted is one batch."""
    parts = [await w.batch([("k", number, 0, 1)], 0, 6) for number in range(6)]
    await w.compare_and_append_batch(parts, 0, 6)


async def versions(w: Any) -> None:
    """Nothing is compacted, and there is much to collect."""
    for time in range(30):
        await w.compare_and_append([], time, time + 1)


@asynccontextmanager
async def overtaken(urls: Urls, record: Record) -> AsyncIterator[tuple[Late, "asyncio.Task[Any]"]]:
    """A round of a client that is held back as it registers, before its first claim."""
    async with stores(*urls) as (blob, consensus):
        late = Late(consensus, record)
        wrapped: Any = {"blob": RecordingBlob(blob, record), "consensus": late}
        async with ap.open(**wrapped, settings=ap.Settings(**LIMITS), maintenance=False) as client:
            task = asyncio.create_task(client.admin.maintain())
            async with asyncio.timeout(50):
                await late.held.wait()
            yield late, task


@pytest.mark.parametrize("owed", [batches, runs, versions])
async def test_whoever_comes_late_does_nothing(owed: Any, tmp_path: Path) -> None:
    """Goal: a process that has seen what is due, and is overtaken before it can claim it, does not do it
    again."""
    urls, record = urls_in(tmp_path), Record()
    async with opened(urls) as first:
        async with first.writer("t", SCHEMA) as w:
            await owed(w)
        async with overtaken(urls, record) as (late, task), done_before_it(first, collects=owed is versions):
            late.go.set()
            again = await task
    assert (again.failures, again.compactions, again.collections) == ({}, 0, 0)
    assert (record.uploaded, record.claims) == ([], [])


@asynccontextmanager
async def done_before_it(client: Any, *, collects: bool) -> AsyncIterator[None]:
    """A round; unless it is to collect, a reader keeps what is replaced."""
    if collects:
        assert (await client.admin.maintain()).collections == 1
        yield
        return
    async with client.reader("t", SCHEMA) as r, r.snapshot(5):
        assert (await client.admin.maintain()).compactions == 1
        yield


async def test_a_round_that_is_cancelled_as_it_registers_leaves_nobody(tmp_path: Path) -> None:
    """Goal: a process that is told to end gives its registration back, also one that it does not know of
    yet."""
    urls = urls_in(tmp_path)
    async with opened(urls) as other:
        async with other.writer("t", SCHEMA) as w:
            await batches(w)
        async with overtaken(urls, Record()) as (late, task):
            task.cancel()
            await asyncio.wait([task])
            late.go.set()
        assert (await other.inspect("t")).writers == {}
