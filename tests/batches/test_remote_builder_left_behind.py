"""Leftovers, bytes that name no writer, other processes; see `test_remote_builder.py`."""

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.testing.model import Model
from aiopersist.write.transmit import WRITER, TransmittedWriter
from tests.batches.remote_builder_kit import (
    Rows,
    built,
    contents,
    place,  # noqa: F401  # a fixture
    some_rows,
    swept,
)
from tests.support.internals import shard_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import is_sound

pytestmark = pytest.mark.usefixtures("started_postgres")


async def parts_are(place: Place, expected: set[str]) -> bool:
    """Soon: deletions may run in the background."""
    for _ in range(50):
        if await place.parts() == expected:
            return True
        await asyncio.sleep(0.01)
    return False


WORKER = """
import asyncio, sys
import aiopersist as ap

blob, consensus, number = *sys.argv[1:3], int(sys.argv[3])
LIMITS = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=400)


async def main():
    told = bytes.fromhex(sys.stdin.readline())
    async with ap.open(blob=blob, consensus=consensus, settings=LIMITS, maintenance=False) as client:
        async with client.workers.builder_from_transmittable(told, 0) as builder:
            for n in range(100):
                await builder.add(f"k{number}-{n}", n, 0, 1)
            if number == 0:  # it is killed here
                while not builder.parts_finished:
                    await builder.add("more", 1, 0, 1)
                print("ready", flush=True)
                await asyncio.sleep(60)
            batch = await builder.finish(1)
        print(batch.to_transmittable().hex(), flush=True)

asyncio.run(main())
"""


# --- what is left behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["left", "failed", "cancelled", "finish refused"])
async def test_a_builder_without_a_batch_deletes_its_parts(place: Place, how: str) -> None:
    client, other = await place.client(), await place.client()
    async with client.writer("t", SCHEMA) as w:

        async def build() -> None:
            async with other.builder_from_transmittable(w.to_transmittable(), 0) as builder:
                for n in range(8):
                    await builder.extend(some_rows(n))
                assert await place.parts()
                if how == "failed":
                    raise OSError("the task has failed")
                if how == "cancelled":
                    await asyncio.sleep(60)
                if how == "finish refused":
                    await builder.finish(0)

        task = asyncio.create_task(build())
        if how == "cancelled":
            while not await place.parts():
                await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.wait([task])
        task.cancelled() or task.exception()
        assert await parts_are(place, set())


async def test_any_interleaving_with_sweeps(place: Place) -> None:
    """Goal: for any order of builders, appends, ends of writers and sweeps, committed blobs stay, and all
    leftovers are swept at the end."""
    chance, model = random.Random(7), Model()
    client = await place.client()
    workers = [await place.client() for _ in range(2)]
    v = await place.stack.enter_async_context(client.writer("t", SCHEMA))
    open_writers: list[Any] = []
    staged: list[tuple[Any, bytes, Rows]] = []
    for step in range(100):
        act = chance.choice(["writer", "build", "build", "build", "append", "append", "end", "sweep"])
        upper: Any = v.upper.time
        if act == "writer" or not open_writers:
            open_writers.append(await chance.choice(workers).writer("t", SCHEMA))
        elif act == "build":
            w = chance.choice(open_writers)
            rows = some_rows(step, upper)
            staged.append(
                (w, await built(chance.choice(workers), w.to_transmittable(), rows, upper, upper + 1), rows)
            )
        elif act == "append" and staged:
            w, data, rows = staged.pop(chance.randrange(len(staged)))
            lower = min(t for _, _, t, _ in rows)
            try:
                batch = await v.batch_from_transmittable(data)
            except ap.BatchExpired:
                assert w not in open_writers
                continue
            assert w in open_writers
            if lower < upper:  # it came late
                batch.rewrite_ts(upper, upper + 1)
                rows = [(k, n, upper, d) for k, n, _, d in rows]
            await v.compare_and_append_batch([batch], upper, upper + 1)
            model.append(rows, [upper], [upper + 1])
        elif act == "end":
            w = open_writers.pop(chance.randrange(len(open_writers)))
            await w.aclose()
            await commit(shard_of(v).register, ExpireWriter(w.writer_id), Slot())
        elif act == "sweep":
            mine = {w.writer_id for w in open_writers}
            state = await shard_of(v).open()
            named = {part.key for batch in state.batches.values() for part in batch.parts}
            gone = await swept(client)
            assert not gone & named
            assert not {key for key in gone if ap.BlobKey.parse(key).writer in mine}
        if model.updates:
            assert await contents(client) == model.contents(model.upper[0] - 1)
    assert len(model.updates) > 100
    for w in open_writers:
        await w.aclose()
        await commit(shard_of(v).register, ExpireWriter(w.writer_id), Slot())
    assert await swept(client)
    state = await shard_of(v).open()
    assert await place.parts() == {p.key for b in state.batches.values() for p in b.parts if p.key}
    await is_sound(client)


