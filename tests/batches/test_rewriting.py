"""Rewriting; see `test_batches.py`."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.batches.batches_kit import BLOB, BOTH, EVERYWHERE, PARTS, refused, summed_at
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, history, open_at, open_mem, parquet, rows, summed


@dataclass(frozen=True)
class Made:
    """A batch to be made: bounds, rewriting, and whether it has parts."""

    lower: int
    upper: int
    rewrite: tuple[int, int] | None = None
    empty: bool = False


UPDATES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(2, 9), st.integers(-1, 2)), max_size=6
)


MOVED = st.none() | st.lists(st.integers(2, 12), min_size=1, max_size=3).map(sorted)


@EVERYWHERE
async def test_times_are_advanced_when_they_are_read(location: StoreUrls, limits: dict[str, int]) -> None:
    """Goal: to the frontier of the last call; the parts say it; those beyond it keep their time."""
    updates = [(f"k{time}", 0, time, 1) for time in range(6)] + [("k0", 0, 4, -1)]
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch(updates, 0, 6)
        b.rewrite_ts(1, 6)
        assert (b.lower, b.upper) == (f(0), f(6))
        b.rewrite_ts(f(3), f(9))
        b.rewrite_ts(3, 9)
        assert (b.lower, b.upper) == (f(0), f(9))
        assert {part.rewrite for part in b.parts} == {f(3)}
        await w.compare_and_append([], 0, 2)
        await w.compare_and_append_batch([b], 2, 9)
        expected = [(key, val, max(time, 3), diff) for key, val, time, diff in updates]
        assert await history(client) == summed(expected)
        for as_of in (2, 3, 4, 8):
            assert await rows(client, as_of) == summed_at(expected, as_of)


async def test_rewriting_far_beyond_the_times() -> None:
    """Goal: data whose time is decided last: all at one time, summed as they are read."""
    async with open_mem(**PARTS) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1), ("a", 1, 1, 2), ("b", 1, 1, 1), ("b", 1, 0, -1)], 0, 2)
        b.rewrite_ts(2**62, 2**63 - 1)
        await w.compare_and_append([], 0, 2**62)
        await w.compare_and_append_batch([b], 2**62, 2**63 - 1)
        assert await rows(client, 2**62) == [("a", 1, 3)]
        assert await history(client) == {("a", 1, 2**62): 3}


async def test_rewriting_to_the_empty_upper() -> None:
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, f())
        b.rewrite_ts(5, f())
        await w.compare_and_append_batch([b], 0, f())
        assert w.upper == f()
        assert await history(client) == {("a", 1, 5): 1}


@pytest.mark.parametrize(
    ("before", "frontier", "upper", "fine"),
    [
        ([], 2, 7, True),
        ([], 5, 7, True),  # at the end of the batch and beyond it
        ([], 6, 7, True),
        ([], 1, 7, False),  # before the lower
        ([], 2, 4, False),  # the upper goes back
        ([], 2, 5, True),
        ([], 5, 5, False),  # not before the upper
        ([], 7, 7, False),
        ([], 8, 7, False),
        ([], f(), f(), False),
        ([], f(), 7, False),
        ([], 2**63 - 2, 2**63 - 1, True),
        ([(4, 8)], 4, 8, True),
        ([(4, 8)], 3, 9, False),  # the frontier goes back
        ([(4, 8)], 5, 7, False),
        ([(4, 8)], 5, 8, True),
        ([(4, 8), (6, 9)], 5, 9, False),
        ([(4, 8), (6, 9)], 6, 9, True),
        ([(2, f())], 3, 99, False),
    ],
)
@pytest.mark.parametrize("empty", [False, True], ids=["parts", "empty"])
async def test_where_times_may_be_rewritten_to(
    before: Any, frontier: Any, upper: Any, fine: bool, empty: bool
) -> None:
    """Goal: of a batch of [2, 5), with parts or not; a refusal changes nothing."""
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([] if empty else [("a", 1, 2, 1), ("b", 1, 4, 1)], 2, 5)
        for step in before:
            b.rewrite_ts(*step)
        was = b.upper, [part.rewrite for part in b.parts]
        if fine:
            b.rewrite_ts(frontier, upper)
            assert b.upper == f(upper)
            assert [part.rewrite for part in b.parts] == [f(frontier) for _ in b.parts]
        else:
            error = await refused(lambda: b.rewrite_ts(frontier, upper), KIND.INVALID_REWRITE)
            assert isinstance(error.reason, str)
            assert error.shard_id == w.shard_id
            assert (b.upper, [part.rewrite for part in b.parts]) == was
        await b.delete()


@pytest.mark.parametrize("wrong", [-1, 2**63, (1, 2), "x", None], ids=repr)
async def test_rewriting_takes_frontiers_of_int_times(wrong: Any) -> None:
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        b = await w.batch([("a", 1, 0, 1)], 0, 1)
        await refused(lambda: b.rewrite_ts(wrong, 5), KIND.INVALID_TIME)
        await refused(lambda: b.rewrite_ts(0, wrong), KIND.INVALID_TIME)
        await b.delete()
        with_pairs = await client.writer("u", PRODUCT)
        b = await with_pairs.batch([("a", 1, (0, 0), 1)], (0, 0), (5, 5))
        for frontier in (3, (3, 3)):
            await refused(lambda at=frontier: b.rewrite_ts(at, (5, 5)), KIND.INVALID_TIME)
        await b.delete()


@pytest.mark.parametrize(
    ("batches", "lower", "upper", "kind"),
    [
        ([Made(0, 5, (3, 9))], 0, 9, None),
        ([Made(0, 5, (3, 9))], 3, 9, None),
        ([Made(0, 5, (3, 9))], 4, 9, KIND.INVALID_REWRITE),  # beyond the frontier
        ([Made(0, 5, (3, 9))], 0, 8, KIND.INVALID_REWRITE),  # another upper: not truncated
        ([Made(0, 5, (3, 9))], 0, 10, KIND.INVALID_REWRITE),
        ([Made(2, 5, (3, 9))], 1, 8, KIND.INVALID_REWRITE),  # checked before the bounds
        ([Made(2, 5, (3, 9))], 1, 9, KIND.INVALID_BATCH_BOUNDS),
        ([Made(0, 5, (3, 9), empty=True)], 4, 9, None),  # it has no part
        ([Made(0, 5, (3, 9), empty=True)], 0, 8, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 9)], 0, 9, None),
        ([Made(0, 5, (3, 9)), Made(0, 9)], 1, 9, KIND.INVALID_REWRITE),  # the other counts with its lower
        ([Made(0, 9), Made(0, 5, (3, 9))], 1, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 10)], 0, 9, KIND.INVALID_REWRITE),  # the other may not be truncated
        ([Made(0, 5, (3, 9)), Made(0, 10, empty=True)], 0, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 9, empty=True)], 1, 9, None),
        ([Made(0, 5, (3, 9), empty=True), Made(0, 9)], 1, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 6, (7, 9))], 3, 9, None),
        ([Made(0, 5, (3, 9)), Made(0, 6, (7, 9))], 4, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(0, 6, (7, 10))], 3, 9, KIND.INVALID_REWRITE),
        ([Made(0, 5, (3, 9)), Made(2, 9)], 2, 9, None),
        ([Made(0, 5, (3, 9)), Made(2, 9)], 1, 9, KIND.INVALID_BATCH_BOUNDS),
        ([Made(0, 9), Made(0, 10)], 1, 8, None),  # none is rewritten: all are truncated
        ([Made(0, 5, (5, 9))], 5, 9, None),
    ],
)
@BOTH
async def test_one_rewritten_batch_puts_all_under_its_rules(
    batches: list[Made], lower: int, upper: int, kind: Any, limits: dict[str, int]
) -> None:
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, lower)
        made, expected = [], []
        for number, m in enumerate(batches):
            updates = [(f"{number}", 0, time, 1) for time in range(m.lower, m.upper)] if not m.empty else []
            made.append(await w.batch(updates, m.lower, m.upper))
            floor = 0
            if m.rewrite is not None:
                made[-1].rewrite_ts(*m.rewrite)
                floor = m.rewrite[0]
            expected += [(key, val, max(time, floor), diff) for key, val, time, diff in updates]
        if kind is not None:
            error = await refused(w.compare_and_append_batch(made, lower, upper), kind)
            assert (error.kind is KIND.INVALID_REWRITE) is hasattr(error, "reason")
            for batch in made:
                await batch.delete()
            assert w.upper == f(lower)
            return
        await w.compare_and_append_batch(made, lower, upper)
        assert await history(client) == summed(u for u in expected if lower <= u[2] < upper)


async def test_a_rewritten_batch_that_is_appended_as_a_replica() -> None:
    """Goal: `append_batch` keeps to the same rules, and drops what is covered after rewriting."""
    updates = [(f"k{time}", 0, time, 1) for time in range(6)]
    async with open_mem(**BLOB) as client, client.writer("t", SCHEMA) as w:
        first, second, third = [await w.batch(updates, 0, 6) for _ in range(3)]
        for b in (first, second, third):
            b.rewrite_ts(3, 9)
        await refused(w.append_batch(first, 0, 8), KIND.INVALID_REWRITE)
        await refused(w.append_batch(first, 4, 9), KIND.INVALID_REWRITE)
        await w.compare_and_append([], 0, 2)  # cuts what is before 2 after rewriting: nothing
        await w.append_batch(first, 0, 9)
        expected = {(f"k{time}", 0, max(time, 3)): 1 for time in range(6)}
        assert await history(client) == expected
        await w.append_batch(second, 0, 9)
        assert await parquet(client) == sorted(part.key for b in (first, third) for part in b.parts)
        third.rewrite_ts(3, 12)
        await w.append_batch(third, 0, 12)
        assert w.upper == f(12)
        assert await history(client) == expected


@settings(max_examples=40)
@given(
    batches=st.lists(st.tuples(UPDATES, MOVED), min_size=1, max_size=4),
    target=st.sampled_from([0, 40, 2**27]),
    single=st.sampled_from([0, 70, 16384]),
    lower=st.integers(0, 12),
    replica=st.booleans(),
)
def test_any_batches_are_read_as_their_updates_were_moved(
    batches: list[Any], target: int, single: int, lower: int, replica: bool
) -> None:
    """Goal: rewritten ones beside others, in one append or one after the other; the oracle moves and
    adds up update by update."""

    async def run() -> None:
        limits = {"blob_target_size": target, "inline_writes_single_max_bytes": single}
        async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
            made, expected, floors = [], [], []
            for updates, moves in batches:
                made.append(await w.batch(updates, 2, 14))
                for frontier in moves or ():
                    made[-1].rewrite_ts(frontier, 14)
                floor = moves[-1] if moves else 2
                floors += [floor] if made[-1].parts else []
                expected += [(k, v, max(t, floor), d) for k, v, t, d in updates]
            begin = max(2, min([lower, *floors]))
            await w.compare_and_append([], 0, begin)
            if replica:  # identical ones would land once: the first covers the others
                first, moves = batches[0]
                for batch in made:
                    if batch is made[0] or not batch.parts:
                        await w.append_batch(batch, begin, 14)
                    else:
                        await batch.delete()
                floor = moves[-1] if moves else 2
                expected = [(k, v, max(t, floor), d) for k, v, t, d in first]
            else:
                await w.compare_and_append_batch(made, begin, 14)
            assert await history(client) == summed(expected)
            for as_of in (begin, 13):
                assert await rows(client, as_of) == summed_at(expected, as_of)

    asyncio.run(run())
