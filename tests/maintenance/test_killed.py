"""Goal: a process that is killed at any moment of a compaction, a collection, a finalize or a round of
maintenance leaves a sound shard; a later run finishes its work, and after a sweep no garbage is left.

The process is real, and so are the stores; it kills itself at the n-th call to one of them, before it, after
it or somewhere in it, so that an fsync, a rename or a transaction may be cut off, too.
"""

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.log import consensus_key
from aiopersist.state.compaction import plan
from aiopersist.state.diff import apply, decode_diff
from aiopersist.state.lifecycle import Finalize
from aiopersist.state.model import State
from aiopersist.state.names import live_parts
from aiopersist.state.rollup_file import decode_rollup
from aiopersist.state.writing import ExpireWriter
from tests.maintenance.maintenance_process import (
    AFTER,
    BEFORE,
    BUSY,
    DURING,
    ENDED,
    KEPT_TAG,
    NEW_TAG,
    OLD_TAG,
    SCRIPT,
    WORKS,
    Urls,
    opened,
    stores,
    urls_in,
)
from tests.support.internals import shards_of
from tests.support.location import both_in_a_bucket
from tests.support.schemas import SCHEMA
from tests.support.shards import noted

KILLED = -9
MOMENTS = [BEFORE, DURING, AFTER]
STRIDES = {
    "compact": 3,
    "finalize": 3,
    "maintain": 10,
    "tag": 3,
}  # calls between two that are tried, on the average
SERVER_CALLS = [12, 30]
KEPT, BURIED = "kept", "buried"
# What libraries would start as they are imported; a process with threads is not to be forked.
NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OPENBLAS_NUM_THREADS": "1"}


class KilledRuns:
    """Asks the server of such runs for one after the other."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, SCRIPT, "killed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | NO_THREADS,
        )

    async def run(self, urls: Urls, work: str, at: int, moment: str) -> int:
        """How it ended; 0 if it came to its end."""
        asked = {"blob": urls[0], "consensus": urls[1], "work": work, "at": at, "moment": moment}
        credentials = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        line = json.dumps({**asked, "environment": credentials})
        return int(await asyncio.to_thread(self._ask, line))

    def _ask(self, line: str) -> str:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(line + "\n")
        self.server.stdin.flush()
        return self.server.stdout.readline()

    def end(self) -> None:
        self.server.communicate()


@pytest.fixture(scope="module")
def runs() -> Iterator[KilledRuns]:
    server = KilledRuns()
    yield server
    server.end()


# --- a location that owes work ------------------------------------------------------------------------


async def append(w: Any, times: int) -> None:
    """As many batches, each a blob; the contents at time `n` are what `expected(n)` says."""
    for _ in range(times):
        time = w.upper.time
        await w.compare_and_append([(f"{time:03}", time, time, 1), ("all", 0, time, 1)], time, time + 1)


def expected(as_of: int) -> list[Any]:
    return [*((f"{time:03}", time, 1) for time in range(as_of + 1)), ("all", 0, as_of + 1)]


async def move_since(client: Any, name: str, since: Any) -> None:
    async with client.critical_since(name, "c") as c:
        await c.compare_and_downgrade_since(0, 0, since)


async def busy(client: Any, name: str) -> None:
    """A shard with a history: batches in blobs, rollups, and something to compact and to collect."""
    async with client.writer(name, SCHEMA) as w:
        await append(w, 3)
        await move_since(client, name, 2)
        await client.admin.force_compaction(name)
        await client.admin.force_gc(name)
        await append(w, 6)
        await move_since(client, name, 7)


async def ended(client: Any, name: str) -> None:
    """A shard that no client can read or write any more."""
    await busy(client, name)
    async with client.writer(name, SCHEMA) as w:
        await w.compare_and_append([], w.upper, ap.Antichain())
    await move_since(client, name, ap.Antichain())


async def half_buried(client: Any, name: str) -> None:
    """A shard that was finalized by a process that died before the data was deleted."""
    await ended(client, name)
    shard = shards_of(client).at(await client.shard_id(name))
    await shard.register.refresh()
    await commit(shard.register, Finalize(shard.id), Slot())


async def prepare(urls: Urls, work: str) -> None:
    async with opened(urls) as client:
        if work == "finalize":
            await ended(client, ENDED)
            return
        await busy(client, BUSY)
        if work == "tag":
            await tags(client)
        if work == "maintain":
            await busy(client, KEPT)
            await client.admin.retain(KEPT, 3)
            await half_buried(client, BURIED)


async def tags(client: Any) -> None:
    """Two tags, whose history is gone."""
    await client.tag(BUSY, KEPT_TAG, 7)
    await client.tag(BUSY, OLD_TAG)
    async with client.writer(BUSY, SCHEMA) as w:
        await append(w, 3)
    await move_since(client, BUSY, 11)


@pytest.fixture(scope="module", params=[*WORKS])
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What is to be done, and a location to be copied."""
    folder = tmp_path_factory.mktemp(request.param)
    asyncio.run(prepare(urls_in(folder), request.param))
    return request.param, folder


