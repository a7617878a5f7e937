"""Goal: hazards of staged batches that a review found, each made to happen by hand: a deletion that ends
half-way, inline parts that are gathered, callers who leave while others tidy up, registrations that are
rotated under what is being built, and what would grow without bounds."""

import asyncio
import gc
import random
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs
import pytest

import aiopersist as ap
from aiopersist.data.updates.buffer import Buffer
from aiopersist.data.updates.times import GREATEST_ROWS, Greatest
from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from aiopersist.write import session
from tests.support.cancelling import cancelled_after
from tests.support.schemas import ROWS, SCHEMA, Writer
from tests.support.shards import refused

PENDING, CONSUMED = ap.UsageKind.OUTCOME_PENDING, ap.UsageKind.CONSUMED


class Gate:
    """Open; shut, whoever comes waits, and `reached` tells that somebody did."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pass_(self) -> None:
        if not self._open.is_set():
            self.reached.set()
        await self._open.wait()


class Blobs(MemoryBlob):
    """Blobs with a gate before and after each upload, and before each deletion."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.before_set, self.after_set, self.before_delete = Gate(), Gate(), Gate()
        self.deletes_half = False
        """A deletion deletes the first key only, and fails."""
        self.deletion_turns = 0
        """Turns of the loop that a deletion takes."""

    async def parts(self) -> set[str]:
        return {key async for key, _ in self.list("") if key.endswith(".parquet")}

    async def set(self, key: str, data: bytes | memoryview) -> None:
        if not key.endswith(".parquet"):
            await super().set(key, data)
            return
        await self.before_set.pass_()
        await super().set(key, data)
        await self.after_set.pass_()

    async def delete(self, keys: Sequence[str]) -> None:
        await self.before_delete.pass_()
        for _ in range(self.deletion_turns):
            await asyncio.sleep(0)
        if self.deletes_half:
            await super().delete(keys[:1])
            raise ap.StorageUnavailable("only some were deleted")
        await super().delete(keys)


class Clock(Runtime):
    """Time stands still until it is told to pass. Whoever sleeps lets others run, and looks again."""

    def __init__(self) -> None:
        self.now = SYSTEM.wall()

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        await asyncio.sleep(0)
        while self.now < until:
            await asyncio.sleep(0.001)

    async def passes(self, seconds: float) -> None:
        """In steps of a twentieth, so that everybody who sleeps meanwhile does what is due."""
        for _ in range(20):
            self.now += seconds / 20
            await asyncio.sleep(0.005)


@dataclass
class Rig:
    client: ap.Client
    place: str
    blob: Blobs
    faults: Faults
    stack: AsyncExitStack

    async def writer(self, client: ap.Client | None = None, name: str = "t") -> Writer:
        return await self.stack.enter_async_context((client or self.client).writer(name, SCHEMA))

    async def another(self, **limits: Any) -> ap.Client:
        """Another client of the same place."""
        return await self.stack.enter_async_context(
            ap.open(
                blob=self.blob,
                consensus=MemoryConsensus(self.place),
                settings=ap.Settings(**limits),
                maintenance=False,
            )
        )

    async def named(self, name: str = "t") -> set[str]:
        """The blobs that the newest state names."""
        async with self.client.writer(name, SCHEMA) as w:
            batches = (await w._shard.open()).batches.values()
            return {part.key for batch in batches for part in batch.parts if part.key}

    async def rows(self, as_of: int) -> list[tuple[str, int, int]]:
        async with self.client.reader("t", SCHEMA) as r, r.snapshot(as_of) as s:
            return await s.rows()