# --- what names no writer -----------------------------------------------------------------------------


async def test_garbage_is_refused(place: Place) -> None:
    client = await place.client()
    async with client.writer("t", SCHEMA) as w:
        told, batch = w.to_transmittable(), await w.batch(some_rows(1), 0, 1)
        others: list[Any] = [batch.to_transmittable(), b"", b"\n", b"x", told + b" ", told.decode(), None, 3]
        value = WRITER.decode(told, TransmittedWriter)
        others += [WRITER.encode(value.replace(shard="t")), WRITER.encode(value.replace(schema_id=7))]
        for at in range(len(told)):
            others += [told[:at], told[:at] + bytes([told[at] ^ 1]) + told[at + 1 :]]
        for data in others:
            with pytest.raises(ap.InvalidUpdate):
                await client.workers.builder_from_transmittable(data, 0)
        with pytest.raises(ap.BatchExpired):
            await client.workers.builder_from_transmittable(WRITER.encode(value.replace(writer="w0")), 0)
        with pytest.raises(ap.InvalidUpdate):
            await w.batch_from_transmittable(told)
        async with ap.open("mem://", maintenance=False) as elsewhere:
            with pytest.raises(ap.UnknownShard):
                await elsewhere.builder_from_transmittable(told, 0)
        await client.admin.drop("t")
        with pytest.raises((ap.ShardFinalized, ap.UnknownShard)):
            await client.workers.builder_from_transmittable(told, 0)


# --- other processes ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_processes_build_and_one_is_killed(tmp_path: Path) -> None:
    """Goal: what it left is kept while the writer lives, and swept afterwards; the others' batches are
    whole."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"
    async with ap.open(blob=urls[0], consensus=urls[1], maintenance=False) as client:
        w = await client.writer("t", SCHEMA)
        running = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, *urls, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(3)
        ]
        for process in running:
            assert process.stdin is not None
            process.stdin.write(w.to_transmittable().hex() + "\n")
            process.stdin.flush()
        killed = running[0]
        assert killed.stdout is not None
        assert await asyncio.to_thread(killed.stdout.readline) == "ready\n"
        killed.send_signal(signal.SIGKILL)
        answers = await asyncio.gather(*(asyncio.to_thread(process.communicate) for process in running))
        assert [process.returncode for process in running] == [-signal.SIGKILL, 0, 0]
        batches = [await w.batch_from_transmittable(bytes.fromhex(out)) for out, _ in answers[1:]]
        await w.compare_and_append_batch(batches, 0, 1)
        assert not await swept(client)
        await w.aclose()
        leaked = await swept(client)
        assert leaked
        assert not await swept(client)
        expected = sorted((f"k{number}-{n}", n, 1) for number in (1, 2) for n in range(100))
        assert await contents(client) == expected
        await is_sound(client)