# --- what must be there -------------------------------------------------------------------------------


async def live_states(urls: Urls, shard: str) -> list[State]:
    """Of every version that is held, told from the bytes alone."""
    async with stores(*urls) as (blob, consensus):
        diffs = [decode_diff(v.data) for v in await consensus.scan(consensus_key(shard), 0, 10_000)]
        state = None
        if diffs[0].seqno:
            name = next(d.rollup for d in diffs if d.rollup and d.rollup.seqno == diffs[0].seqno)
            state = decode_rollup(await blob.get(name.key), name.checksum)
        states = [] if state is None else [state]
        for diff in diffs[len(states) :]:
            state = apply(diff, state)
            states.append(state)
        return states


async def named(urls: Urls, shard: str) -> set[str]:
    """The parts of all live states, and the rollups of the newest."""
    states = await live_states(urls, shard)
    parts = {key for state in states for key in live_parts(state)}
    return parts | {rollup.key for rollup in states[-1].rollups.values()}


async def blobs(urls: Urls, shard: str) -> set[str]:
    async with stores(*urls) as (blob, _):
        return {key async for key, _ in blob.list(f"{shard}/")}


async def is_finalized(urls: Urls, shard: str) -> bool:
    async with stores(*urls) as (_, consensus):
        return decode_diff((await consensus.head(consensus_key(shard))).data).changes.finalized


async def sound(urls: Urls, client: Any) -> None:
    """The contents are the written updates, and all of them can be read."""
    for name, shard in (await client.list_shards()).items():
        if await is_finalized(urls, shard):
            continue
        report = await client.admin.fsck(name)
        assert report.ok, report.problems
        if name == ENDED:
            continue
        for tag in (None, *await client.tags(name)):
            async with client.reader(name, SCHEMA) as r, r.snapshot(tag=tag) as s:
                assert await s.rows() == expected(s.as_of)


async def expire_writers(urls: Urls, client: Any) -> None:
    """As their leases would in an hour."""
    for shard_id in (await client.list_shards()).values():
        if not await is_finalized(urls, shard_id):
            shard = shards_of(client).at(shard_id)
            for writer in (await shard.register.refresh()).writers:
                await commit(shard.register, ExpireWriter(writer), Slot())


async def completed(client: Any, work: str) -> None:
    """As another process does it."""
    await WORKS[work](client)
    if work == "maintain":
        await rounds(client)


async def rounds(client: Any) -> None:
    """Until there is nothing left to look at."""
    while (await client.admin.maintain()).looked_at:
        pass


async def finished(urls: Urls, work: str) -> None:
    """After any event the shard is sound; a later run ends the work; after a sweep only named blobs are
    left."""
    async with opened(urls) as client:
        await sound(urls, client)
        await client.admin.sweep_leaked_blobs(dry_run=False)
        await expire_writers(urls, client)
        await client.admin.sweep_leaked_blobs(dry_run=False)
        await sound(urls, client)
        await completed(client, work)
    async with opened(urls) as client:
        await sound(urls, client)
        await nothing_is_left(urls, client, work)
        if work == "tag":
            assert {*await client.tags(BUSY)} == {KEPT_TAG, NEW_TAG}