@asynccontextmanager
async def rig(runtime: Runtime = SYSTEM, **limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    async with AsyncExitStack() as stack:
        blob = Blobs(place)
        client = await stack.enter_async_context(
            ap.open(
                blob=blob,
                consensus=FaultyConsensus(MemoryConsensus(place, runtime=runtime), faults),
                settings=ap.Settings(**{"retry_timeout_s": 3.0, **limits}),
                maintenance=False,
                runtime=runtime,
            )
        )
        try:
            yield Rig(client, place, blob, faults, stack)
        finally:
            faults.heal()
            for gate in (blob.before_set, blob.after_set, blob.before_delete):
                gate.open()


async def cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def eventually(r: Rig, parts: set[str]) -> None:
    """The blobs become these, once what runs in the background has ended."""
    async with asyncio.timeout(5):
        while await r.blob.parts() != parts:
            await asyncio.sleep(0.001)


# --- deletions that end half-way -------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["own", "handed_over"])
async def test_a_half_deleted_batch_can_only_be_deleted(shared: bool) -> None:
    """Goal: some of its blobs are gone, so nobody appends it, flushes it or hands it over; the deletion is
    repeated, and consumes."""
    async with rig(blob_target_size=1, inline_writes_single_max_bytes=0, retry_timeout_s=0.0) as r:
        w, other = await r.writer(), await r.writer()
        batch = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1), ("c", 1, 0, 1)], 0, 1)
        data = b""
        if shared:
            data = batch.to_transmittable()
            batch = await w.batch_from_transmittable(data)
        for left in (2, 2):  # what is gone is deleted again
            r.blob.deletes_half = True
            with pytest.raises(ap.StorageUnavailable):
                await batch.delete()
            r.blob.deletes_half = False
            assert len(await r.blob.parts()) == left
            uses = [
                w.compare_and_append_batch([batch], 0, 1),
                other.compare_and_append_batch([batch], 0, 1),
                w.append_batch(batch, 0, 1),
                r.client.compare_and_append_many([ap.Append(w, batch, 0, 1)]),
                batch.flush_to_blob(),
            ]
            assert [await refused(use) for use in uses] == [CONSUMED] * 5
            for use in (batch.to_transmittable, lambda: batch.rewrite_ts(0, 1)):
                with pytest.raises(ap.InvalidUsage) as caught:
                    use()
                assert caught.value.kind == CONSUMED
        if shared:
            copy = await other.batch_from_transmittable(data)
            with pytest.raises(ap.AlreadyAppended):
                await other.compare_and_append_batch([copy], 0, 1)
            copy._staged.spent_elsewhere()
        await batch.delete()
        assert await r.blob.parts() == set()
        assert await refused(batch.delete()) == CONSUMED
        assert w.upper == ap.Antichain(0)


async def test_one_deletion_of_a_half_deleted_batch_at_a_time() -> None:
    async with rig(blob_target_size=1, inline_writes_single_max_bytes=0, retry_timeout_s=0.0) as r:
        w = await r.writer()
        batch = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        r.blob.deletes_half = True
        with pytest.raises(ap.StorageUnavailable):
            await batch.delete()
        r.blob.deletes_half = False
        r.blob.before_delete.shut()
        first = asyncio.create_task(batch.delete())
        await r.blob.before_delete.reached.wait()
        assert await refused(batch.delete()) == PENDING
        r.blob.before_delete.open()
        await first
        assert await r.blob.parts() == set()


async def test_a_half_deleted_batch_that_is_dropped_releases_its_registration() -> None:
    async with rig(blob_target_size=1, inline_writes_single_max_bytes=0, retry_timeout_s=0.0) as r:
        w = await r.writer()
        batch = await w.batch([("a", 1, 0, 1), ("b", 1, 0, 1)], 0, 1)
        r.blob.deletes_half = True
        with pytest.raises(ap.StorageUnavailable):
            await batch.delete()
        with pytest.warns(ResourceWarning, match="with 2 parts"):  # noqa: PT031  # whenever it is collected
            del batch
            for _ in range(3):  # the traceback of the failure goes first
                await asyncio.sleep(0.005)
                gc.collect()
        await asyncio.sleep(0.005)
        assert w._session.registration._users == 1  # the handle


# --- inline parts that are gathered ----------------------------------------------------------------


