"""Goal: every sentence about appending, on every kind of location: which updates land, which calls are
refused, the order of the checks, and that a refusal leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.internals import stack_of
from tests.support.schemas import KIND, SCHEMA
from tests.support.shards import f, open_at, rows, shard_of, updates_of
from tests.write.appends_kit import left_behind


def _failing() -> Iterator[Any]:
    for n in range(9000):
        yield (f"{n:05}", n, 0, 1)
    raise RuntimeError("mine")


BAD_ROW = ("a", "not an int", 5, 1)


BELOW, BEYOND, FINE = ("a", 1, 0, 1), ("a", 1, 9, 1), ("a", 1, 5, 1)


TABLE = pa.table(
    {"key": ["a", "b"], "val": pa.array([1, 2], pa.int64()), "time": [0, 1], "diff": [1, 2]},
)


class _Stream:
    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return TABLE.__arrow_c_stream__(requested_schema)


async def _async_rows() -> AsyncIterator[Any]:
    yield ("a", 1, 0, 1)
    await asyncio.sleep(0)
    yield ("b", 2, 1, 2)


async def _async_tables() -> AsyncIterator[Any]:
    yield TABLE.slice(0, 1)
    yield ("b", 2, 1, 2)


# --- compare_and_append -------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_appends_are_read_back_at_every_time(location: StoreUrls, inline: int) -> None:
    async with open_at(location, inline_writes_single_max_bytes=inline) as client:
        async with client.writer("t", SCHEMA) as w:
            assert w.upper == f(0)
            assert ap.ShardId.parse(w.shard_id) == await client.shard_id("t")
            await w.compare_and_append([("a", 1, 0, 1), ("b", 2, 1, 3)], 0, 2)
            assert w.upper == f(2)
            await w.compare_and_append([("a", 1, 2, -1)], f(2), f(5))
            assert await w.fetch_recent_upper() == f(5)
        assert await rows(client, 0) == [("a", 1, 1)]
        assert await rows(client, 1) == [("a", 1, 1), ("b", 2, 3)]
        assert await rows(client, 4) == [("b", 2, 3)]
        assert await updates_of(client) == [("a", 1, 0, 1), ("a", 1, 2, -1), ("b", 2, 1, 3)]


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_a_mismatch_tells_the_upper_and_leaves_nothing(location: StoreUrls, inline: int) -> None:
    """Goal: also where the writer could not know: the other one is another client."""
    async with (
        open_at(location, inline_writes_single_max_bytes=inline) as client,
        open_at(location) as elsewhere,
        client.writer("t", SCHEMA) as w,
        elsewhere.writer("t", SCHEMA) as other,
    ):
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        await other.compare_and_append([("b", 1, 1, 1)], 1, 3)
        before = await left_behind(elsewhere)
        with pytest.raises(ap.UpperMismatch) as caught:
            await w.compare_and_append([("c", 1, 1, 1)], 1, 2)
        assert (caught.value.expected, caught.value.current) == (f(1), f(3))
        assert caught.value.shard_id == w.shard_id
        assert w.upper == f(3)
        assert await left_behind(client) == before
        with pytest.raises(ap.UpperMismatch):
            await w.compare_and_append([("c", 1, 7, 1)], 7, 8)  # beyond it
        assert await left_behind(client) == before
        assert await rows(client) == [("a", 1, 1), ("b", 1, 1)]


async def test_a_mismatch_after_many_parts_deletes_each(location: StoreUrls) -> None:
    """Goal: parts that were uploaded while the input was read are cleaned up as well."""
    async with (
        open_at(location, blob_target_size=30_000, inline_writes_single_max_bytes=0) as client,
        client.writer("t", SCHEMA) as w,
    ):
        before = await left_behind(client)
        with pytest.raises(ap.UpperMismatch):
            await w.compare_and_append([(f"{n:05}", n, 5, 1) for n in range(9000)], 5, 6)
        assert await left_behind(client) == before
        with pytest.raises(ap.InvalidUpdate):  # only the last row is wrong
            await w.compare_and_append(((f"{n:05}", n if n < 9000 else "x", 0, 1) for n in range(9001)), 0, 1)
        assert await left_behind(client) == before
        with pytest.raises(RuntimeError, match="mine"):
            await w.compare_and_append(_failing(), 0, 1)
        assert await left_behind(client) == before


async def test_empty_updates_advance_the_upper_without_a_blob(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        seqno, _, blobs = await left_behind(client)
        await w.compare_and_append([], 0, 3)
        assert await left_behind(client) == (seqno + 1, f(3), blobs)
        await w.compare_and_append([("a", 1, 3, 1), ("a", 1, 3, -1)], 3, 4)  # summed away
        assert await left_behind(client) == (seqno + 2, f(4), blobs)
        assert await rows(client) == []


async def test_a_heartbeat_is_always_a_commit(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 3)
        seqno, upper, blobs = await left_behind(client)
        await w.compare_and_append([], 3, 3)
        assert await left_behind(client) == (seqno + 1, upper, blobs)
        with pytest.raises(ap.UpperMismatch):
            await w.compare_and_append([], 2, 2)


async def test_a_million_empty_appends_would_cost_one_batch(mem: ap.Client) -> None:
    async with mem.writer("t", SCHEMA) as w:
        for upper in range(50):
            await w.compare_and_append([], upper, upper + 1)
        assert len(shard_of(mem).state.batches) == 1


async def test_a_finished_shard_takes_nothing_more(client: ap.Client) -> None:
    """Goal: an empty new upper finishes it: reads go on, appends are mismatches with the empty upper."""
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 7, 1)], 0, f())
        assert w.upper == f()
        for append in (
            lambda: w.compare_and_append([("a", 1, 7, 1)], 7, 8),
            lambda: w.write([("a", 1)]),
            lambda: w.compare_and_append([("a", 1, 7, 1)], 0, f()),
        ):
            with pytest.raises(ap.UpperMismatch) as caught:
                await append()
            assert caught.value.current == f()
        await w.compare_and_append([], f(), f())
        await w.append([("a", 1, 7, 1)], 0, 9)  # covered
        async with asyncio.timeout(50):
            await w.wait_for_upper_past(2**63 - 1)
        assert await rows(client) == [("a", 1, 1)]
        assert await rows(client, 6) == []


# --- the order of checks, and what each says ----------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "expected", "new", "txn", "error", "says"),
    [
        ([BAD_ROW], 9, 5, None, ap.InvalidUsage, {"kind": KIND.INVALID_BOUNDS, "lower": f(9), "upper": f(5)}),
        ([BAD_ROW], 9, 5, ("", 1), ap.InvalidUsage, {"kind": KIND.INVALID_BOUNDS}),
        ([BAD_ROW], f(), 5, None, ap.InvalidUsage, {"kind": KIND.INVALID_BOUNDS}),
        ([BAD_ROW], -1, 5, None, ap.InvalidUsage, {"kind": KIND.INVALID_TIME}),
        ([BAD_ROW], 1, 2**63, None, ap.InvalidUsage, {"kind": KIND.INVALID_TIME}),
        ([BAD_ROW], (1, 2), (3, 4), None, ap.InvalidUsage, {"kind": KIND.INVALID_TIME}),
        ([BAD_ROW], 5, 9, ("app", -1), ap.InvalidUsage, {"kind": KIND.INVALID_TXN}),
        ([FINE, BAD_ROW, BELOW], 5, 9, None, ap.InvalidUpdate, {"row": 1}),
        ([BEYOND, BELOW], 5, 9, None, ap.InvalidUsage, {"kind": KIND.UPDATE_NOT_BEYOND_LOWER, "time": 0}),
        ([FINE, BEYOND], 5, 9, None, ap.InvalidUsage, {"kind": KIND.UPDATE_BEYOND_UPPER, "time": 9}),
        ([FINE], 5, 5, None, ap.InvalidUsage, {"kind": KIND.UPDATE_BEYOND_UPPER, "upper": f(5)}),
        ([("a", 1, 5, None)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([("a", 1, 5, 2**63)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([("a", 1, -1, 1)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([("a", 1, 2**63, 1)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([("a", 1, (5, 5), 1)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([("a", True, 5, 1)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([FINE, ("a", 1, 5)], 5, 9, None, ap.InvalidUpdate, {"row": 1}),
        ([("x" * 3000, 1, 5, 1)], 5, 9, None, ap.InvalidUpdate, {"row": 0}),
        ([FINE] * 300 + [("x" * 3000, 1, 5, 1)], 5, 9, None, ap.InvalidUpdate, {"row": 300}),
        ("text", 5, 9, None, ap.InvalidUpdate, {"row": None}),
        (7, 5, 9, None, ap.InvalidUpdate, {"row": None}),
        (pa.table({"key": ["a"]}), 5, 9, None, ap.InvalidUpdate, {"row": None}),
        ([BEYOND], 5, 9, ("done", 1), ap.InvalidUsage, {"kind": KIND.UPDATE_BEYOND_UPPER}),
        ([FINE], 5, 9, ("new", 1), ap.UpperMismatch, {"expected": f(5), "current": f(2)}),
    ],
)
async def test_checks_come_in_their_order_and_nothing_is_written(
    mem: ap.Client,
    updates: Any,
    expected: Any,
    new: Any,
    txn: Any,
    error: type[ap.Error],
    says: dict[str, Any],
) -> None:
    """Goal: bounds and the form of txn; rows; the rule of finish; a repeat; the upper."""
    async with (
        ap.open("mem://", settings=ap.Settings(update_size_max=2000)) as client,
        client.writer("t", SCHEMA) as w,
    ):
        await w.compare_and_append([], 0, 2, txn=("done", 1))
        before = await left_behind(client)
        with pytest.raises(error) as caught:
            await w.compare_and_append(updates, expected, new, txn)
        assert {name: getattr(caught.value, name) for name in says} == says
        assert await left_behind(client) == before
        assert await w.settle() is None


async def test_the_rule_of_finish_comes_after_all_rows_of_any_input(mem: ap.Client) -> None:
    """Goal: of a large input too, whose first piece lies beyond the upper."""
    async with mem.writer("t", SCHEMA) as w:
        many = [("a", 1, 9, 1)] * 9000
        for last, error in ((("a", "x", 5, 1), ap.InvalidUpdate), (("a", 1, 0, 1), ap.InvalidUsage)):
            with pytest.raises(error) as caught:
                await w.compare_and_append(iter([*many, last]), 5, 9)
            if error is ap.InvalidUsage:
                assert caught.value.kind is KIND.UPDATE_NOT_BEYOND_LOWER
            else:
                assert caught.value.row == 9000
        with pytest.raises(ap.InvalidUsage) as caught:
            await w.compare_and_append(iter(many), 5, 9)
        assert caught.value.kind is KIND.UPDATE_BEYOND_UPPER


# --- every form of input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: [("a", 1, 0, 1), ("b", 2, 1, 2)], id="list"),
        pytest.param(lambda: (("a", 1, 0, 1), ("b", 2, 1, 2)), id="tuple"),
        pytest.param(lambda: [["a", 1, 0, 1], ["b", 2, 1, 2]], id="lists"),
        pytest.param(lambda: [ap.Update("a", 1, 0, 1), ap.Update("b", 2, 1, 2)], id="updates"),
        pytest.param(lambda: iter([("a", 1, 0, 1), ("b", 2, 1, 2)]), id="iterator"),
        pytest.param(lambda: (row for row in [("a", 1, 0, 1), ("b", 2, 1, 2)]), id="generator"),
        pytest.param(lambda: {("a", 1, 0, 1), ("b", 2, 1, 2)}, id="set"),
        pytest.param(lambda: TABLE, id="table"),
        pytest.param(lambda: TABLE.to_batches()[0], id="batch"),
        pytest.param(TABLE.to_reader, id="reader"),
        pytest.param(lambda: _Stream(), id="c_stream"),
        pytest.param(lambda: [TABLE.slice(0, 1), TABLE.slice(1)].__iter__(), id="tables"),
        pytest.param(lambda: pl.from_arrow(TABLE), id="polars"),
        pytest.param(lambda: pd.DataFrame(TABLE.to_pydict()), id="pandas"),
        pytest.param(_async_rows, id="async_rows"),
        pytest.param(_async_tables, id="async_tables"),
        pytest.param(lambda: TABLE.set_column(1, "val", pa.array([1, 2], pa.int8())), id="narrow"),
        pytest.param(lambda: TABLE.set_column(0, "key", pa.array(["a", "b"], pa.string_view())), id="view"),
    ],
)
@pytest.mark.parametrize("target", [0, 2**27], ids=["many_parts", "one_part"])
async def test_updates_in_every_form(make: Callable[[], Any], target: int) -> None:
    limits = ap.Settings(blob_target_size=target, inline_writes_single_max_bytes=0)
    async with ap.open("mem://", settings=limits) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append(make(), 0, 2)
        assert await updates_of(client) == [("a", 1, 0, 1), ("b", 2, 1, 2)]


async def test_a_large_input_becomes_parts_and_reads_the_same(location: StoreUrls) -> None:
    """Goal: tiny parts, several runs, rows that meet again only when they are read."""
    updates = [(f"k{n % 700}", n % 3, n % 10, 1 if n % 4 else -1) for n in range(20000)]
    expected: dict[Any, int] = {}
    for key, val, _, diff in updates:
        expected[key, val] = expected.get((key, val), 0) + diff
    async with (
        open_at(location, blob_target_size=40_000, batch_builder_max_outstanding_parts=3) as client,
        client.writer("t", SCHEMA) as w,
    ):
        await w.compare_and_append(iter(updates), 0, 10)
        (batch,) = (await shard_of(client).open()).batches.values()
        assert len(batch.parts) > 4
        assert await rows(client) == sorted((k, v, d) for (k, v), d in expected.items() if d)


async def test_the_writer_of_a_large_input_does_not_run_ahead(mem: ap.Client) -> None:
    """Goal: memory is bounded: while uploads hang, the input is not read to its end."""
    seen, release = 0, asyncio.Event()

    async def rows_counted() -> AsyncIterator[Any]:
        nonlocal seen
        for n in range(200_000):
            seen += 1
            yield (f"{n:09}", n, 0, 1)

    limits = ap.Settings(blob_target_size=50_000, batch_builder_max_outstanding_parts=2)
    async with ap.open("mem://", settings=limits) as client, client.writer("t", SCHEMA) as w:
        inner = stack_of(client).blob.uncached  # type: ignore[attr-defined]
        put = inner.set

        async def hanging(key: str, data: Any) -> None:
            await release.wait()
            await put(key, data)

        inner.set = hanging
        append = asyncio.create_task(w.compare_and_append(rows_counted(), 0, 1))
        await asyncio.sleep(0.5)
        assert 0 < seen < 100_000
        release.set()
        await append
        async with client.reader("t", SCHEMA) as r, r.snapshot(0) as s:
            assert (await s.to_arrow()).num_rows == 200_000
