"""Goal: writers in many processes on one shard lose nothing; a process that is killed at any moment leaves
a shard that reads correctly: it has each acknowledged append, once."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.support.location import both_in_a_bucket
from tests.support.schemas import SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")

WORKER = """
import asyncio, sys
import aiopersist as ap

SCHEMA = ap.Schema(key=str, val=int)
blob, consensus, name, count = *sys.argv[1:4], int(sys.argv[4])
LIMITS = ap.Settings(inline_writes_single_max_bytes=200, rollup_every=16)


def acknowledged(time, key):
    sys.stdout.write(f"{time} {key}\\n")
    sys.stdout.flush()


async def by_compare(client, key):
    async with client.writer("t", SCHEMA) as w:
        for n in range(count):
            k = f"{key}-{n}" + "x" * (n % 3 * 100)  # every third is a blob
            while True:
                t = w.upper.time
                try:
                    await w.compare_and_append([(k, n, t, 1)], t, t + 1)
                    break
                except ap.UpperMismatch:
                    pass
            acknowledged(t, k)


async def by_write(client, key):
    async with client.writer("t", SCHEMA) as w:
        for n in range(count):
            k = f"{key}-{n}" + "x" * (n % 3 * 100)
            acknowledged(await w.write([(k, n)], txn=(key, n)), k)


async def main():
    async with ap.open(blob=blob, consensus=consensus, settings=LIMITS) as client:
        await asyncio.gather(by_compare(client, name + "c"), by_write(client, name + "w"))

asyncio.run(main())
"""


BUCKETS = {"bucket": "best_s3_url", "azure": "azure_url"}


LONG = [pytest.param("azure", marks=pytest.mark.long)]
KILLED = ["sqlite", "bucket", pytest.param("postgres", marks=pytest.mark.long), *LONG]


@pytest.fixture(params=["sqlite", "postgres", "bucket", *LONG])
def urls(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param in BUCKETS:
        return both_in_a_bucket(request.getfixturevalue(BUCKETS[request.param]))
    if request.param == "sqlite":
        return f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"
    return f"file://{tmp_path}/blob?fsync=off", request.getfixturevalue("postgres_url")


@pytest.fixture(params=BUCKETS)
def alone(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A location on a bucket alone; its server starts before the loop is watched."""
    return both_in_a_bucket(request.getfixturevalue(BUCKETS[request.param]))


def start(urls: tuple[str, str], name: str, appends: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *urls, name, str(appends)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


async def working(worker: "subprocess.Popen[str]") -> str:
    """Wait until it has acknowledged something: its first letter, which `finished` is to be told. No more is
    taken from the pipe: what a reader of lines has buffered would be lost."""
    assert worker.stdout is not None
    return (await asyncio.to_thread(os.read, worker.stdout.fileno(), 1)).decode()


async def finished(worker: "subprocess.Popen[str]", first: str = "") -> tuple[list[tuple[int, str]], str]:
    """What it acknowledged, whole lines only, and what it complained about."""
    out, err = await asyncio.to_thread(worker.communicate)
    lines = [line.split() for line in (first + out).splitlines(keepends=True) if line.endswith("\n")]
    return [(int(time), key) for time, key in lines], err


async def history(urls: tuple[str, str]) -> list[tuple[int, str]]:
    """`(time, key)` of all updates; each has a diff of 1."""
    async with ap.open(blob=urls[0], consensus=urls[1]) as client, client.reader("t", SCHEMA) as r:
        upper: Any = (await r.fetch_recent_upper()).time
        found = []
        async with r.subscribe(0) as updates:
            async for step in updates.steps():
                found += [(u.time, u.key) for u in step.updates]
                assert all(u.diff == 1 for u in step.updates)
                if step.upper.time >= upper:
                    break
        async with r.snapshot() as s:
            rows = await s.rows()
        assert sorted(key for _, key in found) == [key for key, _, _ in rows]
        return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("appends", [4, pytest.param(12, marks=pytest.mark.long)])
async def test_eight_writers_in_four_processes_lose_nothing(urls: tuple[str, str], appends: int) -> None:
    """Goal: the contents are exactly the acknowledged appends, at the times that were told."""
    workers = [start(urls, name, appends) for name in "abcd"]
    acknowledged = []
    for worker in workers:
        acks, err = await finished(worker)
        assert worker.returncode == 0, err
        acknowledged += acks
    assert len(acknowledged) == 4 * 2 * appends
    assert await history(urls) == sorted(acknowledged)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("urls", KILLED, indirect=True)
async def test_a_killed_process_leaves_a_shard_that_reads_correctly(urls: tuple[str, str], seed: int) -> None:
    """Goal: each acknowledged append is there once; of each writer of the dead one at most one more."""
    workers = {name: start(urls, name, 15) for name in "abc"}
    victim = workers["a"]
    first = await working(victim)
    await asyncio.sleep(random.Random(seed).uniform(0, 0.3))
    victim.send_signal(signal.SIGKILL)
    acknowledged = {}
    for name, worker in workers.items():
        acks, err = await finished(worker, first if name == "a" else "")
        assert name == "a" or worker.returncode == 0, err
        acknowledged[name] = acks
    found = await history(urls)
    assert len({key for _, key in found}) == len(found)
    for name, acks in acknowledged.items():
        there = [(time, key) for time, key in found if key.startswith(name)]
        assert set(acks) <= set(there)
        assert len(there) - len(acks) <= (2 if name == "a" else 0)
    async with ap.open(blob=urls[0], consensus=urls[1]) as client, client.writer("t", SCHEMA) as w:
        await w.write([("after", 0)])
    assert len(await history(urls)) == len(found) + 1


KILLS_S = float(os.environ.get("AIOPERSIST_TEST_KILLS_S", "60"))


@pytest.mark.long
@pytest.mark.timeout(3 * KILLS_S + 300)
async def test_eight_writers_in_four_processes_under_kills(alone: tuple[str, str]) -> None:
    """Goal: on a bucket alone: processes are killed and others take their places, again and again. Each
    acknowledged append is there once; of each writer of a dead one at most one more."""
    urls, chance = alone, random.Random(1)
    ends = asyncio.get_running_loop().time() + KILLS_S
    acknowledged: dict[str, list[tuple[int, str]]] = {}

    async def in_turn(place: int) -> None:
        """One process after the other; each is killed at some moment after its first append."""
        for number in count():
            name = f"{place}n{number}_"
            worker = start(urls, name, 1_000_000)
            first = await working(worker)
            await asyncio.sleep(chance.uniform(0, 8))
            worker.send_signal(signal.SIGKILL)
            acknowledged[name], err = await finished(worker, first)
            assert "Error" not in err, err
            if asyncio.get_running_loop().time() > ends:
                return

    await asyncio.gather(*(in_turn(place) for place in range(4)))
    found = await history(urls)
    there: dict[str, set[tuple[int, str]]] = {name: set() for name in acknowledged}
    for time, key in found:
        there[key.partition("_")[0] + "_"].add((time, key))
    assert len({key for _, key in found}) == len(found)
    for name, acks in acknowledged.items():
        assert set(acks) <= there[name]
        assert len(there[name]) - len(acks) <= 2
    print(f"{len(acknowledged)} processes, {len(found)} appends, {sum(map(len, acknowledged.values()))} told")