async def test_inline_batches_gathered_into_one_blob_are_read_alike() -> None:
    """Goal: more than the target size, of the same keys: one part in order, whichever way it is read."""
    async with rig(inline_writes_total_max_bytes=4000, blob_target_size=2000) as r:
        w = await r.writer()
        keys = [f"{k:05}" for k in range(40)]
        batches = [await w.batch([(key, 1, 0, 1) for key in keys], 0, 1) for _ in range(6)]
        assert [part.key for batch in batches for part in batch.parts] == [None] * 6
        assert sum(part.encoded_size_bytes for batch in batches for part in batch.parts) > 4000
        await w.compare_and_append_batch(batches, 0, 1)
        (batch,) = w._shard.state.batches.values()
        assert [bool(part.key) for part in batch.parts] == [True]
        assert batch.runs == ()
        expected = [(key, 1, 6) for key in keys]
        assert await r.rows(0) == expected
        async with r.client.reader("t", SCHEMA) as reader, reader.snapshot(0) as s:
            assert [row async for row in s] == expected
            tables = [pa.Table.from_batches([one]) async for one in s.batches()]
        columns = pa.concat_tables(tables).select(["key", "val", "diff"]).to_pydict().values()
        assert list(zip(*columns, strict=True)) == expected


async def test_an_inline_batch_is_flushed_to_one_blob_by_a_client_of_small_blobs() -> None:
    """Goal: restored where parts are smaller than it is: one part all the same, and its rewrite stays."""
    async with rig() as r:
        w, other = await r.writer(), await r.writer(await r.another(blob_target_size=100))
        keys = [f"{k:05}" for k in range(40)]
        made = await w.batch([(key, 1, 0, 1) for key in keys], 0, 1)
        made.rewrite_ts(3, 4)
        batch = await other.batch_from_transmittable(made.to_transmittable())
        await batch.flush_to_blob()
        (part,) = batch.parts
        assert part.key is not None
        assert part.rewrite == ap.Antichain(3)
        assert (batch.len, batch.runs) == (40, ())
        assert await r.blob.parts() == {part.key}
        await other.compare_and_append_batch([batch], 0, 4)
        assert await r.rows(2) == []
        assert await r.rows(3) == [(key, 1, 1) for key in keys]


@pytest.mark.parametrize("where", ["before_set", "after_set", "commit"])
async def test_cancelled_while_inline_parts_are_gathered(where: str) -> None:
    """Goal: the blob of what is gathered goes when the append is settled as not committed."""
    async with rig(inline_writes_total_max_bytes=2000) as r:
        w = await r.writer()
        rows = [(f"{k:05}", 1, 0, 1) for k in range(40)]
        batches = [await w.batch(rows, 0, 1) for _ in range(3)]
        if where == "commit":
            r.faults.fail_next("compare_and_set", Outcome.DROPPED)
            r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
            scans = r.faults.calls["scan"]
            call = asyncio.create_task(w.compare_and_append_batch(batches, 0, 1))
            async with asyncio.timeout(5):
                while r.faults.calls["scan"] == scans:
                    await asyncio.sleep(0.001)
        else:
            gate: Gate = getattr(r.blob, where)
            gate.shut()
            call = asyncio.create_task(w.compare_and_append_batch(batches, 0, 1))
            async with asyncio.timeout(5):
                await gate.reached.wait()
            asyncio.get_running_loop().call_later(0.01, gate.open)
        await cancelled(call)
        r.faults.heal()
        assert await w.settle() == ap.NotCommitted()
        await eventually(r, set())
        for batch in batches:
            await batch.delete()


