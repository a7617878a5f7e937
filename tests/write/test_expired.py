"""Goal: an append whose writer's lease ran out while its parts were uploaded registers anew and lands once;
only staged batches are `BatchExpired`."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import LOST_MAX
from aiopersist.state.writing import ExpireWriter
from aiopersist.storage.memory import MemoryBlob
from aiopersist.testing.faults import Faults
from tests.support import rigs
from tests.support.internals import shard_of
from tests.support.rigs import Rig
from tests.support.schemas import SCHEMA, Writer
from tests.support.shards import rows

ROWS = [(f"k{n}", n) for n in range(5)]
UPDATES = [(key, val, 0, 1) for key, val in ROWS]


class Interrupted(MemoryBlob):
    """After each part that is set, the next of `meanwhile` runs: the process that sets it stands still."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.meanwhile: deque[Callable[[], Awaitable[object]]] = deque()

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await super().set(key, data)
        if key.endswith(".parquet") and self.meanwhile:
            await self.meanwhile.popleft()()


def rig(**limits: Any) -> AbstractAsyncContextManager[Rig]:
    """What `client` uploads can be interrupted."""
    options = {"blob": Interrupted, "inline_writes_single_max_bytes": 0, **limits}
    return rigs.rig(blob_faults=Faults(), **options)


async def expire(r: Rig, writer: Writer) -> None:
    """Another process ends the registration, as it ends those that are overdue."""
    async with r.honest.writer(writer.shard_id, SCHEMA) as w:
        await commit(shard_of(w).register, ExpireWriter(writer.writer_id), Slot())


async def expire_and_sweep(r: Rig, writer: Writer) -> None:
    """And then it sweeps what was left."""
    await expire(r, writer)
    assert await r.honest.sweep_leaked_blobs(dry_run=False)


def rows_one_by_one() -> Iterator[tuple[str, int, int, int]]:
    yield from UPDATES


class Counted:
    """As a progress bar is: it tells how many there are, and gives them once."""

    def __init__(self) -> None:
        self._updates = rows_one_by_one()

    def __len__(self) -> int:
        return len(UPDATES)

    def __iter__(self) -> Iterator[tuple[str, int, int, int]]:
        yield from self._updates


async def as_they_come() -> AsyncIterator[tuple[str, int, int, int]]:
    for update in UPDATES:
        yield update


def as_arrow() -> pa.Table:
    columns = zip(("key", "val", "time", "diff"), zip(*UPDATES, strict=True), strict=True)
    return pa.table(dict(columns))


Append = Callable[[Writer], Awaitable[Any]]
HELD: dict[str, Append] = {
    "write": lambda w: w.write(ROWS),
    "write of an iterator": lambda w: w.write(iter(ROWS)),
    "compare_and_append": lambda w: w.compare_and_append(UPDATES, 0, 1),
    "of an Arrow table": lambda w: w.compare_and_append(as_arrow(), 0, 1),
    "append": lambda w: w.append(UPDATES, 0, 1),
}
GIVEN_AWAY: dict[str, Append] = {
    "of an iterator": lambda w: w.compare_and_append(rows_one_by_one(), 0, 1),
    "of a counted iterator": lambda w: w.compare_and_append(Counted(), 0, 1),
    "of an async iterator": lambda w: w.append(as_they_come(), 0, 1),
}


def cases(appends: dict[str, Append]) -> Any:
    return pytest.mark.parametrize("append", [pytest.param(a, id=name) for name, a in appends.items()])


@cases(HELD | GIVEN_AWAY)
@pytest.mark.parametrize("target", [pytest.param(2**20, id="one part"), pytest.param(0, id="a part per row")])
async def test_parts_are_uploaded_again_under_a_new_writer(append: Append, target: int) -> None:
    """Goal: the rows land once, under a registered writer, and what the old one left is deleted."""
    async with rig(blob_target_size=target) as r:
        async with r.client.writer("t", SCHEMA) as w:
            before = w.writer_id
            r.blob.meanwhile.append(lambda: expire(r, w))
            await append(w)
            assert w.writer_id != before
            assert await rows(r.honest) == [(key, val, 1) for key, val in ROWS]
            assert await w.settle() is None
        await r.client.aclose()
        assert await r.named() == await r.parts()
        assert len(await r.parts()) == (1 if target else len(ROWS))
        assert not any(before in key for key in await r.parts())


