"""Appended or deleted once; see `test_shared.py`."""

import asyncio
import gc
import itertools
import re
import warnings
from functools import partial
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.batches.shared_kit import ROWS, SPENT, World, check_blobs, used, world
from tests.support.schemas import Writer
from tests.support.shards import becomes


async def by_append(w: Writer, batch: ap.Batch, at: int) -> None:
    await w.compare_and_append_batch([batch], at, 2)


async def by_replica(w: Writer, batch: ap.Batch, at: int) -> None:
    """Once the shard is at 2 it is covered: nothing to write, nothing of the other's to delete."""
    await w.append_batch(batch, 0, 2)


async def by_txn(w: Writer, batch: ap.Batch, at: int) -> None:
    """A second time it is a repeat: nothing to write, nothing of the other's to delete."""
    await w.compare_and_append_batch([batch], at, 2, txn=("app", 1))


async def by_delete(w: Writer, batch: ap.Batch, at: int) -> None:
    await batch.delete()


USES = [by_append, by_replica, by_txn, by_delete]


def appends(use: Any) -> bool:
    return use is not by_delete


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same_handle", "another_client"])
@pytest.mark.parametrize(
    ("first", "second"), [(a, b) for a in USES for b in USES], ids=lambda use: use.__name__
)
async def test_of_two_copies_one_after_the_other(
    place: World, first: Any, second: Any, elsewhere: bool
) -> None:
    """Goal: the first decides; the second changes nothing, deletes nothing that is named, and is told."""
    builder, w = await place.writer(), await place.writer()
    other = await place.writer() if elsewhere else w
    data = (await builder.batch(ROWS, 0, 2)).to_transmittable()
    one, two = await place.restore(w, data), await place.restore(other, data)
    assert await used(first, w, one) == "done"
    blobs = await place.blobs()
    try:
        answer = await used(second, other, two) if appends(first) and second in (by_replica, by_txn) else None
    except ap.InvalidUsage:  # nothing is left to append to
        answer = None
    if answer is None and not (appends(first) and appends(second)):
        assert await used(second, other, two) == SPENT
    elif answer is None:
        three = await other.batch([], 2, 3)
        two.rewrite_ts(2, 3)
        three.rewrite_ts(2, 3)
        with pytest.raises(ap.AlreadyAppended):
            await other.compare_and_append_batch([three, two], 2, 3)
        await three.delete()
    await asyncio.sleep(0.01)
    await becomes(place.blobs, blobs)
    assert await check_blobs(place, w) == []
    assert await place.history() == (ROWS if appends(first) else [])


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.combinations_with_replacement(USES, 2)), ids=lambda use: use.__name__
)
async def test_of_copies_used_at_once_one_wins(place: World, first: Any, second: Any) -> None:
    """Goal: in any interleaving, with slow stores and lost answers, the data is there once or deleted,
    never both, never twice."""
    w, other, third = await place.writer(), await place.writer(), await place.writer()
    total = 0
    for seed in range(3):
        place.faults._random.seed(seed)
        lower = total
        rows = [(f"k{seed}", seed, lower, 1)]
        batch = await w.batch(rows, lower, lower + 1)
        data = batch.to_transmittable()
        copies = [await place.restore(there, data) for there in (w, other, third)]

        async def use(how: Any, there: Writer, copy: ap.Batch, lower: int = lower, seed: int = seed) -> str:
            while True:
                try:
                    if how is by_delete:
                        await copy.delete()
                    elif how is by_replica:
                        await there.append_batch(copy, lower, lower + 1)
                    else:
                        txn = ("app", seed) if how is by_txn else None
                        await there.compare_and_append_batch([copy], lower, lower + 1, txn=txn)
                except ap.AlreadyAppended:
                    return SPENT
                except ap.UpperMismatch:
                    return "mismatch"
                return "done"

        place.faults.latency_s = (0.0, 0.003)
        place.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.05)
        answers = await asyncio.gather(
            *(use(*what) for what in zip((first, second, first), (w, other, third), copies, strict=True))
        )
        place.faults.heal()
        place.faults.latency_s = (0.0, 0.0)
        await place.faults.land()
        await asyncio.sleep(0.005)
        upper: Any = (await w.fetch_recent_upper()).time
        assert "done" in answers, answers
        assert upper == lower + 1 or by_delete in (first, second)
        await becomes(partial(check_blobs, place, w), [])
        found = [row for row in await place.history() if row[2] == lower]
        assert found == (rows if upper == lower + 1 else [])
        total = upper


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED])
async def test_a_deletion_of_a_copy_whose_answer_is_lost(outcome: Outcome) -> None:
    """Goal: it spends the id first; after any outcome of that statement, the blobs go only if it happened."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w, other = await place.writer(), await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two = await place.restore(w, data), await place.restore(other, data)
        await w.fetch_recent_upper()  # its next statement is not a mismatch
        place.faults.fail_next("compare_and_set", outcome)
        await one.delete()
        await place.faults.land()
        assert await place.blobs() == []
        with pytest.raises(ap.AlreadyAppended):
            await other.compare_and_append_batch([two], 0, 2)
        assert await place.history() == []


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_a_deletion_of_a_copy_that_cannot_be_settled_leaves_its_blobs(outcome: Outcome) -> None:
    """Goal: the store is away; another copy may be appended still, so nothing is deleted."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w, other = await place.writer(retry_timeout_s=0.05), await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two = await place.restore(w, data), await place.restore(other, data)
        await w.fetch_recent_upper()  # its next statement is not a mismatch
        place.faults.fail_next("compare_and_set", outcome)
        place.faults.fail_next("scan", Outcome.REFUSED, 1000)
        with pytest.raises(ap.Error):
            await one.delete()
        place.faults.heal()
        assert len(await place.blobs()) == 1
        try:
            await other.compare_and_append_batch([two], 0, 2)
        except ap.AlreadyAppended:
            assert outcome is Outcome.LOST
        await place.faults.land()
        assert len(await place.blobs()) == 1
        assert await place.history() == ([] if outcome is Outcome.LOST else ROWS)