@pytest.mark.parametrize("where", ["before_set", "after_set", "commit"])
async def test_cancelled_while_the_state_is_flushed(where: str) -> None:
    """Goal: the same where an append makes room first: the blob is named, or is gone."""
    async with rig(inline_writes_single_max_bytes=1000, inline_writes_total_max_bytes=2500) as r:
        w = await r.writer()
        time = 0
        while w._shard.state.inline_bytes <= 500:
            await w.compare_and_append([(f"{k:05}", 1, time, 1) for k in range(8)], time, time + 1)
            time += 1
        if where == "commit":
            scans = r.faults.calls["scan"]
            r.faults.fail_next("compare_and_set", Outcome.DROPPED)
            r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
            call = asyncio.create_task(w.compare_and_append([("x", 1, time, 1)], time, time + 1))
            async with asyncio.timeout(5):
                while r.faults.calls["scan"] == scans:
                    await asyncio.sleep(0.001)
            assert len(await r.blob.parts()) == 1  # what was in doubt is the flush
        else:
            gate: Gate = getattr(r.blob, where)
            gate.shut()
            call = asyncio.create_task(w.compare_and_append([("x", 1, time, 1)], time, time + 1))
            async with asyncio.timeout(5):
                await gate.reached.wait()
            asyncio.get_running_loop().call_later(0.01, gate.open)
        await cancelled(call)
        r.faults.heal()
        assert await w.settle() == ap.NotCommitted()
        await eventually(r, set())


# --- callers who leave -----------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["append", "delete"])
async def test_a_group_whose_caller_leaves_while_it_tidies_up_frees_its_batches(use: str) -> None:
    """Goal: the blobs of the rows are being deleted, slowly: the batch that mismatched is free at once."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        wa, wb = await r.writer(name="a"), await r.writer(name="b")
        batch = await wb.batch([("k", 1, 5, 1)], 0, 6)
        await wb.compare_and_append([], 0, 5)
        r.blob.before_delete.shut()
        appends = [ap.Append(wa, ROWS, 0, 1), ap.Append(wb, batch, 0, 6)]
        call = asyncio.create_task(r.client.compare_and_append_many(appends))
        async with asyncio.timeout(5):
            await r.blob.before_delete.reached.wait()
        await cancelled(call)
        assert [await wa.settle(), await wb.settle()] == [ap.NotCommitted()] * 2
        if use == "append":
            await wb.compare_and_append_batch([batch], 5, 6)
        r.blob.before_delete.open()
        if use == "delete":
            await batch.delete()
        assert await refused(batch.delete()) == CONSUMED
        await eventually(r, await r.named("a") | await r.named("b"))
        assert len(await r.blob.parts()) == (1 if use == "append" else 0)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "handed_over"])
@pytest.mark.parametrize("single", [pytest.param(16384, id="inline"), pytest.param(0, id="blob")])
async def test_a_covered_append_that_is_cancelled_is_committed_iff_it_consumed(
    single: int, shared: bool
) -> None:
    """Goal: at whatever step, also while the blobs that nobody needs are deleted."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        w = await r.writer()
        r.blob.deletion_turns = 5
        await w.compare_and_append([], 0, 5)
        answers = set()
        for steps in range(1, 80):
            batch = await w.batch(ROWS, 0, 1)
            if shared:
                batch = await w.batch_from_transmittable(batch.to_transmittable())
            if not await cancelled_after(w.append_batch(batch, 0, 1), steps):
                assert await w.settle() is None
                assert await refused(batch.delete()) == CONSUMED
                break
            answer = await w.settle()
            assert answer in (ap.Committed(ap.Antichain(5)), ap.NotCommitted())
            assert batch._staged.use.value == ("free" if answer == ap.NotCommitted() else "consumed")
            answers.add(type(answer))
            if answer == ap.NotCommitted():
                await batch.delete()
        else:
            pytest.fail("no append ended by itself")
        assert answers == {ap.Committed, ap.NotCommitted}
        await eventually(r, set())
        assert await r.named() == set()


# --- registrations ---------------------------------------------------------------------------------


