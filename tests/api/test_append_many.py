"""Goal: an append to several shards is in all of them or in none, whatever becomes of its statement or of
its caller, and every writer that took part says so for its own shard."""

import asyncio
import itertools
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.register import Register
from aiopersist.state.writing import ExpireWriter
from aiopersist.storage.consensus import Entry
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.support.cancelling import cancelled_after
from tests.support.schemas import SCHEMA, Writer
from tests.support.shards import SIZES

MANY = "compare_and_set_many"
NAMES = ["a", "b", "c"]


async def contents(client: ap.Client, name: str) -> dict[str, int]:
    """Keys with their summed diffs at the greatest complete time; nothing where there is none."""
    async with client.reader(name, SCHEMA) as r:
        if await r.fetch_recent_upper() == ap.Antichain(0):
            return {}
        async with r.snapshot() as s:
            return {key: diff for key, _, diff in await s.rows()}


@dataclass
class Rig:
    """One place in memory: `client` reaches it through `faults`, `honest` directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob: MemoryBlob
    stack: AsyncExitStack

    async def writers(
        self, names: Sequence[str] = NAMES[:2], client: ap.Client | None = None
    ) -> list[Writer]:
        opener = client or self.client
        return [await self.stack.enter_async_context(opener.writer(name, SCHEMA)) for name in names]

    async def contents(self, names: Sequence[str] = NAMES[:2]) -> list[dict[str, int]]:
        return [await contents(self.honest, name) for name in names]

    async def blobs(self) -> list[str]:
        return [key async for key, _ in self.blob.list("") if key.endswith(".parquet")]


@asynccontextmanager
async def rig(wrap: type[FaultyConsensus] = FaultyConsensus, **limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    url = f"mem://{place}"
    async with AsyncExitStack() as stack:
        blob = MemoryBlob(place)
        honest = await stack.enter_async_context(ap.open(blob=url, consensus=url, maintenance=False))
        client = await stack.enter_async_context(
            ap.open(
                blob=blob,  # an upload that is late would leave a blob after its deletion
                consensus=wrap(MemoryConsensus(place), faults),
                settings=ap.Settings(**{"retry_timeout_s": 3.0, **limits}),
                maintenance=False,
            )
        )
        try:
            yield Rig(client, honest, faults, blob, stack)
        finally:
            faults.heal()
            faults.latency_s = (0.0, 0.0)


def rows(key: str, at: int = 0) -> list[tuple[str, int, int, int]]:
    return [(key, 1, at, 1)]


def one_each(writers: Sequence[Writer], key: str = "k", at: int = 0) -> list[ap.Append]:
    """The same row for each."""
    return [ap.Append(w, rows(key, at), at, at + 1) for w in writers]


# --- all or none -----------------------------------------------------------------------------------


@pytest.mark.parametrize("single", SIZES)
async def test_updates_and_batches_in_three_shards(location: Any, single: int) -> None:
    """Goal: on every kind of store; one shard gets updates, one a batch, one several."""
    blob, consensus = location
    limits = ap.Settings(inline_writes_single_max_bytes=single)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(ap.open(blob=blob, consensus=consensus, settings=limits))
        ws = [await stack.enter_async_context(client.writer(name, SCHEMA)) for name in NAMES]
        batch = await ws[1].batch(rows("b"), 0, 1)
        two = [await ws[2].batch(rows("c", n), 0, 3) for n in range(2)]
        await client.compare_and_append_many(
            [ap.Append(ws[0], rows("a"), 0, 5), ap.Append(ws[1], batch, 0, 1), ap.Append(ws[2], two, 0, 3)]
        )
        assert [w.upper for w in ws] == [ap.Antichain(5), ap.Antichain(1), ap.Antichain(3)]
        for used in (batch, *two):
            with pytest.raises(ap.InvalidUsage) as caught:
                await used.delete()
            assert caught.value.kind == ap.UsageKind.CONSUMED
        assert [await w.settle() for w in ws] == [None] * 3
        other = await stack.enter_async_context(ap.open(blob=blob, consensus=consensus))
        assert [await contents(other, name) for name in NAMES] == [{"a": 1}, {"b": 1}, {"c": 2}]
        stale = await ws[1].batch(rows("late", 1), 0, 9)
        appends = [
            ap.Append(ws[0], rows("late", 5), 5, 6),
            ap.Append(ws[1], [stale], 1, 9),
            ap.Append(ws[2], [], 2, 4),
        ]
        with pytest.raises(ap.UpperMismatch) as mismatch:
            await client.compare_and_append_many(appends)
        assert mismatch.value.shard_id == ws[2].shard_id
        assert [await contents(other, name) for name in NAMES] == [{"a": 1}, {"b": 1}, {"c": 2}]
        await client.compare_and_append_many([*appends[:2], ap.Append(ws[2], [], 3, 4)])
        expected = [{"a": 1, "late": 1}, {"b": 1, "late": 1}, {"c": 2}]
        assert [await contents(other, name) for name in NAMES] == expected


@pytest.mark.parametrize("known", [True, False], ids=["seen", "not_seen_yet"])
@pytest.mark.parametrize("staged", [True, False], ids=["batches", "updates"])
@pytest.mark.parametrize("single", SIZES)
@pytest.mark.parametrize("at", range(3))
async def test_a_mismatch_names_its_shard(at: int, single: int, staged: bool, known: bool) -> None:
    """Goal: nothing is in any shard, no blob of updates is left, batches are the caller's still."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        ws = await r.writers(NAMES)
        others = await r.writers(NAMES, r.honest)
        await others[at].compare_and_append([], 0, 7)
        if known:
            await ws[at].fetch_recent_upper()
        batches = [await w.batch(rows("k"), 0, 10) for w in ws] if staged else []
        blobs = await r.blobs()
        given: Any = batches if staged else [rows("k")] * 3
        appends = [ap.Append(w, one, 0, 10) for w, one in zip(ws, given, strict=True)]
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.client.compare_and_append_many(appends)
        assert caught.value.shard_id == ws[at].shard_id
        assert (caught.value.expected, caught.value.current) == (ap.Antichain(0), ap.Antichain(7))
        assert ws[at].upper == ap.Antichain(7)
        uppers = [await w.fetch_recent_upper() for w in others]
        assert uppers == [ap.Antichain(7 if n == at else 0) for n in range(3)]
        await asyncio.sleep(0.01)
        assert await r.blobs() == blobs
        assert [await w.settle() for w in ws] == [None] * 3
        for batch in batches:
            await batch.delete()
        assert await r.blobs() == []


