"""Goal: every sentence about the batch builder: what becomes a part and when, how many are in flight, what
is refused and when, and that a builder which does not finish leaves no blob behind."""

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.parts.upload import encode_part
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import HAPPENS, Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, open_at, open_mem, parquet, rows, summed, until

RECORD, PARTS = ap.Added.RECORD, ap.Added.RECORD_AND_PARTS
EACH_ITS_OWN = {"blob_target_size": 0, "inline_writes_single_max_bytes": 0}
NEVER_INLINE = {"inline_writes_single_max_bytes": 0}


async def history(client: ap.Client, schema: Any = SCHEMA, name: str = "t") -> dict[Any, int]:
    """All updates of the shard, summed, as a listen gives them; `as_of` 0 is there too."""
    sums: dict[Any, int] = {}
    async with client.reader(name, schema) as r:
        upper = (await r.fetch_recent_upper()).time
        async with r.subscribe(0) as updates:
            async for step in updates.steps():
                for key, val, time, diff in step.updates:
                    sums[key, val, time] = sums.get((key, val, time), 0) + diff
                if step.upper.time is None or step.upper.time >= upper:
                    break
    return {update: diff for update, diff in sums.items() if diff}


async def nothing_left(blob: MemoryBlob) -> None:
    """Deletions go on in the background: they end with no part in the store."""
    async with asyncio.timeout(10):
        while [key async for key, _ in blob.list("") if key.endswith(".parquet")]:
            await asyncio.sleep(0.002)


class Gate(Faults):
    """Every write of a blob waits until it is let through, one by one or all."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Event] = []
        self.open = False

    async def call(self, op: str, act: Any) -> Any:
        if op == "set" and not self.open:
            event = asyncio.Event()
            self.waiting.append(event)
            await event.wait()
        return await super().call(op, act)

    def let(self, number: int) -> None:
        """The write that arrived as the `number`th goes on."""
        self.waiting[number].set()

    def let_all(self) -> None:
        self.open = True
        for event in self.waiting:
            event.set()


class EveryThird(Faults):
    """Each third write of a blob ends so."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(latency_s=(0.0, 0.002))
        self.bad = outcome

    def outcome(self, op: str) -> Outcome:
        self.calls[op] += 1
        return self.bad if op == "set" and self.calls[op] % 3 == 0 else Outcome.DONE


@dataclass
class Rig:
    """One place in memory: `client` reaches its blobs through `faults`, `honest` directly."""

    client: ap.Client
    honest: ap.Client
    faults: Any
    blob: MemoryBlob
    on_consensus: Faults

    async def parquet(self) -> list[str]:
        return [key async for key, _ in self.blob.list("") if key.endswith(".parquet")]


@asynccontextmanager
async def rig(faults: Faults | None = None, **limits: Any) -> AsyncIterator[Rig]:
    place, faults, on_consensus = uuid.uuid4().hex, faults or Faults(), Faults()
    blob, consensus = MemoryBlob(place), MemoryConsensus(place)
    url = f"mem://{place}"
    async with (
        ap.open(blob=url, consensus=url, maintenance=False) as honest,
        ap.open(
            blob=FaultyBlob(blob, faults),
            consensus=FaultyConsensus(consensus, on_consensus),
            settings=ap.Settings(**limits),
            maintenance=False,
        ) as client,
    ):
        try:
            yield Rig(client, honest, faults, blob, on_consensus)
        finally:
            if isinstance(faults, Gate):
                faults.let_all()
            faults.heal()
    await blob.aclose()
    await consensus.aclose()


# --- what becomes a part, and when ---------------------------------------------------------------