async def test_a_batch_in_the_making_keeps_a_registration_that_is_rotated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: its iterator waits while the handle registers anew and many leases pass; it is appended."""
    monkeypatch.setattr(session, "BATCHES_MAX", 3)
    clock = Clock()
    async with rig(clock, writer_lease_s=100.0, blob_target_size=1) as r:
        w, other = await r.writer(), await r.writer()
        go_on = asyncio.Event()

        async def updates() -> AsyncIterator[Any]:
            yield ("a", 1, 9, 1)
            await go_on.wait()
            yield ("b", 1, 9, 1)

        making = asyncio.create_task(w.batch(updates(), 0, 10))
        await asyncio.sleep(0)
        registered = w.writer_id
        for _ in range(4):
            data = (await w.batch([], 0, 10)).to_transmittable()
            await (await other.batch_from_transmittable(data)).delete()
        assert w.writer_id != registered
        for time in range(3):
            await clock.passes(90.0)
            await other.compare_and_append([], time, time + 1)
        go_on.set()
        batch = await making
        assert all(registered in str(part.key) for part in batch.parts)
        await w.compare_and_append_batch([batch], 3, 10)
        assert await r.rows(9) == [("a", 1, 1), ("b", 1, 1)]


async def test_a_rotated_registration_ends_when_all_it_handed_over_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: at its next heartbeat, not when its lease has run out."""
    monkeypatch.setattr(session, "BATCHES_MAX", 3)
    clock = Clock()
    async with rig(clock, writer_lease_s=100.0) as r:
        w, other = await r.writer(), await r.writer()
        registered = w.writer_id
        for _ in range(4):
            data = (await w.batch([], 0, 10)).to_transmittable()
            await (await other.batch_from_transmittable(data)).delete()
        assert w.writer_id != registered
        await clock.passes(60.0)
        state = await other._shard.open()
        assert set(state.writers) == {w.writer_id, other.writer_id}


async def test_rotated_registrations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BATCHES_MAX", 3)
    clock = Clock()
    async with rig(clock, writer_lease_s=100.0) as r:
        w = await r.writer()
        for _ in range(20):
            await (await w.batch([], 0, 10)).delete()
        await clock.passes(300.0)
        assert len(w._session._others) <= 1


async def test_no_record_keeps_many_spent_ids() -> None:
    """Goal: hundreds of batches are built first and handed over afterwards; still no registration has built
    more than its record may keep."""
    async with rig(inline_writes_total_max_bytes=2**26) as r:
        w, other, count = await r.writer(), await r.writer(), 600
        batches = [await w.batch([("k", i, 0, 1)], 0, 10**6) for i in range(count)]
        time, waiting = 0, []
        for batch in batches:
            waiting.append(await other.batch_from_transmittable(batch.to_transmittable()))
            if len(waiting) == 100:
                await other.compare_and_append_batch(waiting, time, time + 1)
                time, waiting = time + 1, []
        spent = [len(ids) for ids in (await other._shard.open()).spent.values()]
        assert sum(spent) == count
        assert max(spent) <= 256