@cases(HELD)
async def test_parts_that_were_swept_are_made_again(append: Append) -> None:
    """Goal: rows that the caller still holds land, even if the sweep has deleted what was uploaded."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.blob.meanwhile.append(lambda: expire_and_sweep(r, w))
        await append(w)
        assert await rows(r.honest) == [(key, val, 1) for key, val in ROWS]


@cases(GIVEN_AWAY)
async def test_swept_parts_of_an_iterator_are_refused(append: Append) -> None:
    """Goal: what cannot be made again is an error, and nothing of it is written."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.blob.meanwhile.append(lambda: expire_and_sweep(r, w))
        with pytest.raises(ap.BatchExpired):
            await append(w)
        assert await w.settle() is None
        assert await w.fetch_recent_upper() == ap.Antichain(0)
        await w.compare_and_append(UPDATES, 0, 1)
        assert await rows(r.honest) == [(key, val, 1) for key, val in ROWS]


async def test_a_writer_that_is_lost_again_and_again_ends() -> None:
    """Goal: an append that never gets through ends with an error, and leaves neither rows nor blobs."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.blob.meanwhile.extend([lambda: expire(r, w)] * (LOST_MAX * LOST_MAX))
        with pytest.raises(ap.BatchExpired):
            await w.compare_and_append(rows_one_by_one(), 0, 1)
        r.blob.meanwhile.clear()
        assert await w.fetch_recent_upper() == ap.Antichain(0)
        await r.client.aclose()
        assert await r.parts() == []


async def test_several_shards_lose_their_writers() -> None:
    """Goal: an append to several shards lands in all of them, once."""
    async with rig() as r, r.client.writer("a", SCHEMA) as a, r.client.writer("b", SCHEMA) as b:
        r.blob.meanwhile.extend([lambda: expire(r, a), lambda: expire(r, b)])
        appends = [ap.Append(a, UPDATES, 0, 1), ap.Append(b, rows_one_by_one(), 0, 1)]
        await r.client.compare_and_append_many(appends)
        assert (
            await rows(r.honest, name="a")
            == await rows(r.honest, name="b")
            == [(key, val, 1) for key, val in ROWS]
        )
        await r.client.aclose()
        assert await r.parts() == sorted(await r.named("a") + await r.named("b"))


async def test_a_staged_batch_stays_expired() -> None:
    """Goal: what a user has staged is not appended under another writer; he gets it back."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        batch = await w.batch(UPDATES, 0, 1)
        await expire(r, w)
        with pytest.raises(ap.BatchExpired):
            await w.compare_and_append_batch([batch], 0, 1)
        await batch.delete()
        await w.compare_and_append(UPDATES, 0, 1)
        assert await rows(r.honest) == [(key, val, 1) for key, val in ROWS]


async def test_a_repeat_is_found_after_the_loss() -> None:
    """Goal: a transaction that another process has recorded meanwhile is not written a second time."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:

        async def lose() -> None:
            await expire(r, w)
            async with r.honest.writer("t", SCHEMA) as theirs:
                await theirs.write(ROWS, txn=("app", 1))

        r.blob.meanwhile.append(lose)
        await w.write(ROWS, txn=("app", 1))
        assert await rows(r.honest) == [(key, val, 1) for key, val in ROWS]
        await r.client.aclose()
        assert set(await r.parts()) <= set(await r.named())


async def test_a_cancelled_copy_leaves_nothing() -> None:
    """Goal: an append that is cancelled while it copies its parts did not happen, and its blobs go."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        copying = asyncio.Event()

        async def hang() -> None:
            copying.set()
            await asyncio.sleep(0.01)

        r.blob.meanwhile.extend([lambda: expire(r, w), hang])
        append = asyncio.create_task(w.compare_and_append(UPDATES, 0, 1))
        await copying.wait()
        append.cancel()
        with suppress(asyncio.CancelledError):
            await append
        assert await w.settle() == ap.NotCommitted()
        await r.client.aclose()
        assert await r.parts() == []


async def test_what_an_append_has_flushed_itself_is_copied() -> None:
    """Goal: a staged batch that the append made a blob of, for want of room in the state, is not lost with
    the writer that did so."""
    async with rig(inline_writes_single_max_bytes=16384, inline_writes_total_max_bytes=1400) as r:
        async with r.client.writer("t", SCHEMA) as w, r.client.writer("t", SCHEMA) as staging:
            batch = await staging.batch([("z" * 400, 1, 1, 1)], 1, 2)
            await w.compare_and_append([("y" * 400, 1, 0, 1)], 0, 1)
            assert await r.parts() == []
            r.blob.meanwhile.append(lambda: expire(r, w))
            await w.compare_and_append_batch([batch], 1, 2)
            assert not r.blob.meanwhile
            assert len(await rows(r.honest)) == 2
