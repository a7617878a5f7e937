"""Goal: every sentence about appending, on every kind of location: what lands, what is refused, in which
order it is checked, and that a refusal leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.shard.commit import commit
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, open_at, rows, shard_of


@pytest.fixture
async def client(location: StoreUrls) -> AsyncIterator[ap.Client]:
    async with open_at(location) as client:
        yield client


async def history(client: ap.Client, schema: Any = SCHEMA) -> list[Any]:
    """All updates of the shard, from its since on."""
    async with client.reader("t", schema) as r:
        upper = (await r.fetch_recent_upper()).time
        async with r.subscribe(0) as updates:
            found: list[Any] = []
            async for step in updates.steps():
                found += [tuple(u) for u in step.updates]
                if step.upper.time is None or step.upper.time >= upper:
                    break
    return sorted(found)


async def left_behind(client: ap.Client) -> tuple[Any, ...]:
    """What a refused call must not change."""
    state = await shard_of(client).open()
    blobs = [key async for key, _ in client._stack.blob.list("") if key.endswith(".parquet")]
    return state.seqno, state.upper, sorted(blobs)


# --- compare_and_append --------------------------------------------------------------------------


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
        assert await history(client) == [("a", 1, 0, 1), ("a", 1, 2, -1), ("b", 2, 1, 3)]


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


def _failing() -> Iterator[Any]:
    for n in range(9000):
        yield (f"{n:05}", n, 0, 1)
    raise RuntimeError("mine")


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
        async with asyncio.timeout(5):
            await w.wait_for_upper_past(2**63 - 1)
        assert await rows(client) == [("a", 1, 1)]
        assert await rows(client, 6) == []


# --- the order of checks, and what each says -----------------------------------------------------

BAD_ROW = ("a", "not an int", 5, 1)
BELOW, BEYOND, FINE = ("a", 1, 0, 1), ("a", 1, 9, 1), ("a", 1, 5, 1)


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


# --- every form of input -------------------------------------------------------------------------

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
        assert await history(client) == [("a", 1, 0, 1), ("b", 2, 1, 2)]


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
        inner = client._stack.blob.uncached  # type: ignore[attr-defined]
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


# --- inline parts --------------------------------------------------------------------------------


async def test_the_state_stays_bounded_and_reads_do_not_notice(location: StoreUrls) -> None:
    """Goal: beyond the total, inline parts are merged into blobs; every time reads as before."""
    limits = {"inline_writes_single_max_bytes": 600, "inline_writes_total_max_bytes": 3000}
    async with open_at(location, **limits) as client, client.writer("t", SCHEMA) as w:
        for n in range(12):
            text = f"{n:02}" + "x" * 150
            await w.compare_and_append([(text, n, n, 1), ("sum", 0, n, 1)], n, n + 1)
            assert shard_of(client).state.inline_bytes <= 3000 + 600
        state = await shard_of(client).open()
        assert len([key async for key, _ in client._stack.blob.list("") if key.endswith(".parquet")]) >= 1
        assert any(part.key for batch in state.batches.values() for part in batch.parts)
        for n in range(12):
            found = await rows(client, n)
            assert len(found) == n + 2
            assert found[-1] == ("sum", 0, n + 1)
        assert len(await history(client)) == 24


async def test_writes_that_were_moved_in_time_are_flushed_as_they_are_read(mem: ap.Client) -> None:
    """Goal: a part whose times are rewritten on reading keeps the rewritten ones in the merged blob."""
    limits = ap.Settings(inline_writes_single_max_bytes=600, inline_writes_total_max_bytes=3000)
    async with ap.open("mem://", settings=limits) as client:
        writers = [await client.writer("t", SCHEMA) for _ in range(4)]

        async def write(number: int) -> list[int]:
            return [await writers[number].write([(f"{number}-{n}", 0)]) for n in range(15)]

        times = await asyncio.gather(*map(write, range(4)))
        expected = sorted((f"{w}-{n}", 0, t, 1) for w, ts in enumerate(times) for n, t in enumerate(ts))
        assert await history(client) == expected
        assert any(p.key for b in shard_of(client).state.batches.values() for p in b.parts)


@pytest.mark.parametrize("size", [10, 15_000, 20_000])
async def test_small_is_inline_and_large_is_a_blob(mem: ap.Client, size: int) -> None:
    async with mem.writer("t", SCHEMA) as w:
        await w.compare_and_append([("x" * size, 1, 0, 1)], 0, 1)
        _, _, blobs = await left_behind(mem)
        assert len(blobs) == (1 if size > 16384 else 0)
        assert await rows(mem) == [("x" * size, 1, 1)]


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
@pytest.mark.parametrize("form", [list, iter], ids=["tiny", "general"])
async def test_the_size_of_one_update_is_bounded(inline: int, form: Any) -> None:
    limits = ap.Settings(update_size_max=100, inline_writes_single_max_bytes=inline)
    async with ap.open("mem://", settings=limits) as client, client.writer("t", SCHEMA) as w:
        before = await left_behind(client)
        with pytest.raises(ap.InvalidUpdate) as caught:
            await w.compare_and_append(form([("a", 1, 0, 1), ("x" * 101, 1, 0, 1)]), 0, 1)
        assert caught.value.row == 1
        with pytest.raises(ap.InvalidUpdate):
            await w.write(form([("x" * 101, 1)]))
        assert await left_behind(client) == before
        await w.compare_and_append(form([("x" * 80, 1, 0, 1)]), 0, 1)


# --- append --------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_replicas_write_the_same_data_once(location: StoreUrls, inline: int) -> None:
    """Goal: overlapping and repeated appends of definite data, racing from two clients, land once."""
    data = [(f"k{n}", n, n, 1) for n in range(30)]

    async def replica(client: ap.Client, width: int) -> None:
        async with client.writer("t", SCHEMA) as w:
            for lower in range(0, 30, width):
                upper = min(lower + width, 30)
                await w.append([u for u in data if lower <= u[2] < upper], lower, upper)

    limits = {"inline_writes_single_max_bytes": inline}
    async with open_at(location, **limits) as one, open_at(location, **limits) as two:
        await asyncio.gather(replica(one, 4), replica(two, 7), replica(two, 5))
        assert await history(one) == sorted(data)


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_append_drops_what_is_covered(location: StoreUrls, inline: int) -> None:
    async with open_at(location, inline_writes_single_max_bytes=inline) as client:
        async with client.writer("t", SCHEMA) as w:
            await w.append([("a", 1, 0, 1), ("b", 1, 4, 1)], 0, 5)
            before = await left_behind(client)
            await w.append([("a", 1, 0, 1), ("b", 1, 4, 1)], 0, 5)  # again
            await w.append([("a", 1, 0, 1)], 0, 3)  # a part of it
            await w.append([], 5, 5)
            assert await left_behind(client) == before
            await w.append([("b", 1, 4, 1), ("c", 1, 5, 1), ("d", 1, 9, 1)], 3, 10)
            assert w.upper == f(10)
            with pytest.raises(ap.UpperMismatch) as caught:
                await w.append([("e", 1, 12, 1)], 12, 13)
            assert (caught.value.expected, caught.value.current) == (f(12), f(10))
            with pytest.raises(ap.InvalidUsage) as usage:
                await w.append([], 12, 11)
            assert usage.value.kind is KIND.INVALID_BOUNDS
            with pytest.raises(ap.InvalidUpdate):
                await w.append([("a", "x", 0, 1)], 0, 3)  # checked, though covered
        assert await history(client) == [("a", 1, 0, 1), ("b", 1, 4, 1), ("c", 1, 5, 1), ("d", 1, 9, 1)]


async def test_append_of_product_times(mem: ap.Client) -> None:
    """Goal: covered, overlapping and incomparable uppers of a partial order."""
    async with mem.writer("t", PRODUCT) as w:
        await w.append([("a", 1, (0, 0), 1)], (0, 0), f((0, 2), (2, 0)))
        before = await left_behind(mem)
        await w.append([("a", 1, (0, 0), 1)], (0, 0), f((0, 1), (1, 0)))
        assert await left_behind(mem) == before
        for lower, upper in (((1, 1), (5, 5)), ((0, 0), (1, 1))):
            with pytest.raises(ap.UpperMismatch):
                await w.append([], lower, upper)
        await w.append([("a", 1, (0, 0), 1), ("b", 1, (2, 2), 1)], (0, 0), (3, 3))
        assert await rows(mem, (2, 2), PRODUCT) == [("a", 1, 1), ("b", 1, 1)]


# --- product times -------------------------------------------------------------------------------


async def test_product_times(client: ap.Client) -> None:
    async with client.writer("t", PRODUCT) as w:
        assert w.upper == f((0, 0))
        await w.compare_and_append([("a", 1, (0, 0), 1), ("b", 2, (0, 5), 1)], (0, 0), f((1, 0), (0, 6)))
        await w.compare_and_append([("a", 1, (0, 9), -1)], f((1, 0), (0, 6)), f((1, 0)))
        assert await rows(client, (0, 5), PRODUCT) == [("a", 1, 1), ("b", 2, 1)]
        assert await rows(client, (0, 9), PRODUCT) == [("b", 2, 1)]
        for call, kind in (
            (lambda: w.compare_and_append([], f((1, 0)), f((0, 1))), KIND.INVALID_BOUNDS),  # incomparable
            (lambda: w.compare_and_append([], 1, 2), KIND.INVALID_TIME),
            (lambda: w.compare_and_append([], (1, 0, 0), (2, 0, 0)), KIND.INVALID_TIME),
            (lambda: w.write([("a", 1)]), KIND.INVALID_TIME),
            (
                lambda: w.compare_and_append([("a", 1, (0, 7), 1)], (1, 0), (2, 0)),
                KIND.UPDATE_NOT_BEYOND_LOWER,
            ),
            (lambda: w.compare_and_append([("a", 1, (2, 7), 1)], (1, 0), (2, 0)), KIND.UPDATE_BEYOND_UPPER),
        ):
            with pytest.raises(ap.InvalidUsage) as caught:
                await call()
            assert caught.value.kind is kind
        for bad in ((0, 1, 2), 1, [1, 0], (-1, 0), (2**63, 0)):
            with pytest.raises(ap.InvalidUpdate):
                await w.compare_and_append([("a", 1, bad, 1)], (1, 0), (2, 0))


# --- write ---------------------------------------------------------------------------------------


async def test_writes_of_a_moment_share_a_commit(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        assert await w.write([("a", 1)]) == 0
        seqno = (await left_behind(client))[0]
        calls = [w.write([(f"{n}", n, 2)]) for n in range(40)]
        times = await asyncio.gather(*calls)
        assert (await left_behind(client))[0] - seqno <= 2
        assert set(times) <= {1, 2}
        await w.write([("a", 1)], diff=-1)
        await w.write(pa.table({"key": ["z"], "val": [1]}), diff=5)
        await w.write(pa.table({"key": ["y"], "val": [1], "diff": [7]}))
        found = await rows(client)
        assert found[-2:] == [("y", 1, 7), ("z", 1, 5)]
        assert len(found) == 42


async def test_a_bad_write_fails_alone(mem: ap.Client) -> None:
    async with mem.writer("t", SCHEMA) as w:
        calls = [w.write([("a", 1)]), w.write([("b", "x")]), w.write([("c", 1, None)]), w.write([("d", 1)])]
        one, two, three, four = await asyncio.gather(*calls, return_exceptions=True)
        assert (one, four) == (0, 0)
        assert isinstance(two, ap.InvalidUpdate) and two.row == 0
        assert isinstance(three, ap.InvalidUpdate)
        with pytest.raises(ap.InvalidUsage):
            await w.write([("a", 1)], txn=("a",))  # type: ignore[arg-type]
        with pytest.raises(ap.InvalidUpdate):
            await w.write(pa.table({"key": ["a"], "val": [1], "time": [4]}))
        assert await rows(mem) == [("a", 1, 1), ("d", 1, 1)]


async def test_writes_race_with_everybody(location: StoreUrls) -> None:
    """Goal: two clients and a compare-and-append in the way: each write is there, at the time it was told."""
    async with open_at(location) as one, open_at(location) as two:

        async def writes(client: ap.Client, name: str) -> list[Any]:
            async with client.writer("t", SCHEMA) as w:
                return [(f"{name}{n}", 0, await w.write([(f"{name}{n}", 0)]), 1) for n in range(6)]

        async def hurry() -> None:
            async with two.writer("t", SCHEMA) as w:
                for _ in range(6):
                    try:
                        await w.compare_and_append([], w.upper, w.upper.time + 10)
                    except ap.UpperMismatch:
                        pass

        *written, _ = await asyncio.gather(
            writes(one, "a"), writes(one, "b"), writes(two, "c"), writes(two, "d"), hurry()
        )
        assert await history(one) == sorted(row for part in written for row in part)


async def test_a_write_of_nothing_commits_nothing(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        before = await left_behind(client)
        assert await w.write([]) == 0
        assert await left_behind(client) == before
        await w.compare_and_append([], 0, 10)
        before = await left_behind(client)
        assert await w.write([]) == 9
        assert await left_behind(client) == before
        assert await w.write([], txn=("app", 1)) == 10
        assert w.upper == f(11)
        assert await w.write([], txn=("app", 1)) >= 10


@pytest.mark.parametrize("end", ["finished", "dropped"])
async def test_a_write_that_cannot_begin_is_told(mem: ap.Client, end: str) -> None:
    """Goal: not even the turn comes: everybody who waits for it learns why, and nobody spins."""
    async with mem.writer("t", SCHEMA) as w:
        if end == "finished":
            await w.compare_and_append([], 0, f())
        else:
            await mem.drop("t")
        calls = [asyncio.create_task(w.write([("a", n)])) for n in range(3)]
        async with asyncio.timeout(5):
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, ap.UpperMismatch if end == "finished" else ap.ShardFinalized)


# --- transactions --------------------------------------------------------------------------------


async def test_a_transaction_happens_once(location: StoreUrls) -> None:
    """Goal: whatever repeats it: the same handle, another, another client, at the same moment, later."""
    async with (
        open_at(location) as one,
        open_at(location) as two,
        one.writer("t", SCHEMA) as w,
        one.writer("t", SCHEMA) as same,
        two.writer("t", SCHEMA) as other,
    ):
        assert await one.txn_number("t", "app") is None
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1, txn=("app", 5))
        before = await left_behind(one)
        for again in (w, same, other):
            await again.compare_and_append([("a", 1, 0, 1)], 0, 1, txn=("app", 5))
            await again.compare_and_append([("a", 1, 7, 1)], 7, 8, txn=("app", 5))  # whatever the upper
            await again.compare_and_append([("a", 1, 1, 1)], 1, 2, txn=("app", 4))  # older
            assert await again.write([("a", 1)], txn=("app", 5)) == 0
        assert await left_behind(one) == before
        times = await asyncio.gather(*(h.write([("b", 1)], txn=("app", 6)) for h in (w, w, same, other)))
        assert await rows(one) == [("a", 1, 1), ("b", 1, 1)]
        assert min(times) == 1
        await other.compare_and_append([("c", 1, 9, 1)], other.upper, 10, txn=("second", 0))
        assert await one.txn_number("t", "app") == 6
        assert await two.txn_number("t", "second") == 0
        assert await rows(two) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]


async def test_transactions_that_wait_together(mem: ap.Client) -> None:
    """Goal: of one application each number goes once, in any order; others share the commit."""
    async with mem.writer("t", SCHEMA) as w:
        calls = [w.write([(f"n{number}", 0)], txn=("app", number)) for number in (1, 2, 2, 1, 3)]
        calls += [w.write([("x", 0)], txn=("other", 9)), w.write([("plain", 0)])]
        await asyncio.gather(*calls)
        assert await mem.txn_number("t", "app") == 3
        assert await rows(mem) == [(k, 0, 1) for k in ("n1", "n2", "n3", "plain", "x")]


@pytest.mark.parametrize(
    "txn",
    [
        ("app",),
        ("app", 1, 2),
        ["app", 1],
        ("", 1),
        (b"app", 1),
        ("app", "1"),
        ("app", 1.0),
        ("app", True),
        ("app", -1),
        ("app", 2**63),
        ("app", None),
        (None, 1),
        ("a\ud800", 1),
        "app",
        7,
    ],
    ids=repr,
)
async def test_the_form_of_a_transaction(mem: ap.Client, txn: Any) -> None:
    async with mem.writer("t", SCHEMA) as w:
        for call in (lambda: w.compare_and_append([], 0, 1, txn=txn), lambda: w.write([("a", 1)], txn=txn)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await call()
            assert caught.value.kind is KIND.INVALID_TXN
        assert w.upper == f(0)


@pytest.mark.parametrize("app", ["a", 'ä\n\0"', "x" * 5000, "__proto__", "1"])
async def test_any_text_is_an_application(client: ap.Client, app: str) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)], txn=(app, 2**63 - 1))
        await w.write([("a", 1)], txn=(app, 0))
        assert await client.txn_number("t", app) == 2**63 - 1
        assert await rows(client) == [("a", 1, 1)]


# --- uppers --------------------------------------------------------------------------------------


async def test_waiting_for_the_upper(location: StoreUrls) -> None:
    """Goal: strictly past; woken by another client without polling."""
    async with (
        open_at(location) as one,
        open_at(location, watch_timeout_s=60) as two,
        one.writer("t", SCHEMA) as w,
        two.writer("t", SCHEMA) as other,
    ):
        await w.compare_and_append([], 0, 5)
        async with asyncio.timeout(5):
            await other.wait_for_upper_past(4)
        waiting = asyncio.create_task(other.wait_for_upper_past(f(5)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await w.compare_and_append([], 5, 6)
        async with asyncio.timeout(5):
            await waiting
        assert other.upper == f(6)
        with pytest.raises(ap.InvalidUsage):
            await other.wait_for_upper_past((1, 2))


async def test_a_writer_whose_lease_ran_out_registers_anew(mem: ap.Client) -> None:
    """Goal: found out in the middle of an append by a state that it did not know."""
    from aiopersist.shard.attempt import Slot
    from aiopersist.state.writing import ExpireWriter

    async with (
        ap.open("mem://lease-ran-out") as one,
        ap.open("mem://lease-ran-out") as two,
        one.writer("t", SCHEMA) as w,
        two.writer("t", SCHEMA),
    ):
        for number, append in enumerate(
            (
                lambda: w.compare_and_append([("a", 1, 0, 1)], 0, 1),
                lambda: w.append([("a", 1, 1, 1)], 1, 2),
                lambda: w.write([("a", 1)]),
            )
        ):
            before = w.writer_id
            await commit(shard_of(two).register, ExpireWriter(before), Slot())
            await append()
            assert w.writer_id != before
            assert await rows(two) == [("a", 1, number + 1)]
            assert await w.settle() is None