@pytest.mark.parametrize("how", ["batches", "builders"])
async def test_batches_that_are_built_at_once_rotate_too(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the bound holds as well where many uploads run at the same moment."""
    monkeypatch.setattr(session, "BATCHES_MAX", 3)
    async with rig(inline_writes_single_max_bytes=0) as r:
        w = await r.writer()
        if how == "batches":
            batches = await asyncio.gather(*(w.batch(ROWS, 0, 1) for _ in range(12)))
        else:
            builders = [await w.builder(0) for _ in range(12)]
            for builder in builders:
                await builder.add(*ROWS[0])
            batches = [await builder.finish(1) for builder in builders]
        built = Counter(batch._staged.registration.writer for batch in batches)
        for batch in batches:
            await batch.delete()
        assert max(built.values()) <= 3


async def test_a_restored_batch_without_parts_that_is_dropped_releases_its_registration() -> None:
    """Goal: nobody is warned of it, and nobody sends heartbeats for it."""
    async with rig() as r:
        w = await r.writer()
        async with (await r.another()).writer("t", SCHEMA) as there:
            data = (await there.batch([], 0, 1)).to_transmittable()
        batch = await w.batch_from_transmittable(data)
        registration: Any = batch._staged.registration
        assert registration._beating is not None
        assert w._session._others
        del batch
        gc.collect()
        await asyncio.sleep(0.01)
        assert registration._users == 0
        assert registration._beating is None
        assert w._session._others == {}


@pytest.mark.parametrize("use", ["append", "delete", "hand_over"])
async def test_registrations_of_others_are_forgotten_with_their_last_batch(use: str) -> None:
    async with rig() as r:
        w = await r.writer()
        for n in range(5):
            async with (await r.another()).writer("t", SCHEMA) as there:
                datas = [(await there.batch([("k", 1, 0, 1)], 0, 100)).to_transmittable() for _ in "ab"]
            first, second = [await w.batch_from_transmittable(data) for data in datas]
            assert len(w._session._others) == 1
            await first.delete()
            assert len(w._session._others) == 1
            if use == "append":
                await w.compare_and_append_batch([second], n, n + 1)
            elif use == "delete":
                await second.delete()
            else:
                second.to_transmittable()
            assert w._session._others == {}


async def test_registrations_that_are_gone_are_not_remembered() -> None:
    async with rig() as r:
        w = await r.writer()
        async with (await r.another()).writer("t", SCHEMA) as there:
            data = (await there.batch(ROWS, 0, 1)).to_transmittable()
            await there._session.registration.expire()
        with pytest.raises(ap.BatchExpired):
            await w.batch_from_transmittable(data)
        assert w._session._others == {}


# --- what would wait, or grow ----------------------------------------------------------------------


async def test_iterators_that_wait_take_no_thread_from_others() -> None:
    """Goal: as many as there are worker threads, and more, stand still; a large batch is made meanwhile."""
    go_on = threading.Event()

    def updates() -> Iterator[Any]:
        yield ("a", 1, 0, 1)
        go_on.wait(30)

    async with rig() as r:
        w = await r.writer()
        threads = int(r.client._stack.threads.total_tokens)
        waiting = [asyncio.create_task(w.batch(updates(), 0, 1)) for _ in range(max(4, 2 * threads))]
        try:
            await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                large = await w.batch([(f"{i:05}", i, 0, 1) for i in range(5000)], 0, 1)
            assert not any(task.done() for task in waiting)
        finally:
            go_on.set()
            batches = await asyncio.gather(*waiting)
        for batch in (large, *batches):
            await batch.delete()


async def test_an_iterator_that_waits_does_not_keep_its_caller() -> None:
    """Goal: a cancelled call returns, though the thread of its iterator cannot be stopped."""
    go_on = threading.Event()

    def updates() -> Iterator[Any]:
        yield ("a", 1, 0, 1)
        go_on.wait(30)

    async with rig() as r:
        w = await r.writer()
        try:
            async with asyncio.timeout(10):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await w.batch(updates(), 0, 1)
        finally:
            go_on.set()


def times_table(times: np.ndarray[Any, Any]) -> pa.Table:
    lists = pa.FixedSizeListArray.from_arrays(pa.array(times.ravel()), times.shape[1])
    return pa.table({"time": pa.chunked_array([lists])})


def kept(greatest: Greatest) -> int:
    return sum(frame.height for frame in greatest._seen)


@pytest.mark.parametrize("at_once", [300_000, 10_000, 50])
def test_of_random_product_times_few_are_kept(at_once: int) -> None:
    """Goal: however they come; and they hold any frontier against all."""
    times = np.random.default_rng(0).integers(0, 2**40, (300_000, 2))
    greatest = Greatest()
    for n in range(0, len(times) if at_once > 50 else 20_000, at_once):
        greatest.add(times_table(times[n : n + at_once]))
    assert kept(greatest) <= (100 if at_once == 300_000 else GREATEST_ROWS)
    assert len(greatest._seen) <= 64
    if at_once > 50:
        for first in (0, 2**39, 2**40 - 2**30):
            second = max(times[times[:, 0] >= first][:, 1].tolist())
            found = greatest.beyond(ap.Antichain((first, second)))
            assert isinstance(found, tuple)
            assert found[0] >= first
            assert found[1] == second
            assert greatest.beyond(ap.Antichain((first, second + 1))) is None


@pytest.mark.parametrize("shuffled", [False, True])
def test_of_product_times_that_run_against_each_other_all_are_held(shuffled: bool) -> None:
    """Goal: none is greater than another, so none may be forgotten."""
    count = 20_000
    times = np.stack([np.arange(count), count - np.arange(count)], axis=1)
    if shuffled:
        np.random.default_rng(0).shuffle(times)
    greatest = Greatest()
    for n in range(0, count, 3000):
        greatest.add(times_table(times[n : n + 3000]))
    assert kept(greatest) == count
    for i in (0, 1, 2999, 3000, 12_345, count - 1):
        assert greatest.beyond(ap.Antichain((i, count - i))) == (i, count - i)
        assert greatest.beyond(ap.Antichain((i, count - i + 1))) is None
        assert greatest.beyond(ap.Antichain((i + 1, count - i))) is None


@pytest.mark.parametrize("length", [2, 3, 4])
@pytest.mark.parametrize("bound", [3, 30, 2**62])
def test_greatest_product_times_against_all_of_them(length: int, bound: int) -> None:
    """Goal: any frontier is answered as by a look at every time, with ties and with sums past 64 bits."""
    chance, random_times = random.Random(length), np.random.default_rng(bound % 1000)
    times = random_times.integers(0, bound, (1500, length))
    greatest, part, start = Greatest(), Greatest(), 0
    while start < len(times):
        size = chance.choice([1, 40, 63, 64, 200, 500])
        chance.choice([greatest, part]).add(times_table(times[start : start + size]))
        start += size
    greatest.merge(part)
    rows = times.tolist()
    seen = set(map(tuple, rows))
    held = np.concatenate([frame.to_numpy() for frame in greatest._seen])
    assert {tuple(row) for row in held.tolist()} <= seen
    at_the_edge = [row for row in rows if ((times >= row).all(axis=1) & (times > row).any(axis=1)).sum() == 0]
    answers = Counter[bool]()
    for _ in range(150):
        elements = [
            tuple(min(2**62, value + chance.choice([0, 0, 0, 1])) for value in chance.choice(at_the_edge))
            for _ in range(chance.choice([1, 1, 2]))
        ]
        frontier = ap.Antichain(*elements)
        expected = any((times >= np.array(element)).all(axis=1).any() for element in elements)
        found = greatest.beyond(frontier)
        assert (found is not None) == expected
        assert found is None or (found in seen and frontier.less_equal(found))
        answers[expected] += 1
    assert min(answers[True], answers[False]) > 20


def test_a_buffer_holds_few_tables_however_many_came() -> None:
    """Goal: 20,000 tables of 64 rows; a table costs kilobytes, however little it holds."""
    total = 20_000
    column = pa.array(np.repeat(np.arange(total), 64))
    columns = {"key": pa.array(["key"]).take(pa.array(np.zeros(64 * total, np.int64)))}
    table = pa.table({**columns, "val": column, "time": column, "diff": column})
    buffer = Buffer(SCHEMA)
    for n in range(total):
        buffer.add(table.slice(64 * n, 64))
        assert len(buffer._tables) + len(buffer._small) <= total // 64 + 64
    assert buffer.rows == 64 * total
    taken = []
    target = buffer.goodbytes // 3 + 1
    while buffer.goodbytes >= target:
        taken.append(buffer.take_reaching(target))
    taken.append(buffer.take())
    assert len(taken) == 3
    assert pa.concat_tables(taken)["val"].combine_chunks() == column
    assert (buffer.rows, buffer.goodbytes) == (0, 0)
