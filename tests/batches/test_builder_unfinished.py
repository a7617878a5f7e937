"""The end of a builder that does not finish, and the smallest settings; see `test_builder.py`."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.testing.faults import Faults, Outcome
from tests.batches.builder_kit import EACH_ITS_OWN, FORMS, Gate, as_table, assert_closed, nothing_left
from tests.conftest import StoreUrls
from tests.support.rigs import rig
from tests.support.schemas import KIND, SCHEMA
from tests.support.shards import f, history, open_at, open_mem, parquet, rows, summed, until

UPDATE = st.tuples(
    st.sampled_from(["", "a", "bb", "é"]), st.integers(-1, 1), st.integers(2, 9), st.integers(-2, 2)
)


PIECE = st.tuples(st.sampled_from(["add", *FORMS]), st.lists(UPDATE, max_size=7))


# --- the end of a builder that does not finish --------------------------------------------------------


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
    async with rig(blob_faults=Gate(), **EACH_ITS_OWN) as r:
        w = await r.client.writer("t", SCHEMA)
        b = await w.builder(0)
        await b.add("a", 1, 0, 1)
        await until(lambda: len(r.blob_faults.waiting) == 1)
        await b.add("b", 1, 0, 1)
        await until(lambda: len(r.blob_faults.waiting) == 2)
        stalled = asyncio.create_task(b.add("c", 1, 0, 1))
        await until(lambda: b.write_stalls == 1)
        asyncio.get_running_loop().call_later(0.05, r.blob_faults.let_all)
        await {"exit": b, "writer": w, "client": r.client}[end].aclose()
        with pytest.raises(ap.InvalidUsage) as caught:
            await stalled
        assert caught.value.kind is KIND.CLOSED
        await assert_closed(b)
        await until(lambda: r.blob_faults.calls["set"] >= 2)
        await nothing_left(r.blob)


@pytest.mark.parametrize("where", ["add", "extend", "finish"])
async def test_a_cancelled_builder_deletes_what_it_uploaded(where: str) -> None:
    """Goal: the caller is not held up by uploads that hang: the deletion goes on without it."""
    async with rig(blob_faults=Gate(), **EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w:
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
        await until(lambda: len(r.blob_faults.waiting) == 2)
        task.cancel()
        async with asyncio.timeout(50):
            with pytest.raises(asyncio.CancelledError):
                await task
        await assert_closed(builders[0])
        r.blob_faults.let_all()
        await until(lambda: r.blob_faults.calls["delete"])
        await nothing_left(r.blob)
        assert r.blob_faults.calls["set"] == 2


async def test_an_add_that_is_cancelled_leaves_a_builder_that_goes_on() -> None:
    """Goal: that update may be in or not; the others are in once."""
    async with (
        rig(blob_faults=Gate(), **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        await b.add("b", 1, 0, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await b.add("maybe", 1, 0, 1)
        r.blob_faults.let_all()
        await b.add("c", 1, 0, 1)
        batch = await b.finish(1)
        await w.compare_and_append_batch([batch], 0, 1)
        found = {key: diff for key, _, diff in await rows(r.honest)}
        assert found.pop("maybe", 1) == 1
        assert found == {"a": 1, "b": 1, "c": 1}


async def test_a_deletion_that_fails_does_not_hide_the_error() -> None:
    """Goal: the body's own error leaves unwrapped, though the store is gone."""
    async with (
        rig(blob_faults=Faults(), retry_timeout_s=0, **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
    ):
        with pytest.raises(ZeroDivisionError):
            async with w.builder(0) as b:
                await b.add("a", 1, 0, 1)
                r.blob_faults.fail_next("delete", Outcome.REFUSED, 100)
                raise ZeroDivisionError


async def test_opening_and_filling_a_builder_commits_nothing() -> None:
    async with rig(blob_faults=Faults(), **EACH_ITS_OWN) as r, r.client.writer("t", SCHEMA) as w:
        before = r.faults.calls["compare_and_set"]
        async with w.builder(0) as b:
            await b.extend([("a", 1, 0, 1), ("b", 1, 0, 1)])
            batch = await b.finish(1)
        assert r.faults.calls["compare_and_set"] == before
        assert w.upper == f(0)
        await batch.delete()


# --- the smallest settings ----------------------------------------------------------------------------


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


# --- the property -------------------------------------------------------------------------------------


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