async def test_a_failed_deletion_of_a_copy_can_be_repeated() -> None:
    """Goal: the id is spent, the blob store fails: the batch is still ours to delete."""
    async with world(inline_writes_single_max_bytes=0, retry_timeout_s=0.05) as place:
        w = await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        copy = await place.restore(w, data)
        place.faults.fail_next("delete", Outcome.REFUSED, 1000)
        with pytest.raises(ap.StorageUnavailable):
            await copy.delete()
        place.faults.heal()
        assert len(await place.blobs()) == 1
        await copy.delete()
        assert await place.blobs() == []


async def test_a_cancelled_deletion_of_a_copy_goes_on() -> None:
    async with world(inline_writes_single_max_bytes=0) as place:
        w, other = await place.writer(), await place.writer()
        for steps in range(1, 40):
            data = (await w.batch(ROWS, 0, 2)).to_transmittable()
            one, two = await place.restore(w, data), await place.restore(other, data)
            deletion = asyncio.create_task(one.delete())
            for _ in range(steps):
                await asyncio.sleep(0)
            deletion.cancel()
            await asyncio.wait([deletion])
            await becomes(place.blobs, [])
            with pytest.raises(ap.AlreadyAppended):
                await other.compare_and_append_batch([two], 0, 2)


async def test_a_copy_that_was_flushed_is_the_same_batch(place: World) -> None:
    """Goal: a copy turned into a blob of its own is still spent by the other; its own blob goes with it."""
    w, other = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    one, two = await place.restore(w, data), await place.restore(other, data)
    await two.flush_to_blob()
    await w.compare_and_append_batch([one], 0, 2)
    with pytest.raises(ap.AlreadyAppended):
        await two.delete()
    assert await place.history() == ROWS
    await check_blobs(place, w)


async def test_appended_in_one_append_with_others(place: World) -> None:
    """Goal: one spent batch among several refuses all; the others stay free, their blobs too."""
    w, other = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 4)).to_transmittable()
    one, two = await place.restore(w, data), await place.restore(other, data)
    more = await other.batch([("c", 3, 3, 1)], 0, 4)
    await w.compare_and_append_batch([one], 0, 2)
    with pytest.raises(ap.AlreadyAppended):
        await other.compare_and_append_batch([more, two], 2, 4)
    assert await place.history() == ROWS
    await other.compare_and_append_batch([more], 2, 4)
    assert await place.history() == [*ROWS, ("c", 3, 3, 1)]
    assert await check_blobs(place, w) == []


@pytest.mark.parametrize(
    "second",
    [
        by_append,
        by_delete,
    ],
)
@pytest.mark.parametrize("first", [by_append, by_delete])
async def test_a_spent_copy_is_dropped_without_a_warning(first: Any, second: Any) -> None:
    """Goal: `ResourceWarning` is about batches that were neither appended nor deleted."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w = await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two = await w.batch_from_transmittable(data), await w.batch_from_transmittable(data)
        await first(w, one, 0)
        if first is by_append:
            two.rewrite_ts(2, 3)
        bounds = (2, 3) if first is by_append else (0, 2)
        use = two.delete() if second is by_delete else w.compare_and_append_batch([two], *bounds)
        with pytest.raises(ap.AlreadyAppended):
            await use
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            del two, use
            await asyncio.sleep(0.01)
            gc.collect()
        assert not warned


async def test_a_copy_that_nobody_used_is_warned_of() -> None:
    """Goal: a restored batch is a batch: dropping it names its blobs."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w = await place.writer()
        copy = await w.batch_from_transmittable((await w.batch(ROWS, 0, 2)).to_transmittable())
        (key,) = await place.blobs()
        with pytest.warns(ResourceWarning, match=re.escape(key)):
            del copy