async def test_what_is_no_append_is_refused() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await r.writers()
        (again,) = await r.writers(["a"])
        (stranger,) = await r.writers(["b"], r.honest)
        batch = await a.batch(rows("k"), 0, 1)
        first = ap.Append(a, batch, 0, 1)
        refused: list[Any] = [
            [first, ap.Append(a, [], 0, 1)],
            [first, ap.Append(again, [], 0, 1)],
            [first, ap.Append(b, [], 0, 1), ap.Append(a, [], 1, 2)],
            [first, ap.Append(stranger, [], 0, 1)],
            [ap.Append(stranger, [], 0, 1)],
            [first, ap.Append(r.client, [], 0, 1)],  # type: ignore[arg-type]
        ]
        for appends in refused:
            with pytest.raises(ap.InvalidUsage) as caught:
                await r.client.compare_and_append_many(appends)
            assert caught.value.kind == ap.UsageKind.INVALID_APPEND
        assert await r.contents() == [{}, {}]
        assert r.faults.calls[MANY] == 0
        await batch.delete()
        await r.client.compare_and_append_many([])
        assert await r.blobs() == []


async def test_a_wrong_one_among_several_stops_all() -> None:
    """Goal: bounds, data and batches of each are checked before anything is sent."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await r.writers()
        mine, other = await a.batch(rows("k"), 0, 1), await b.batch(rows("k"), 0, 1)
        gone = await b.batch([], 0, 1)
        await gone.delete()
        blobs = await r.blobs()
        wrong = [
            (ap.Append(b, [], 1, 0), ap.UsageKind.INVALID_BOUNDS),
            (ap.Append(b, rows("k", 3), 0, 1), ap.UsageKind.UPDATE_BEYOND_UPPER),
            (ap.Append(b, rows("k", 0), 1, 2), ap.UsageKind.UPDATE_NOT_BEYOND_LOWER),
            (ap.Append(b, rows("k"), 0, (1, 2)), ap.UsageKind.INVALID_TIME),
            (ap.Append(b, mine, 0, 1), ap.UsageKind.OUTCOME_PENDING),  # it is in use, right before
            (ap.Append(b, gone, 0, 1), ap.UsageKind.CONSUMED),
            (ap.Append(b, [other, other], 0, 1), ap.UsageKind.CONSUMED),
            (ap.Append(b, other, 0, 2), ap.UsageKind.INVALID_BATCH_BOUNDS),
            (ap.Append(b, [("k", "text", 0, 1)], 0, 1), None),
            (ap.Append(b, [other, ("k", 1, 0, 1)], 0, 1), None),
        ]
        for append, kind in wrong:
            with pytest.raises((ValueError, TypeError)) as caught:
                await r.client.compare_and_append_many([ap.Append(a, mine, 0, 1), append])
            if append.updates is not mine:  # whose other fault is as good
                assert getattr(caught.value, "kind", None) == kind
            assert await r.blobs() == blobs
        assert r.faults.calls[MANY] == 0
        await r.client.compare_and_append_many([ap.Append(a, mine, 0, 1), ap.Append(b, other, 0, 1)])
        assert await r.contents() == [{"k": 1}, {"k": 1}]


class Plain(FaultyConsensus):
    """A backend without transactions over several keys."""

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        raise ap.Unsupported("one key at a time")


@pytest.mark.parametrize("single", SIZES)
async def test_a_backend_that_cannot_do_it_says_so(single: int) -> None:
    """Goal: `Unsupported`, determinate: no blob left, batches free, nothing to settle."""
    async with rig(Plain, inline_writes_single_max_bytes=single) as r:
        a, b = await r.writers()
        batch = await b.batch(rows("k"), 0, 1)
        blobs = await r.blobs()
        with pytest.raises(ap.Unsupported):
            await r.client.compare_and_append_many([ap.Append(a, rows("k"), 0, 1), ap.Append(b, batch, 0, 1)])
        await asyncio.sleep(0.01)
        assert await r.blobs() == blobs
        assert [await a.settle(), await b.settle()] == [None, None]
        assert await r.contents() == [{}, {}]
        await b.compare_and_append_batch([batch], 0, 1)
        await a.compare_and_append(rows("k"), 0, 1)
        assert await r.contents() == [{"k": 1}, {"k": 1}]


async def test_a_spent_copy_in_one_shard_stops_all() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await r.writers()
        data = (await b.batch(rows("k"), 0, 5)).to_transmittable()
        one, two = await b.batch_from_transmittable(data), await b.batch_from_transmittable(data)
        await b.compare_and_append_batch([one], 0, 1)
        with pytest.raises(ap.AlreadyAppended) as caught:
            await r.client.compare_and_append_many([ap.Append(a, rows("k"), 0, 1), ap.Append(b, two, 1, 5)])
        assert caught.value.shard_id == b.shard_id
        await asyncio.sleep(0.01)
        assert len(await r.blobs()) == 1
        assert await r.contents() == [{}, {"k": 1}]


@pytest.mark.parametrize("expired", [[0], [1], [0, 1]])
async def test_a_writer_whose_lease_ran_out_registers_anew(expired: list[int]) -> None:
    async with rig() as r:
        ws = await r.writers()
        for n in expired:  # behind their backs
            (other,) = await r.writers([NAMES[n]], r.honest)
            await commit(other._shard.register, ExpireWriter(ws[n].writer_id), Slot())
        await r.client.compare_and_append_many(one_each(ws))
        assert await r.contents() == [{"k": 1}, {"k": 1}]


async def test_an_expired_batch_in_one_shard_stops_all() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        a, b = await r.writers()
        batch = await b.batch(rows("k"), 0, 1)
        (other,) = await r.writers(["b"], r.honest)
        await commit(other._shard.register, ExpireWriter(b.writer_id), Slot())
        with pytest.raises(ap.BatchExpired) as caught:
            await r.client.compare_and_append_many([ap.Append(a, rows("k"), 0, 1), ap.Append(b, batch, 0, 1)])
        assert caught.value.shard_id == b.shard_id
        await batch.delete()
        await asyncio.sleep(0.01)
        assert await r.blobs() == []
        await r.client.compare_and_append_many(one_each([a, b]))
        assert await r.contents() == [{"k": 1}, {"k": 1}]


async def test_inline_bytes_stay_bounded() -> None:
    """Goal: several shards without room at the same moment: flushed, and appended all the same."""
    async with rig(inline_writes_total_max_bytes=2000) as r:
        ws = await r.writers(NAMES)
        for n in range(12):
            batches = [await ws[0].batch(rows(f"k{n}-{i}", n), n, n + 1) for i in range(n % 5)]
            appends = [ap.Append(ws[0], batches, n, n + 1), *one_each(ws[1:], f"k{n}", n)]
            await r.client.compare_and_append_many(appends)
            for w in ws:
                assert (await w._shard.open()).inline_bytes < 2000
        found = await r.contents(NAMES)
        assert found[0] == {f"k{n}-{i}": 1 for n in range(12) for i in range(n % 5)}
        assert found[1] == found[2] == {f"k{n}": 1 for n in range(12)}


async def test_finished_and_closed() -> None:
    """Goal: a shard may be finished by it; a closed writer is refused, and the other shard has nothing."""
    async with rig() as r:
        a, b = await r.writers()
        await r.client.compare_and_append_many(
            [ap.Append(a, rows("k"), 0, ap.Antichain()), ap.Append(b, [], 0, 1)]
        )
        assert a.upper == ap.Antichain()
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.client.compare_and_append_many([ap.Append(a, [], 0, 1), *one_each([b], at=1)])
        assert caught.value.shard_id == a.shard_id
        await b.aclose()
        (fresh,) = await r.writers(["c"])
        with pytest.raises(ap.InvalidUsage) as usage:
            await r.client.compare_and_append_many([*one_each([fresh]), ap.Append(b, [], 1, 2)])
        assert usage.value.kind == ap.UsageKind.CLOSED
        assert await r.contents(NAMES) == [{"k": 1}, {}, {}]


# --- outcomes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", SIZES)
@pytest.mark.parametrize(
    "outcomes",
    [
        [Outcome.LOST],
        [Outcome.DROPPED],
        [Outcome.REFUSED],
        [Outcome.LATE],
        [Outcome.LATE, Outcome.LOST],
        [Outcome.DROPPED, Outcome.REFUSED, Outcome.LATE, Outcome.LOST],
    ],
    ids="+".join,
)
async def test_answers_that_are_lost(outcomes: list[Outcome], single: int) -> None:
    """Goal: the call returns only when all is in, once."""
    async with rig(inline_writes_single_max_bytes=single) as r:
        ws = await r.writers(NAMES)
        batch = await ws[2].batch(rows("k"), 0, 1)
        for outcome in outcomes:
            r.faults.fail_next(MANY, outcome)
        await r.client.compare_and_append_many([*one_each(ws[:2]), ap.Append(ws[2], batch, 0, 1)])
        assert len(r.faults.injected) == len(outcomes)
        await r.faults.land()
        assert await r.contents(NAMES) == [{"k": 1}] * 3
        assert [await w.settle() for w in ws] == [None] * 3
        assert len(await r.blobs()) == (0 if single else 3)


async def doubtful(r: Rig, appends: list[ap.Append], outcome: Outcome) -> None:
    """Make that call end without an answer, its statement having ended so."""
    for append in appends:
        await append.writer.fetch_recent_upper()  # so that the statement is no mismatch
    r.faults.fail_next(MANY, outcome)
    r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
    sent = r.faults.calls[MANY]
    call = asyncio.create_task(r.client.compare_and_append_many(appends))
    while r.faults.calls[MANY] == sent or not r.faults.calls["scan"]:
        await asyncio.sleep(0.001)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled()
    r.faults.heal()


ORDERS = [pytest.param(order, id="".join(map(str, order))) for order in itertools.permutations(range(3))]


@pytest.mark.parametrize(
    ("outcome", "landing"),
    [
        (Outcome.LOST, "never"),
        (Outcome.DROPPED, "never"),
        (Outcome.LATE, "never"),
        (Outcome.LATE, "before"),
        (Outcome.LATE, "between"),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
async def test_settled_in_any_order(order: tuple[int, ...], outcome: Outcome, landing: str) -> None:
    """Goal: each writer answers for its own shard, and all give the same answer; batches go with it."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        ws = await r.writers(NAMES)
        batch = await ws[1].batch(rows("k"), 0, 1)
        appends = [ap.Append(ws[0], rows("k"), 0, 4), ap.Append(ws[1], batch, 0, 1), *one_each(ws[2:])]
        await doubtful(r, appends, outcome)
        for call in (batch.delete(), ws[1].append_batch(batch, 0, 1)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await call
            assert caught.value.kind == ap.UsageKind.OUTCOME_PENDING
        if landing == "before":
            await r.faults.land()
        committed = outcome is Outcome.LOST or landing == "before"
        for n in order:
            upper = ap.Antichain(4 if n == 0 else 1)
            expected = ap.Committed(upper) if committed else ap.NotCommitted()
            # the failed `append_batch` above was the last append that began
            if n == 1:
                assert await ws[n].settle() is None
            else:
                assert await ws[n].settle() == expected
            if landing == "between":
                await r.faults.land()
        assert await r.contents(NAMES) == ([{"k": 1}] * 3 if committed else [{}] * 3)
        if not committed:
            await batch.delete()
        await asyncio.sleep(0.01)
        assert len(await r.blobs()) == (3 if committed else 0)
        for w in ws:
            await w.compare_and_append([], w.upper, 9)
            assert await w.settle() is None


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
@pytest.mark.parametrize("first", [None, 0, 1])
async def test_one_settles_while_the_other_shard_moves_on(first: int | None, outcome: Outcome) -> None:
    """Goal: versions later, the second comes to the answer of the first; also where another's version,
    in one shard alone, decided it."""
    async with rig(inline_writes_single_max_bytes=0) as r:
        ws = await r.writers()
        others = await r.writers(client=r.honest)
        await doubtful(r, one_each(ws), outcome)
        upper = 1 if outcome is Outcome.LOST else 0
        answers: list[Any] = [None, None]
        if first is not None:
            answers[first] = await ws[first].settle()
        moving = 1 if first is None else 1 - first
        for n in range(5):
            await others[moving].compare_and_append(rows(f"other{n}", upper + n), upper + n, upper + n + 1)
        await r.faults.land()
        for n in range(2):
            if n != first:
                answers[n] = await ws[n].settle()
        if outcome is Outcome.LOST:
            assert answers == [ap.Committed(ap.Antichain(1))] * 2
        else:
            assert answers == [ap.NotCommitted()] * 2
        found = await r.contents()
        assert ["k" in one for one in found] == [outcome is Outcome.LOST] * 2
        assert [len(one) for one in found] == [upper + 5 * (n == moving) for n in range(2)]
        await asyncio.sleep(0.01)
        named = {
            part.key
            for other in others
            for batch in (await other._shard.open()).batches.values()
            for part in batch.parts
            if part.key
        }
        assert set(await r.blobs()) == named


async def test_the_next_call_of_one_writer_settles_only_its_own() -> None:
    """Goal: one writer goes on with appends of its own, before the other has asked."""
    async with rig() as r:
        a, b = await r.writers()
        await doubtful(r, one_each([a, b]), Outcome.LOST)
        await a.compare_and_append(rows("more", 1), 1, 2)
        assert await a.settle() is None
        assert await b.settle() == ap.Committed(ap.Antichain(1))
        await doubtful(r, [*one_each([a], at=2), *one_each([b], at=1)], Outcome.DROPPED)
        await b.compare_and_append(rows("more", 1), 1, 2)
        assert await b.settle() is None
        assert await a.settle() == ap.NotCommitted()
        assert await r.contents() == [{"k": 1, "more": 1}, {"k": 1, "more": 1}]


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_a_store_that_stays_away_makes_it_indeterminate(outcome: Outcome) -> None:
    async with rig(retry_timeout_s=0.05) as r:
        ws = await r.writers()
        batch = await ws[0].batch(rows("k"), 0, 1)
        r.faults.fail_next(MANY, outcome)
        r.faults.fail_next("scan", Outcome.REFUSED, 1000)
        with pytest.raises(ap.Indeterminate):
            await r.client.compare_and_append_many([ap.Append(ws[0], batch, 0, 1), *one_each(ws[1:])])
        for w in ws:
            with pytest.raises(ap.Error):
                await w.settle()
        with pytest.raises(ap.InvalidUsage) as caught:
            await batch.delete()
        assert caught.value.kind == ap.UsageKind.OUTCOME_PENDING
        r.faults.heal()
        answers = [await w.settle() for w in reversed(ws)]
        await r.faults.land()
        if outcome is Outcome.LOST:
            assert answers == [ap.Committed(ap.Antichain(1))] * 2
        else:
            assert answers == [ap.NotCommitted()] * 2
            await batch.delete()
        assert await r.contents() == ([{"k": 1}] * 2 if outcome is Outcome.LOST else [{}, {}])


async def test_unavailable_says_that_it_did_not_happen() -> None:
    async with rig(retry_timeout_s=0.05, inline_writes_single_max_bytes=0) as r:
        ws = await r.writers()
        r.faults.fail_next(MANY, Outcome.REFUSED, 1000)
        with pytest.raises(ap.StorageUnavailable):
            await r.client.compare_and_append_many(one_each(ws))
        r.faults.heal()
        await asyncio.sleep(0.01)
        assert await r.blobs() == []
        assert [await w.settle() for w in ws] == [None, None]
        await r.client.compare_and_append_many(one_each(ws))
        assert await r.contents() == [{"k": 1}] * 2


async def settled_alike(client: ap.Client, honest: ap.Client, steps: int) -> None:
    """Cancel it after that many steps; the writers agree with each other and with what is there."""
    names = [uuid.uuid4().hex for _ in range(2)]
    async with client.writer(names[0], SCHEMA) as a, client.writer(names[1], SCHEMA) as b:
        batch = await b.batch(rows("k"), 0, 1)
        appends = [ap.Append(a, rows("k"), 0, 1), ap.Append(b, batch, 0, 1)]
        cancelled = await cancelled_after(client.compare_and_append_many(appends), steps)
        writers = [a, b] if steps % 2 else [b, a]
        answers = [await w.settle() for w in writers]
        uppers = [await w.fetch_recent_upper() for w in writers]
        assert uppers[0] == uppers[1]
        if not cancelled:
            assert (answers, uppers[0]) == ([None, None], ap.Antichain(1))
        elif uppers[0] == ap.Antichain(1):
            assert answers == [ap.Committed(ap.Antichain(1))] * 2
        else:
            assert answers == [ap.NotCommitted()] * 2
            await client.compare_and_append_many(appends)
        for name in names:
            assert await contents(honest, name) == {"k": 1}


@pytest.mark.parametrize("single", SIZES)
async def test_cancelled_at_any_step(single: int) -> None:
    async with rig(inline_writes_single_max_bytes=single) as r:
        for steps in range(1, 40):
            await settled_alike(r.client, r.honest, steps)


async def test_cancelled_at_any_step_of_slow_stores() -> None:
    async with rig(inline_writes_single_max_bytes=0) as r:
        for steps in range(1, 300, 23):
            r.faults.latency_s = (0.0, 0.001)
            r.faults.rates = dict.fromkeys(
                (Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED), 0.07
            )
            await settled_alike(r.client, r.honest, steps)
            await r.faults.land()


@pytest.mark.parametrize("steps", [3, 30, 100, 1000])
async def test_cancelled_at_some_step_on_every_store(location: Any, steps: int) -> None:
    blob, consensus = location
    async with (
        ap.open(blob=blob, consensus=consensus) as client,
        ap.open(blob=blob, consensus=consensus) as honest,
    ):
        await settled_alike(client, honest, steps)


# --- many at once ----------------------------------------------------------------------------------


async def transfer(client: ap.Client, ws: Sequence[Writer], key: str) -> None:
    """Append to all at their uppers, as often as it takes."""
    while True:
        appends = []
        for w in ws:
            t: Any = w.upper.time
            appends.append(ap.Append(w, rows(key, t), t, t + 1))
        try:
            return await client.compare_and_append_many(appends)
        except ap.UpperMismatch:
            continue


@pytest.mark.parametrize("shared", [True, False], ids=["shared_handles", "own_handles"])
async def test_overlapping_appends_do_not_block_each_other(shared: bool) -> None:
    """Goal: no order of shards leads to a deadlock, nor to a wait for a turn that only time ends."""
    async with rig() as r:
        r.faults.latency_s = (0.001, 0.002)
        times = 3 if shared else 1
        common = dict(zip(NAMES, await r.writers(NAMES), strict=True))
        orders = [*itertools.permutations(NAMES, 2), tuple(NAMES), tuple(reversed(NAMES))]

        async def work(number: int, order: Sequence[str]) -> None:
            ws = [common[name] for name in order] if shared else await r.writers(order)
            for n in range(times):
                await transfer(r.client, ws, f"{number}-{n}")

        async with asyncio.timeout(30):
            await asyncio.gather(*(work(number, order) for number, order in enumerate(orders)))
        found = await r.contents(NAMES)
        for name, one in zip(NAMES, found, strict=True):
            expected = {
                f"{i}-{n}": 1 for i, order in enumerate(orders) if name in order for n in range(times)
            }
            assert one == expected


async def test_opposite_orders_take_turns_without_waiting_for_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: turns are taken in one order by all, so two calls that name the shards in opposite orders do
    not hold each other up."""
    taken: list[bool] = []
    take_turn = Register.take_turn

    async def watched(self: Register) -> bool:
        taken.append(await take_turn(self))
        return taken[-1]

    monkeypatch.setattr(Register, "take_turn", watched)
    async with rig() as r:
        r.faults.latency_s = (0.001, 0.001)
        forth, back = await r.writers(["a", "b"]), await r.writers(["b", "a"])

        async def beat(ws: Sequence[Writer]) -> None:
            for _ in range(5):
                await r.client.compare_and_append_many([ap.Append(w, [], 0, 0) for w in ws])

        await asyncio.gather(beat(forth), beat(back))
        assert all(taken)


async def test_with_single_appends_of_the_same_writers() -> None:
    """Goal: one handle serves several kinds of appends at once."""
    async with rig() as r:
        r.faults.latency_s = (0.0, 0.001)
        a, b = await r.writers()

        async def writes(w: Writer, name: str) -> None:
            for n in range(15):
                await w.write([(f"{name}{n}", 1)])

        async def transfers() -> None:
            for n in range(15):
                await transfer(r.client, [a, b] if n % 2 else [b, a], f"both{n}")

        async with asyncio.timeout(30):
            await asyncio.gather(writes(a, "a"), writes(b, "b"), writes(a, "x"), transfers())
        both = {f"both{n}": 1 for n in range(15)}
        found = await r.contents()
        assert found[0] == both | {f"{name}{n}": 1 for name in "ax" for n in range(15)}
        assert found[1] == both | {f"b{n}": 1 for n in range(15)}


async def test_several_clients_on_every_store(location: Any) -> None:
    """Goal: appends of several clients to the same shards: each is in all or in none, whoever wins."""
    blob, consensus = location
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(ap.open(blob=blob, consensus=consensus)) for _ in range(3)]

        async def work(number: int) -> None:
            ws = [await stack.enter_async_context(clients[number].writer(name, SCHEMA)) for name in NAMES]
            for n in range(4):
                await transfer(clients[number], random.Random(n).sample(ws, 3), f"{number}-{n}")

        async with asyncio.timeout(50):
            await asyncio.gather(*map(work, range(3)))
        expected = {f"{number}-{n}": 1 for number in range(3) for n in range(4)}
        for name in NAMES:
            assert await contents(clients[0], name) == expected


@pytest.mark.parametrize("seed", range(6))
async def test_two_shards_that_are_written_together_stay_alike(seed: int) -> None:
    """Goal: under faults, cancellations and rivals, two shards that are only ever written together hold the
    same, and what was acknowledged or settled as committed."""
    chance = random.Random(seed)
    async with rig(inline_writes_single_max_bytes=chance.choice([0, 16384])) as r:
        r.faults._random.seed(seed)
        committed: set[str] = set()

        async def work(number: int) -> None:
            ws = await r.writers(["a", "b"] if number % 2 else ["b", "a"])
            for n in range(12):
                key = f"{number}-{n}"
                uppers = [await w.fetch_recent_upper() for w in ws]
                staged: Any = [rows(key, u.time) for u in uppers if isinstance(u.time, int)]
                batches = []
                if chance.random() < 0.5:
                    batches = [await ws[0].batch(staged[0], uppers[0], staged[0][0][2] + 1)]
                    staged[0] = batches
                ends = [u.time + 1 for u in uppers if isinstance(u.time, int)]
                appends = [ap.Append(*one) for one in zip(ws, staged, uppers, ends, strict=True)]
                try:
                    done = not await cancelled_after(
                        r.client.compare_and_append_many(appends),
                        chance.choice([10**4, chance.randrange(1, 150)]),
                    )
                except ap.UpperMismatch:
                    done = False
                else:
                    if not done:
                        answers = [await w.settle() for w in chance.sample(ws, 2)]
                        assert type(answers[0]) is type(answers[1])
                        done = isinstance(answers[0], ap.Committed)
                if done:
                    committed.add(key)
                else:
                    for batch in batches:
                        await batch.delete()

        r.faults.latency_s = (0.0, 0.001)
        r.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.05)
        await asyncio.gather(*map(work, range(3)))
        r.faults.heal()
        await r.faults.land()
        await asyncio.sleep(0.02)
        found = await r.contents()
        assert found[0] == found[1] == dict.fromkeys(committed, 1)
        observers = await r.writers(client=r.honest)
        assert observers[0].upper == observers[1].upper
        named = {
            part.key
            for w in observers
            for batch in w._shard.state.batches.values()
            for part in batch.parts
            if part.key
        }
        assert set(await r.blobs()) == named