async def test_three_updates_each_their_own_part() -> None:
    """Goal: one in flight; two; two and one finished: a part is in flight until it was collected, be it
    uploaded or not. The batch of three reads back."""
    async with rig(**EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w, w.builder(0) as b:
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (0, 0, 0)
        assert await b.add("a", 1, 0, 1) is PARTS
        await until(lambda: r.faults.calls["set"] == 1)  # uploaded, and in flight all the same
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
        assert sorted(part.key for part in batch.parts) == sorted(await r.parquet())
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


FORMS: dict[str, Callable[[list[Any]], Any]] = {}


def form(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    FORMS[make.__name__.removeprefix("as_")] = make
    return make


def as_table(updates: list[Any], schema: Any = SCHEMA) -> pa.Table:
    columns = list(zip(*updates, strict=True)) if updates else [[], [], [], []]
    return pa.table(
        [pa.array(c, t) for c, t in zip(columns, [pa.string(), *[pa.int64()] * 3], strict=True)],
        names=["key", "val", "time", "diff"],
    )


@form
def as_list(updates: list[Any]) -> Any:
    return updates


@form
def as_iterator(updates: list[Any]) -> Any:
    return iter(updates)


@form
def as_arrow(updates: list[Any]) -> Any:
    return as_table(updates)


@form
def as_reader(updates: list[Any]) -> Any:
    return as_table(updates).to_reader(max_chunksize=2)


@form
def as_tables(updates: list[Any]) -> Any:
    return iter([as_table(updates[:1]), as_table(updates[1:])])


@form
async def as_async_rows(updates: list[Any]) -> AsyncIterator[Any]:
    for update in updates:
        await asyncio.sleep(0)
        yield update


@form
async def as_async_mixed(updates: list[Any]) -> AsyncIterator[Any]:
    for n, update in enumerate(updates):
        yield as_table([update]) if n % 3 == 1 else update


@pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("target", "step"), [(0, 1), (28, 1), (29, 2), (112, 4), (2**27, 9)], ids=["0", "28", "29", "112", "all"]
)
async def test_extend_cuts_where_add_would(make: Any, target: int, step: int) -> None:
    """Goal: whatever the form of the input, the same parts of the same keys."""
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

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return encode_part(*args, **kwargs)

    monkeypatch.setattr("aiopersist.parts.upload.encode_part", noted)
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


# --- in flight -----------------------------------------------------------------------------------


async def test_add_waits_for_the_oldest_part() -> None:
    """Goal: not for any: the second is uploaded long before the first; and the order stays."""
    async with rig(Gate(), **EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w, w.builder(0) as b:
        await b.add("a", 1, 0, 1)
        await until(lambda: len(r.faults.waiting) == 1)
        await b.add("b", 1, 0, 1)
        await until(lambda: len(r.faults.waiting) == 2)
        third = asyncio.create_task(b.add("c", 1, 0, 1))
        r.faults.let(1)
        await until(lambda: r.faults.calls["set"] == 1)
        await asyncio.sleep(0.02)
        assert not third.done()
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (2, 0, 1)
        r.faults.let(0)
        assert await third is PARTS
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (2, 1, 1)
        r.faults.let_all()
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
    async with rig(Gate(), **limits) as r, r.client.writer("t", SCHEMA) as w, w.builder(0) as b:
        extending = asyncio.create_task(b.extend(counted()))
        await until(lambda: b.write_stalls)
        await until(lambda: len(r.faults.waiting) == outstanding)
        await asyncio.sleep(0.02)
        assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (outstanding, 0, 1)
        assert not extending.done()
        assert seen < 40_000
        r.faults.let_all()
        await extending
        batch = await b.finish(1)
        assert batch.len == 60_000
        assert b.write_stalls == len(batch.parts) - outstanding
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


# --- refusals of add -----------------------------------------------------------------------------

BAD = [
    pytest.param(
        ("a", 1, 4, 1), {"kind": KIND.UPDATE_NOT_BEYOND_LOWER, "time": 4, "lower": f(5)}, id="below"
    ),
    pytest.param(("a", "text", 99, 1), {"row": 0}, id="type"),
    pytest.param(("a", 1, 99, None), {"row": 0}, id="null_diff"),
    pytest.param(("a", 1, 99, 2**63), {"row": 0}, id="diff"),
    pytest.param((None, 1, 99, 1), {"row": 0}, id="null_key"),
    pytest.param(("a", 1, -1, 1), {"row": 0}, id="negative"),
    pytest.param(("a", 1, 2**63, 1), {"row": 0}, id="time"),
    pytest.param(("a", 1, (99, 99), 1), {"row": 0}, id="product_time"),
    pytest.param(("a\ud800", 1, 99, 1), {"row": 0}, id="no_utf8"),
]


@pytest.mark.parametrize(("update", "says"), BAD)
@pytest.mark.parametrize("how", ["add", "extend"])
async def test_a_refused_add_changes_nothing(update: Any, says: dict[str, Any], how: str) -> None:
    """Goal: the builder goes on, and what was refused does not count at `finish` either."""
    async with open_mem(blob_target_size=60, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(f(5)) as b:
            assert b.lower == f(5)
            await b.add("a", 1, 5, 1)
            before = repr(b), await parquet(client)
            with pytest.raises((ap.InvalidUpdate, ap.InvalidUsage)) as caught:
                await (b.add(*update) if how == "add" else b.extend([update]))
            assert {name: getattr(caught.value, name) for name in says} == says
            assert caught.value.shard_id == w.shard_id
            assert (repr(b), await parquet(client)) == before
            await b.add("b", 1, 6, 1)
            batch = await b.finish(7)
            assert batch.len == 2
            await w.compare_and_append([], 0, 5)
            await w.compare_and_append_batch([batch], 5, 7)
            assert await history(client) == {("a", 1, 5): 1, ("b", 1, 6): 1}


async def test_a_refused_add_of_product_times() -> None:
    """Goal: `lower.less_equal(time)`, with several elements."""
    lower = f((0, 3), (2, 1))
    async with open_mem() as client, client.writer("t", PRODUCT) as w, w.builder(lower) as b:
        for time, fine in (((0, 3), True), ((2, 1), True), ((5, 2), True), ((1, 2), False), ((9, 0), False)):
            if fine:
                assert await b.add("a", 1, time, 1) is RECORD
                continue
            with pytest.raises(ap.InvalidUsage) as caught:
                await b.add("a", 1, time, 1)
            assert caught.value.kind is KIND.UPDATE_NOT_BEYOND_LOWER
            assert (caught.value.time, caught.value.lower) == (time, lower)
        for time in (5, (1, 2, 3)):
            with pytest.raises(ap.InvalidUpdate):
                await b.add("a", 1, time, 1)
        batch = await b.finish(f((9, 9)))
        assert batch.len == 3
        await batch.delete()


async def test_nothing_is_beyond_the_empty_lower() -> None:
    async with open_mem() as client, client.writer("t", SCHEMA) as w, w.builder(f()) as b:
        with pytest.raises(ap.InvalidUsage) as caught:
            await b.add("a", 1, 2**63 - 1, 1)
        assert caught.value.kind is KIND.UPDATE_NOT_BEYOND_LOWER
        batch = await b.finish(f())
        assert (batch.lower, batch.upper, batch.parts, batch.len) == (f(), f(), (), 0)


@pytest.mark.parametrize("lower", [-1, 2**63, (1, 2), "x", None, 1.5, True], ids=repr)
async def test_a_lower_that_is_no_frontier(lower: Any) -> None:
    async with open_mem() as client, client.writer("t", SCHEMA) as w:
        with pytest.raises(ap.InvalidUsage) as caught:
            await w.builder(lower)
        assert caught.value.kind is KIND.INVALID_TIME


@pytest.mark.parametrize("form", ["iterator", "async_rows"])
async def test_an_extend_that_is_refused_half_way_closes_the_builder(form: str) -> None:
    """Goal: a part of an input must not pass for all of it; the row counts over the whole input."""
    good = [(f"{n:05}", n, 0, 1) for n in range(9000)]
    async with open_mem(blob_target_size=20_000, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            with pytest.raises(ap.InvalidUpdate) as caught:
                await b.extend(FORMS[form]([*good, ("a", "text", 0, 1)]))
            assert caught.value.row == 9000
            await assert_closed(b)
            assert await parquet(client) == []


async def test_an_input_that_raises_closes_the_builder() -> None:
    def failing() -> Iterator[Any]:
        yield from ((f"{n:05}", n, 0, 1) for n in range(9000))
        raise RuntimeError("mine")

    async with open_mem(blob_target_size=20_000, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            with pytest.raises(RuntimeError, match="mine"):
                await b.extend(failing())
            await assert_closed(b)
            assert await parquet(client) == []


async def assert_closed(builder: ap.BatchBuilder, kind: ap.UsageKind = KIND.CLOSED) -> None:
    for call in (
        lambda: builder.add("a", 1, 5, 1),
        lambda: builder.extend([]),
        lambda: builder.finish(9),
    ):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is kind


# --- finish --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "upper", "says"),
    [
        ([("a", 1, 9, 1)], 4, {"kind": KIND.INVALID_BOUNDS, "lower": f(5), "upper": f(4)}),
        ([], 4, {"kind": KIND.INVALID_BOUNDS, "lower": f(5), "upper": f(4)}),
        ([("a", 1, 5, 1)], 5, {"kind": KIND.UPDATE_BEYOND_UPPER, "time": 5, "upper": f(5)}),
        ([("a", 1, 5, 1), ("b", 1, 9, 1)], 9, {"kind": KIND.UPDATE_BEYOND_UPPER, "time": 9}),
        ([("b", 1, 9, 1), ("b", 1, 9, -1)], 7, {"kind": KIND.UPDATE_BEYOND_UPPER, "time": 9}),
        ([("b", 1, 9, 0)], 7, {"kind": KIND.UPDATE_BEYOND_UPPER, "time": 9}),
        ([("a", 1, 5, 1), ("b", 1, 6, 1)], (7, 7), {"kind": KIND.INVALID_TIME}),
        ([("a", 1, 5, 1)], -1, {"kind": KIND.INVALID_TIME}),
    ],
    ids=["bounds_first", "bounds", "equal", "beyond", "cancelled_out", "diff_0", "product", "negative"],
)
@pytest.mark.parametrize("target", [0, 2**27], ids=["many_parts", "one_part"])
@pytest.mark.parametrize("how", ["add", "extend", "arrow"])
async def test_a_refused_finish_closes_and_deletes(
    updates: Any, upper: Any, says: dict[str, Any], target: int, how: str
) -> None:
    """Goal: first the bounds, then the times, those of updates that cancelled out included."""
    async with open_mem(blob_target_size=target, **NEVER_INLINE) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(5) as b:
            if how == "add":
                for update in updates:
                    await b.add(*update)
            else:
                await b.extend(updates if how == "extend" else as_table(updates))
            with pytest.raises(ap.InvalidUsage) as caught:
                await b.finish(upper)
            assert {name: getattr(caught.value, name) for name in says} == says
            await assert_closed(b)
            assert await parquet(client) == []


@pytest.mark.parametrize(
    ("times", "upper", "error"),
    [
        ([(0, 3), (2, 1)], f((0, 4), (3, 0)), KIND.INVALID_BOUNDS),  # (3, 0) is before the lower
        ([(0, 3), (2, 1)], f((1, 0)), KIND.INVALID_BOUNDS),  # incomparable
        ([(0, 3), (2, 1), (4, 4)], f((3, 5), (5, 3)), None),
        ([(0, 3), (2, 1), (5, 5)], f((3, 5), (5, 3)), KIND.UPDATE_BEYOND_UPPER),
        ([(0, 3), (3, 5)], f((3, 5), (5, 3)), KIND.UPDATE_BEYOND_UPPER),
        ([(0, 3), (99, 99)], f(), None),
        ([], f((0, 3), (2, 1)), None),
    ],
)
async def test_finish_with_product_times(times: Any, upper: Any, error: Any) -> None:
    async with open_mem(**EACH_ITS_OWN) as client, client.writer("t", PRODUCT) as w:
        async with w.builder(f((0, 3), (2, 1))) as b:
            for time in times:
                await b.add("a", 1, time, 1)
            if error is None:
                batch = await b.finish(upper)
                assert (batch.len, batch.upper) == (len(times), upper)
                await batch.delete()
                return
            with pytest.raises(ap.InvalidUsage) as caught:
                await b.finish(upper)
            assert caught.value.kind is error
            assert await parquet(client) == []


async def test_equal_bounds_are_fine_without_updates() -> None:
    async with open_mem() as client, client.writer("t", SCHEMA) as w, w.builder(5) as b:
        batch = await b.finish(5)
        assert (batch.lower, batch.upper, batch.parts) == (f(5), f(5), ())


async def test_a_finished_builder_is_consumed() -> None:
    async with open_mem() as client, client.writer("t", SCHEMA) as w:
        async with w.builder(0) as b:
            await b.add("a", 1, 0, 1)
            batch = await b.finish(1)
            await assert_closed(b, KIND.CONSUMED)
        await assert_closed(b, KIND.CONSUMED)
        await b.aclose()
        await b.aclose()
        await w.compare_and_append_batch([batch], 0, 1)  # closing it did not take the batch with it
        assert await rows(client) == [("a", 1, 1)]


async def test_a_batch_of_parts_outlives_its_builder() -> None:
    async with open_mem(**EACH_ITS_OWN) as client, client.writer("t", SCHEMA) as w:
        b = await w.builder(0)
        await b.extend([("a", 1, 0, 1), ("b", 1, 0, 1)])
        batch = await b.finish(f(1))
        await b.aclose()
        assert len(await parquet(client)) == 2
        await w.compare_and_append_batch([batch], 0, 1)
        assert await rows(client) == [("a", 1, 1), ("b", 1, 1)]


@pytest.mark.parametrize(
    "updates",
    [
        [],
        [("a", 1, 0, 0)],
        [("a", 1, 0, 1), ("a", 1, 0, -1)],
        [("a", 1, 0, 3), ("b", 1, 0, 1), ("a", 1, 0, -3), ("b", 1, 0, -1)],
    ],
    ids=["none", "zero", "pair", "pairs"],
)
@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_consolidated_away_to_nothing(updates: Any, inline: int) -> None:
    async with open_mem(inline_writes_single_max_bytes=inline) as client:
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            await b.extend(updates)
            batch = await b.finish(5)
            assert (batch.parts, batch.len, batch.runs) == ((), 0, ())
            assert await parquet(client) == []
            await w.compare_and_append_batch([batch], 0, 5)
            assert w.upper == f(5)
            assert await rows(client) == []


async def test_len_counts_what_is_in_the_parts() -> None:
    """Goal: what cancels out within a part does not count, what does so across parts does."""
    async with open_mem(blob_target_size=50, **NEVER_INLINE) as client:  # two updates each
        async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
            for key, diff in (
                ("a", 1),
                ("b", 1),
                ("a", -1),
                ("c", 1),
                ("d", 1),
                ("d", 1),
                ("e", 1),
                ("e", -1),
            ):
                await b.add(key, 1, 0, diff)
            batch = await b.finish(1)
            assert (len(batch.parts), batch.len) == (3, 5)
            await w.compare_and_append_batch([batch], 0, 1)
            assert await rows(client) == [("b", 1, 1), ("c", 1, 1), ("d", 1, 2)]


# --- inline parts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("single", "total", "sizes", "inline"),
    [
        (100, 2**20, [75], True),  # 75 + 24 goodbytes
        (100, 2**20, [76], False),
        (100, 2**20, [20, 31], True),
        (100, 2**20, [20, 32], False),
        (0, 2**20, [1], False),
        (16384, 0, [1], False),
        (0, 0, [1], False),
        (16384, 100, [76], False),
        (16384, 2**20, [200, 16000], True),
        (16384, 2**20, [200, 17000], False),
    ],
)
@pytest.mark.parametrize("how", ["add", "extend"])
async def test_a_small_batch_is_inline(single: int, total: int, sizes: Any, inline: bool, how: str) -> None:
    """Goal: less than the limit, by goodbytes; 0 is never; an inline batch writes no blob."""
    limits = {"inline_writes_single_max_bytes": single, "inline_writes_total_max_bytes": total}
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w, w.builder(0) as b:
        updates = [(str(n) * size, n, 0, 1) for n, size in enumerate(sizes)]
        if how == "add":
            assert [await b.add(*update) for update in updates] == [RECORD] * len(updates)
        else:
            await b.extend(iter(updates))
        batch = await b.finish(1)
        (part,) = batch.parts
        assert (part.key is None) is inline
        assert part.encoded_size_bytes > 0
        assert len(await parquet(client)) == (0 if inline else 1)
        await w.compare_and_append_batch([batch], 0, 1)
        assert len(await parquet(client)) == (0 if inline else 1)
        assert await rows(client) == [(key, val, 1) for key, val, _, _ in updates]


async def test_only_a_sole_part_that_is_still_buffered_is_inline() -> None:
    async with open_mem(blob_target_size=60) as client, client.writer("t", SCHEMA) as w:
        async with w.builder(0) as b:  # 25 bytes each: the third reaches the target
            added = [await b.add(key, 1, 0, 1) for key in "abc"]
            assert added == [RECORD, RECORD, PARTS]
            sole = await b.finish(1)
            assert [part.key is None for part in sole.parts] == [False]
        async with w.builder(0) as b:
            await b.extend([(key, 1, 0, 1) for key in "abcd"])
            followed = await b.finish(1)
            assert [part.key is None for part in followed.parts] == [False, False]
        async with w.builder(0) as b:
            await b.extend([(key, 1, 0, 1) for key in "ab"])
            buffered = await b.finish(1)
            assert [part.key is None for part in buffered.parts] == [True]
        for batch in (sole, followed, buffered):
            await batch.delete()
        assert await parquet(client) == []


@pytest.mark.parametrize("together", [1, 4])
async def test_inline_parts_of_a_shard_stay_below_their_total(together: int) -> None:
    """Goal: also when the batches of one append are too much together."""
    limits = {"inline_writes_single_max_bytes": 600, "inline_writes_total_max_bytes": 1500}
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        expected = {}
        for n in range(10):
            batches = []
            for m in range(together):
                async with w.builder(n) as b:
                    await b.add(f"{n}-{m}" + "x" * 400, m, n, 1)
                    batches.append(await b.finish(n + 1))
                expected[f"{n}-{m}" + "x" * 400, m, n] = 1
            assert all(part.key is None for batch in batches for part in batch.parts)
            await w.compare_and_append_batch(batches, n, n + 1)
            (shard,) = client._shards._known.values()
            assert shard.state.inline_bytes < 1500
        assert await history(client) == expected


# --- runs ----------------------------------------------------------------------------------------


def at(key: str, val: int = 0, time: int = 0, diff: int = 1) -> Any:
    return (key, val, time, diff)


@pytest.mark.parametrize(
    ("updates", "runs"),
    [
        ([], ()),
        ([at("a")], ()),
        ([at("a"), at("b"), at("c")], ()),
        ([at("c"), at("b"), at("a")], (1, 2)),
        ([at("a"), at("c"), at("b"), at("d")], (2,)),
        ([at("b"), at("a"), at("c"), at("a")], (1, 3)),
        ([at("a"), at("a"), at("a")], ()),  # at the end of the run so far
        ([at("a", 1), at("a", 2), at("a", 1)], (2,)),
        ([at("a", 1, 5), at("a", 1, 6), at("a", 1, 5)], (2,)),
        ([at("a", 9, 9), at("b", 0, 0)], ()),  # key before val before time
        ([at("a", 1, 9), at("a", 2, 0)], ()),
        ([at("a"), at("z", 0, 0, 0), at("b")], ()),  # the part in the middle came to nothing
        ([at("é"), at("z")], (1,)),  # by bytes
        ([at("a", -1), at("a", -2)], (1,)),
        ([at("a"), at(""), at("b")], (1,)),
    ],
)
async def test_runs(updates: Any, runs: tuple[int, ...]) -> None:
    """Goal: a part that begins at or after the end of the run continues it."""
    async with open_mem(**EACH_ITS_OWN) as client, client.writer("t", SCHEMA) as w, w.builder(0) as b:
        for update in updates:
            await b.add(*update)
        batch = await b.finish(20)
        assert batch.runs == runs
        assert [p.key_lower for p in batch.parts] == [u[0] for u in updates if u[3]]
        await w.compare_and_append_batch([batch], 0, 20)
        assert await history(client) == summed(updates)
        sums: dict[Any, int] = {}
        for key, val, _, diff in updates:
            sums[key, val] = sums.get((key, val), 0) + diff
        assert await rows(client) == [(*kv, d) for kv, d in sorted(sums.items()) if d]


async def test_a_run_is_compared_with_the_end_of_its_last_part() -> None:
    """Goal: of parts that overlap: [a, c] then [b, d] are two runs, [a, c] then [c, d] one."""
    for second, runs in ((("b", "d"), (1,)), (("c", "d"), ())):
        async with open_mem(blob_target_size=50, **NEVER_INLINE) as client:
            async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
                for key in ("c", "a", *second[::-1]):
                    await b.add(key, 1, 0, 1)
                batch = await b.finish(1)
                assert (len(batch.parts), batch.runs) == (2, runs)
                await batch.delete()


# --- stores that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.LATE])
async def test_a_slow_store_that_fails_every_third_request(outcome: Outcome) -> None:
    """Goal: answers lost or requests refused: the parts are there once, in their order."""
    updates = [(f"k{n:02}", n, n, 1) for n in range(12)]
    async with (
        rig(EveryThird(outcome), **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        for update in updates:
            await b.add(*update)
        batch = await b.finish(12)
        assert [part.key_lower for part in batch.parts] == [u[0] for u in updates]
        assert batch.runs == ()
        assert sorted(part.key for part in batch.parts) == sorted(await r.parquet())
        if outcome is not Outcome.DONE:
            assert r.faults.calls["set"] > 12
        await w.compare_and_append_batch([batch], 0, 12)
        assert await history(r.honest) == summed(updates)


FAILURES = [o for o in Outcome if o not in (Outcome.DONE, Outcome.LATE)]


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.parametrize("then", ["add", "refused", "extend", "finish"])
async def test_an_upload_that_fails_surfaces_at_the_next_call(outcome: Outcome, then: str) -> None:
    """Goal: at the very next `add`, or at `finish`; the builder is closed, and what was uploaded, told or
    not, is deleted."""
    async with (
        rig(retry_timeout_s=0, **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        await until(lambda: r.faults.calls["set"] == 1)
        r.faults.fail_next("set", outcome)
        await b.add("b", 1, 0, 1)
        await until(lambda: b._upload._in_flight[1].done())
        assert len(await r.parquet()) == (2 if outcome in HAPPENS else 1)
        with pytest.raises(ap.StorageUnavailable):
            match then:
                case "add":
                    await b.add("c", 1, 0, 1)
                case "refused":
                    await b.add("c", "not an int", 0, 1)
                case "extend":
                    await b.extend([("c", 1, 0, 1)])
                case "finish":
                    await b.finish(1)
        await assert_closed(b)
        assert await r.parquet() == []
        async with w.builder(0) as again:
            await again.add("c", 1, 0, 1)
            await w.compare_and_append_batch([await again.finish(1)], 0, 1)
        assert await rows(r.honest) == [("c", 1, 1)]


@pytest.mark.parametrize("outcome", FAILURES)
async def test_the_upload_that_finish_starts_may_fail(outcome: Outcome) -> None:
    async with (
        rig(retry_timeout_s=0, **NEVER_INLINE) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        r.faults.fail_next("set", outcome)
        with pytest.raises(ap.StorageUnavailable):
            await b.finish(1)
        await assert_closed(b)
        assert await r.parquet() == []


async def test_an_add_that_waits_for_the_part_that_fails() -> None:
    async with (
        rig(Gate(), retry_timeout_s=0, **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        await until(lambda: len(r.faults.waiting) == 1)
        await b.add("b", 1, 0, 1)
        r.faults.fail_next("set", Outcome.REFUSED)
        waiting = asyncio.create_task(b.add("c", 1, 0, 1))
        await until(lambda: len(r.faults.waiting) == 2)
        assert not waiting.done()
        r.faults.let(0)
        await until(lambda: r.faults.injected)
        r.faults.let_all()
        with pytest.raises(ap.StorageUnavailable):
            await waiting
        await assert_closed(b)
        await nothing_left(r.blob)


# --- the end of a builder that does not finish ---------------------------------------------------


async def test_left_without_finish_it_deletes_what_it_uploaded(location: StoreUrls) -> None:
    """Goal: on every kind of location, whatever ends it; of a batch that was appended nothing."""
    async with open_at(location, **EACH_ITS_OWN) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("kept", 1, 0, 1)], 0, 1)
        kept = await parquet(client)
        assert len(kept) == 1
        async with w.builder(1) as b:
            await b.extend([("a", 1, 1, 1), ("b", 1, 1, 1), ("c", 1, 1, 1)])
        assert await parquet(client) == kept
        await assert_closed(b)
        with pytest.raises(ZeroDivisionError):
            async with w.builder(1) as b:
                await b.add("a", 1, 1, 1)
                raise ZeroDivisionError
        assert await parquet(client) == kept
        b = await w.builder(1)
        await b.add("a", 1, 1, 1)
        await b.aclose()
        await b.aclose()
        assert await parquet(client) == kept
        assert await rows(client) == [("kept", 1, 1)]


@pytest.mark.parametrize("end", ["exit", "writer", "client"])
async def test_uploads_in_flight_are_deleted_once_they_have_ended(end: str) -> None:
    """Goal: cut off, a write could still arrive; so it is awaited, and then deleted."""
    async with rig(Gate(), **EACH_ITS_OWN) as r:
        w = await r.client.writer("t", SCHEMA)
        b = await w.builder(0)
        await b.add("a", 1, 0, 1)
        await until(lambda: len(r.faults.waiting) == 1)
        await b.add("b", 1, 0, 1)
        await until(lambda: len(r.faults.waiting) == 2)
        stalled = asyncio.create_task(b.add("c", 1, 0, 1))
        await until(lambda: b.write_stalls == 1)
        asyncio.get_running_loop().call_later(0.05, r.faults.let_all)
        await {"exit": b, "writer": w, "client": r.client}[end].aclose()
        with pytest.raises(ap.InvalidUsage) as caught:
            await stalled
        assert caught.value.kind is KIND.CLOSED
        await assert_closed(b)
        await until(lambda: r.faults.calls["set"] >= 2)
        await nothing_left(r.blob)


@pytest.mark.parametrize("where", ["add", "extend", "finish"])
async def test_a_cancelled_builder_deletes_what_it_uploaded(where: str) -> None:
    """Goal: the caller is not held up by uploads that hang: the deletion goes on without it."""
    async with rig(Gate(), **EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w:
        builders = []

        async def work() -> None:
            async with w.builder(0) as b:
                builders.append(b)
                await b.add("a", 1, 0, 1)
                await b.add("b", 1, 0, 1)
                match where:
                    case "add":
                        await b.add("c", 1, 0, 1)
                    case "extend":
                        await b.extend([("c", 1, 0, 1)])
                    case "finish":
                        await b.finish(1)

        task = asyncio.create_task(work())
        await until(lambda: len(r.faults.waiting) == 2)
        task.cancel()
        async with asyncio.timeout(1):
            with pytest.raises(asyncio.CancelledError):
                await task
        await assert_closed(builders[0])
        r.faults.let_all()
        await until(lambda: r.faults.calls["delete"])
        await nothing_left(r.blob)
        assert r.faults.calls["set"] == 2


async def test_an_add_that_is_cancelled_leaves_a_builder_that_goes_on() -> None:
    """Goal: that update may be in or not; the others are in once."""
    async with rig(Gate(), **EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w, w.builder(0) as b:
        await b.add("a", 1, 0, 1)
        await b.add("b", 1, 0, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await b.add("maybe", 1, 0, 1)
        r.faults.let_all()
        await b.add("c", 1, 0, 1)
        batch = await b.finish(1)
        await w.compare_and_append_batch([batch], 0, 1)
        found = {key: diff for key, _, diff in await rows(r.honest)}
        assert found.pop("maybe", 1) == 1
        assert found == {"a": 1, "b": 1, "c": 1}


async def test_a_deletion_that_fails_does_not_hide_the_error() -> None:
    """Goal: the body's own error leaves unwrapped, though the store is gone."""
    async with rig(retry_timeout_s=0, **EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w:
        with pytest.raises(ZeroDivisionError):
            async with w.builder(0) as b:
                await b.add("a", 1, 0, 1)
                r.faults.fail_next("delete", Outcome.REFUSED, 100)
                raise ZeroDivisionError


async def test_opening_and_filling_a_builder_commits_nothing() -> None:
    async with rig(**EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w:
        before = r.on_consensus.calls["compare_and_set"]
        async with w.builder(0) as b:
            await b.extend([("a", 1, 0, 1), ("b", 1, 0, 1)])
            batch = await b.finish(1)
        assert r.on_consensus.calls["compare_and_set"] == before
        assert w.upper == f(0)
        await batch.delete()


# --- the smallest settings -----------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 1, 60])
@pytest.mark.parametrize("outstanding", [1, 2])
@pytest.mark.parametrize("single", [0, 1, 16384], ids="single{}".format)
@pytest.mark.parametrize("total", [0, 2**20], ids="total{}".format)
async def test_tiny_settings(target: int, outstanding: int, single: int, total: int) -> None:
    """Goal: zeros and ones are settings like others."""
    limits = {
        "blob_target_size": target,
        "batch_builder_max_outstanding_parts": outstanding,
        "inline_writes_single_max_bytes": single,
        "inline_writes_total_max_bytes": total,
    }
    updates = [(k, v, t, 1) for k, v, t in (("b", 1, 0), ("a", 2, 1), ("a", 1, 2), ("b", 1, 0))]
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        async with w.builder(0) as b:
            await b.add(*updates[0])
            await b.extend(updates[1:3])
            await b.add(*updates[3])
            assert b.parts_in_flight <= outstanding
            batch = await b.finish(3)
        assert all(part.key is not None for part in batch.parts)
        assert len(batch.parts) == (4 if target < 2 else 2)
        await w.compare_and_append_batch([batch], 0, 3)
        async with w.builder(3) as b:
            small = await b.finish(4)
        await w.compare_and_append_batch([small], 3, 4)
        assert await history(client) == summed(updates)
        assert await rows(client) == [("a", 1, 1), ("a", 2, 1), ("b", 1, 2)]


async def test_the_tiniest_settings_on_every_location(location: StoreUrls) -> None:
    limits = {
        "blob_target_size": 0,
        "batch_builder_max_outstanding_parts": 1,
        "inline_writes_single_max_bytes": 0,
        "inline_writes_total_max_bytes": 0,
    }
    updates = [(f"k{n % 4}", n % 2, n, 1 if n % 3 else -1) for n in range(10)]
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        async with w.builder(0) as b:
            for n, update in enumerate(updates[:5]):
                await b.add(*update)
                assert (b.parts_in_flight, b.parts_finished, b.write_stalls) == (1, n, n)
            await b.extend(as_table(updates[5:]))
            batch = await b.finish(10)
        assert len(batch.parts) == 10
        assert sorted(part.key for part in batch.parts) == await parquet(client)
        await w.compare_and_append_batch([batch], 0, 10)
        assert await history(client) == summed(updates)
        for as_of in (0, 4, 9):
            sums: dict[Any, int] = {}
            for key, val, time, diff in updates:
                if time <= as_of:
                    sums[key, val] = sums.get((key, val), 0) + diff
            assert await rows(client, as_of) == [(*kv, d) for kv, d in sorted(sums.items()) if d]


# --- the property --------------------------------------------------------------------------------

UPDATE = st.tuples(
    st.sampled_from(["", "a", "bb", "é"]), st.integers(-1, 1), st.integers(2, 9), st.integers(-2, 2)
)
PIECE = st.tuples(st.sampled_from(["add", *FORMS]), st.lists(UPDATE, max_size=7))


@settings(max_examples=40)
@given(
    pieces=st.lists(PIECE, max_size=6),
    target=st.sampled_from([0, 1, 30, 60, 200, 2**27]),
    outstanding=st.integers(1, 3),
    single=st.sampled_from([0, 60, 16384]),
    window=st.tuples(st.integers(2, 10), st.integers(2, 10)).map(sorted),
    as_of=st.integers(0, 8),
    rewrites=st.none() | st.lists(st.integers(0, 5), min_size=1, max_size=3),
)
def test_what_was_added_is_read_back(
    pieces: list[tuple[str, list[Any]]],
    target: int,
    outstanding: int,
    single: int,
    window: list[int],
    as_of: int,
    rewrites: list[int] | None,
) -> None:
    """Goal: in any form, cut anywhere, truncated to any window or moved in time: the sums are those of a
    loop over the updates."""
    given_updates = [update for _, updates in pieces for update in updates]
    limits = {
        "blob_target_size": target,
        "batch_builder_max_outstanding_parts": outstanding,
        "inline_writes_single_max_bytes": single,
    }

    async def run() -> None:
        lower, upper = window
        async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
            async with w.builder(2) as b:
                for how, updates in pieces:
                    if how == "add":
                        for update in updates:
                            await b.add(*update)
                    else:
                        await b.extend(FORMS[how](updates))
                batch = await b.finish(10)
            frontier = 2
            for step in rewrites or ():
                frontier += step
                batch.rewrite_ts(frontier, max(10, frontier + 1))
            if rewrites is None:
                expected = [u for u in given_updates if lower <= u[2] < upper]
            else:
                expected = [(k, v, max(t, frontier), d) for k, v, t, d in given_updates]
                lower, upper = min(lower, frontier), max(10, frontier + 1)
            await w.compare_and_append([], 0, lower)
            if rewrites is None and lower == upper and batch.parts:
                with pytest.raises(ap.InvalidUsage):
                    await w.compare_and_append_batch([batch], lower, upper)
                await batch.delete()
                return
            await w.compare_and_append_batch([batch], lower, upper)
            assert await history(client) == summed(expected)
            if as_of < upper:
                sums: dict[Any, int] = {}
                for key, val, time, diff in expected:
                    if time <= as_of:
                        sums[key, val] = sums.get((key, val), 0) + diff
                found = {(k, v): d for k, v, d in await rows(client, as_of)}
                assert found == {kv: d for kv, d in sums.items() if d}

    asyncio.run(run())
