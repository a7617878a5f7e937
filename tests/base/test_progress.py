"""Goal: who waits for long work can see how far it is, and its result, its error and its end are those of the
work alone."""

import asyncio
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.base.progress import progress

SETTINGS = ap.Settings(
    inline_writes_single_max_bytes=0, compaction_memory_bytes=64 * 1024, row_group_bytes=16 * 1024
)
ROWS, BATCHES = 10_000, 2  # as many runs as the least memory merges at once


@pytest.fixture
async def client(tmp_path: Path) -> ap.Client:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        async with client.writer("big", ap.Schema(int, str)) as writer:
            for batch in range(BATCHES):
                await writer.write([(n, f"val {batch}") for n in range(ROWS)])
        yield client


async def test_a_compaction_and_a_check(client: ap.Client) -> None:
    """Goal: rows from 0 to all of them, never back."""
    for step, call in {"compaction": client.admin.force_compaction, "fsck": client.fsck}.items():
        work = ap.track(call("big"))
        seen = [done async for done in work]
        await work
        assert {(done.step, done.total, done.unit) for done in seen} == {(step, ROWS * BATCHES, "rows")}
        counts = [done.done for done in seen]
        assert counts == sorted(counts)
        assert counts[-1] == ROWS * BATCHES
        assert len(counts) > 2


async def test_a_large_put() -> None:
    """Goal: rows that are merged with what is there, from 0 to all of them."""
    settings = ap.Settings(table_resident_bytes=10_000, row_group_bytes=20_000, read_memory_bytes=2**20)
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        table = client.table("t", int, str)
        for val in ("a", "b"):
            work = ap.track(table.put_many((n, val * 100) for n in range(ROWS)))
            seen = [done async for done in work]
            await work
            assert {(done.step, done.total, done.unit) for done in seen} == {("merge", ROWS, "rows")}
            counts = [done.done for done in seen]
            assert counts == sorted(counts)
            assert counts[-1] == ROWS
            assert len(counts) > 2


async def test_calls_over_a_location(client: ap.Client) -> None:
    for step, call in {
        "usage": client.admin.usage,
        "sweep": client.admin.sweep_leaked_blobs,
        "overview": client.admin.overview,
    }.items():
        work = ap.track(call())
        assert await work
        assert work.newest == ap.WorkDone(step, 1, 1, "shards")


async def test_the_end_of_the_work_is_its_own() -> None:
    """Goal: an iteration ends with the work; its error comes from `await`, not from the iteration. The work
    goes on after an iteration that is left; `cancel` ends it."""

    async def fails() -> None:
        with progress("fails", None, "rows") as step:
            step.advance(1)
            raise ValueError("the work")

    work = ap.track(fails())
    assert [done.done async for done in work] == [1]
    with pytest.raises(ValueError, match="the work"):
        await work

    ended = asyncio.Event()

    async def goes_on() -> int:
        with progress("goes on", 2, "rows") as step:
            step.advance(1)
            await ended.wait()
            return 7

    left = ap.track(goes_on())
    async for _ in left:
        break
    ended.set()
    assert await left == 7
    ended.clear()
    stopped = ap.track(goes_on())
    async for _ in stopped:
        stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    unused = ap.track(goes_on())
    unused.cancel()  # a coroutine that never ran would warn


async def test_a_step_within_a_step_is_a_detail() -> None:
    """Goal: what a step does inside never shows as the work itself, and work that nobody watches reports to
    nobody, also beside work that is watched."""

    async def inner() -> None:
        with progress("inner", 10, "rows") as step:
            step.advance(5)
            await asyncio.sleep(0)

    async def outer() -> None:
        with progress("outer", 1, "shards") as step:
            await asyncio.gather(inner(), inner())
            step.advance(1)

    work = ap.track(outer())
    unwatched = asyncio.create_task(inner())
    seen = [done async for done in work]
    await unwatched
    assert {done.step for done in seen} == {"outer"}
    assert seen[-1] == ap.WorkDone("outer", 1, 1, "shards")