async def nothing_is_left(urls: Urls, client: Any, work: str) -> None:
    assert not (await client.admin.sweep_leaked_blobs()).keys
    for name, shard in (await client.list_shards()).items():
        if name in (ENDED, BURIED):
            assert await blobs(urls, shard) == set()
            assert await live_states_of_tombstone(urls, shard) <= 2  # the end, and that the data is deleted
            continue
        state = await shards_of(client).at(shard).register.refresh()
        assert not state.writers
        assert not state.claims
        assert len(state.rollups) == 1
        assert len(state.batches) == 1 or work != "compact"
        assert plan(state, 2, state.at) is None
        assert await blobs(urls, shard) == await named(urls, shard)


async def live_states_of_tombstone(urls: Urls, shard: str) -> int:
    async with stores(*urls) as (_, consensus):
        return len(await consensus.scan(consensus_key(shard), 0, 10))


# --- kills --------------------------------------------------------------------------------------------


async def survives(runs: KilledRuns, urls: Urls, work: str, at: int, moment: str) -> bool:
    """Whether it was killed at all; what it left is right, and can be brought to its end."""
    with noted(f"{work} was killed {moment} its call {at}"):
        status = await runs.run(urls, work, at, moment)
        assert status in (0, KILLED)
        await finished(urls, work)
        return status == KILLED


async def killed_at_each(
    runs: KilledRuns, origin: tuple[str, Path], folder: Path, kills: Iterator[tuple[int, str]]
) -> int:
    """How often a run was killed, each time on a copy of the location, until one came to its end."""
    work, prepared = origin
    for killed, (at, moment) in enumerate(kills):
        copy = folder / str(at)
        shutil.copytree(prepared, copy)
        if not await survives(runs, urls_in(copy), work, at, moment):
            return killed
        shutil.rmtree(copy)
    raise AssertionError("it never ends")


def some_calls(work: str) -> Iterator[tuple[int, str]]:
    """Numbers of calls, rising, and what of the call has happened; from a seed."""
    chance, at = random.Random(work), 0
    while True:
        at += chance.randint(1, 2 * STRIDES[work] - 1)
        yield at, chance.choice(MOMENTS)


@pytest.mark.slow
async def test_killed_at_some_calls(runs: KilledRuns, origin: tuple[str, Path], tmp_path: Path) -> None:
    """Goal: wherever it was, nothing is lost, the work can be finished, and nothing stays for ever."""
    assert await killed_at_each(runs, origin, tmp_path, some_calls(origin[0])) >= 2


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_killed_at_every_call(
    runs: KilledRuns, origin: tuple[str, Path], tmp_path: Path, moment: str
) -> None:
    """Goal: the same at each of them."""
    kills = ((at, moment) for at in count(1))
    assert await killed_at_each(runs, origin, tmp_path, kills) > 5


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_killed_again_and_again_on_servers(
    runs: KilledRuns, best_s3_url: str, postgres_url: str, alone: bool
) -> None:
    """Goal: the same on servers, with a database or on a bucket alone, where a request of the dead may still
    land; one location, in which each run finds what the ones before have left, and more to do."""
    urls = both_in_a_bucket(best_s3_url) if alone else (best_s3_url, postgres_url)
    work = "maintain"
    await prepare(urls, work)
    for at in SERVER_CALLS:
        assert await survives(runs, urls, work, at, DURING)
        async with opened(urls) as client, client.writer(BUSY, SCHEMA) as w:
            await append(w, 4)


async def test_another_process_collects_what_a_dead_one_has_replaced(tmp_path: Path) -> None:
    """Goal: blobs that were replaced go, also those of an idle shard whose compactor died before."""
    urls = urls_in(tmp_path)
    async with opened(urls) as dead:
        await busy(dead, BUSY)
        await dead.force_compaction(BUSY)
    async with opened(urls) as other:
        await rounds(other)
        usage = await other.usage()
        assert usage.total == usage.current
