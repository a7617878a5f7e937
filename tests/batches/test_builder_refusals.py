"""Refusals of add, finish; see `test_builder.py`."""

from collections.abc import Iterator
from typing import Any

import pytest

import aiopersist as ap
from tests.batches.builder_kit import EACH_ITS_OWN, FORMS, NEVER_INLINE, RECORD, as_table, assert_closed
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, history, open_mem, parquet, rows

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


# --- refusals of add ----------------------------------------------------------------------------------


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


# --- finish -------------------------------------------------------------------------------------------


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
