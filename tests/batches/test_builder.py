"""Goal: every sentence about the batch builder: which updates become a part and when, how many parts are
in flight, which input is refused and when, and that a builder which does not finish leaves no blob."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.data.part.part import PartWriter
from aiopersist.testing.faults import Faults
from tests.batches.builder_kit import EACH_ITS_OWN, FORMS, NEVER_INLINE, PARTS, RECORD, Gate
from tests.support.rigs import rig
from tests.support.schemas import SCHEMA
from tests.support.shards import f, history, open_mem, rows, summed, until

# --- what becomes a part, and when --------------------------------------------------------------------


async def test_three_updates_each_their_own_part() -> None:
    """Goal: one in flight; two; two and one finished: a part is in flight until it was collected, be it
    uploaded or not. The batch of three reads back."""
    async with (
        rig(blob_faults=Faults(), **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (0, 0, 0)
        assert await b.add("a", 1, 0, 1) is PARTS
        await until(lambda: r.blob_faults.calls["set"] == 1)  # uploaded, and in flight all the same
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (1, 0, 0)
        assert await b.add("b", 2, 1, 1) is PARTS
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (2, 0, 0)
        assert await b.add("c", 3, 2, 1) is PARTS
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (2, 1, 1)
        batch = await b.finish(3)
        assert (b.parts_in_flight, b.parts_finished) == (0, 3)
        assert (len(batch.parts), batch.len, batch.runs) == (3, 3, ())
        assert [part.key_lower for part in batch.parts] == ["a", "b", "c"]
        assert (batch.lower, batch.upper) == (f(0), f(3))
        assert sorted(part.key for part in batch.parts) == sorted(await r.parts())
        await w.compare_and_append_batch([batch], 0, 3)
        assert await rows(r.honest) == [("a", 1, 1), ("b", 2, 1), ("c", 3, 1)]
        assert await history(r.honest) == {("a", 1, 0): 1, ("b", 2, 1): 1, ("c", 3, 2): 1}


async def test_the_buffer_becomes_a_part_when_it_reaches_the_target() -> None:
    """Goal: an update of 28 goodbytes (4 of text, 3 numbers): the fourth reaches 112, the third not 85."""
    async with open_mem(blob_target_size=112, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            for n in range(8):
                assert await b.add(f"k{n:03}", n, 0, 1) is (PARTS if n % 4 == 3 else RECORD)
            assert b.parts_in_flight + b.parts_finished == 2
            batch = await b.finish(1)
            assert [part.key_lower for part in batch.parts] == ["k000", "k004"]
            await batch.delete()
    async with open_mem(blob_target_size=113, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            added = [await b.add(f"k{n:03}", n, 0, 1) for n in range(6)]
            assert added == [RECORD] * 4 + [PARTS, RECORD]
            batch = await b.finish(1)
            assert [part.key_lower for part in batch.parts] == ["k000", "k005"]
            await batch.delete()


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("target", "step"), [(0, 1), (28, 1), (29, 2), (112, 4), (2**27, 9)], ids=["0", "28", "29", "112", "all"]
)
async def test_extend_cuts_where_add_would(make: Any, target: int, step: int) -> None:
    """Goal: input in any form gives the same parts."""
    updates = [(f"k{n:03}", n, n, 1) for n in range(9)]
    async with open_mem(blob_target_size=target, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            await b.extend(make(updates))
            batch = await b.finish(9)
            assert [part.key_lower for part in batch.parts] == [f"k{n:03}" for n in range(0, 9, step)]
            assert batch.len == 9
            await w.compare_and_append_batch([batch], 0, 9)
            assert await history(client) == summed(updates)


async def test_a_large_update_joins_what_is_buffered_and_is_not_split() -> None:
    async with open_mem(blob_target_size=1000, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            assert await b.add("a", 1, 0, 1) is RECORD
            assert await b.add("b" * 20_000, 1, 0, 1) is PARTS
            assert await b.add("c", 1, 0, 1) is RECORD
            batch = await b.finish(1)
            assert [len(part.key_lower) for part in batch.parts] == [1, 1]
            assert batch.len == 3
            assert batch.parts[0].stats["key"].min == "a"
            assert batch.parts[0].stats["key"].max.startswith("b" * 200)
            await w.compare_and_append_batch([batch], 0, 1)
            assert await rows(client) == [("a", 1, 1), ("b" * 20_000, 1, 1), ("c", 1, 1)]


@pytest.mark.parametrize("how", ["add", "list", "iterator", "arrow"])
async def test_an_update_that_is_too_large_is_refused(how: str) -> None:
    """Goal: by goodbytes of key and val: 92 + 8 are fine, one more is not; the builder goes on."""
    async with open_mem(update_size_max=100) as client, client.writer("t", SCHEMA) as w, w.builder(0) as b:
        for size, fine in ((92, True), (93, False), (92, True)):
            update = ("x" * size, 1, 0, 1)
            call = b.add(*update) if how == "add" else b.extend(FORMS[how]([update]))
            if fine:
                await call
                continue
            with pytest.raises(ap.InvalidUpdate) as caught:
                await call
            assert caught.value.row == 0
        batch = await b.finish(1)
        await w.compare_and_append_batch([batch], 0, 1)
        assert await rows(client) == [("x" * 92, 1, 2)]


async def test_the_default_limits() -> None:
    limits = ap.Settings()
    assert limits.blob_target_size == 128 * 2**20
    assert limits.batch_builder_max_outstanding_parts == 2
    assert limits.update_size_max == 64 * 2**20
    assert limits.inline_writes_single_max_bytes == 16384
    assert limits.inline_writes_total_max_bytes == 2**20
    assert limits.stats_budget_bytes == 1024


async def test_parts_are_consolidated_and_encoded_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def noted(writer: PartWriter) -> Any:
        threads.append(threading.get_ident())
        return finish(writer)

    finish = PartWriter.finish
    monkeypatch.setattr(PartWriter, "finish", noted)
    async with open_mem(blob_target_size=100, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            for _ in range(3):
                await b.extend([("b", 1, 0, 1), ("a", 1, 0, 2), ("b", 1, 0, 3), ("a", 1, 0, -2)])
            batch = await b.finish(1)
            assert batch.len == len(batch.parts) == 3  # each holds one ("b", 1, 0, 4)
            await w.compare_and_append_batch([batch], 0, 1)
            assert await rows(client) == [("b", 1, 12)]
    assert len(threads) == 3
    assert threading.get_ident() not in threads


# --- in flight ----------------------------------------------------------------------------------------


async def test_add_waits_for_the_oldest_part() -> None:
    """Goal: not for any: the second is uploaded long before the first; and the order stays."""
    async with (
        rig(blob_faults=Gate(), **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        await until(lambda: len(r.blob_faults.waiting) == 1)
        await b.add("b", 1, 0, 1)
        await until(lambda: len(r.blob_faults.waiting) == 2)
        third = asyncio.create_task(b.add("c", 1, 0, 1))
        r.blob_faults.let(1)
        await until(lambda: r.blob_faults.calls["set"] == 1)
        await asyncio.sleep(0.02)
        assert not third.done()
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (2, 0, 1)
        r.blob_faults.let(0)
        assert await third is PARTS
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (2, 1, 1)
        r.blob_faults.let_all()
        batch = await b.finish(1)
        assert [part.key_lower for part in batch.parts] == ["a", "b", "c"]
        await w.compare_and_append_batch([batch], 0, 1)
        assert await rows(r.honest) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]


@pytest.mark.parametrize("outstanding", [1, 2, 5])
async def test_so_many_parts_are_in_flight_at_most(outstanding: int) -> None:
    """Goal: `add` stalls past them, counted; the input of `extend` is not read ahead: memory is bounded."""
    seen = 0

    def counted() -> Iterator[Any]:
        nonlocal seen
        for n in range(60_000):
            seen += 1
            yield (f"{n:06}", n, 0, 1)

    limits = {"blob_target_size": 120_000, "batch_builder_max_outstanding_parts": outstanding}
    async with rig(blob_faults=Gate(), **limits) as r, r.client.writer("t", SCHEMA) as w, w.builder(0) as b:
        extending = asyncio.create_task(b.extend(counted()))
        await until(lambda: b.write_stalls)
        await until(lambda: len(r.blob_faults.waiting) == outstanding)
        await asyncio.sleep(0.02)
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (outstanding, 0, 1)
        assert not extending.done()
        assert seen < 40_000
        r.blob_faults.let_all()
        await extending
        batch = await b.finish(1)
        assert batch.len == 60_000
        assert b.write_stalls == len(batch.parts) - outstanding
        await batch.delete()


@pytest.mark.parametrize("outstanding", [1, 2, 5])
async def test_the_parts_of_one_table_are_no_more_at_once(outstanding: int) -> None:
    """Goal: also those that were sorted together, beside one that was there before."""
    limits = {"blob_target_size": 50_000, "batch_builder_max_outstanding_parts": outstanding, **NEVER_INLINE}
    table = pa.table({"key": [f"{n:06}" for n in range(9000)], "val": range(9000)})
    table = table.append_column("time", [[0] * 9000]).append_column("diff", [[1] * 9000])
    async with rig(blob_faults=Gate(), **limits) as r, r.client.writer("t", SCHEMA) as w, w.builder(0) as b:
        await b.extend([("a", 1, 0, 1)] * 2000)
        extending = asyncio.create_task(b.extend(table))
        most = 0
        while not extending.done() or b.parts_in_flight > b.parts_finished:
            waiting = [event for event in r.blob_faults.waiting if not event.is_set()]
            most = max(most, len(waiting), b.parts_in_flight)
            if extending.done() and not waiting:
                break
            await asyncio.sleep(0.02)
            for event in waiting[:1]:
                event.set()
        await extending
        r.blob_faults.let_all()
        batch = await b.finish(1)
        assert min(outstanding, 2) <= most <= outstanding
        assert batch.len == 9001
        await batch.delete()


async def test_many_tasks_add_to_one_builder() -> None:
    async with open_mem(blob_target_size=60, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            updates = [(f"k{n % 7}", n % 3, n % 5, 1) for n in range(80)]
            await asyncio.gather(
                *(b.add(*update) for update in updates[:40]),
                *(b.extend(updates[n : n + 10]) for n in range(40, 80, 10)),
            )
            batch = await b.finish(5)
            await w.compare_and_append_batch([batch], 0, 5)
            assert await history(client) == summed(updates)
