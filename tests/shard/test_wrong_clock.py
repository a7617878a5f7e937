"""Goal: a clock that was wrong once does no lasting harm: leases end and history is forgotten as usual,
counted from the moment at which the clock is right again."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import Runtime
from aiopersist.state.command import AHEAD_S
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA

LEASES = ap.Settings(reader_lease_s=100.0, writer_lease_s=100.0)
YEARS_S = 13 * 365 * 86400.0


class Clock(Runtime):
    """The host's clock, which embedded stores tell; it stands still but for what a test does to it."""

    def __init__(self) -> None:
        self.at = 1_800_000_000.0

    def wall(self) -> float:
        return self.at


@pytest.fixture(params=["mem", "files"])
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    """Stores that tell the clock of the host."""
    return f"mem://{tmp_path.name}" if request.param == "mem" else tmp_path


def client_of(place: Any, clock: Clock) -> Any:
    return ap.open(place, runtime=clock, settings=LEASES, maintenance=False)


async def killed(client: ap.Client) -> None:
    """End its tasks; its handles are not released."""
    for task in list(stack_of(client).supervisor._loops):
        task.cancel()
    await asyncio.sleep(0)


async def test_a_hold_of_the_future_ends(place: Any) -> None:
    """Goal: a reader and a writer that died while the clock was years ahead are gone a lease after it is
    right; the live ones, which heartbeats renew, are not."""
    clock = Clock()
    async with client_of(place, clock) as live:
        async with live.writer("t", SCHEMA) as w:
            clock.at += YEARS_S
            dead = await client_of(place, clock)
            dead_writer = await dead.writer("t", SCHEMA)
            dead_reader = await dead.reader("t", SCHEMA, hold=0)
            await killed(dead)
            clock.at -= YEARS_S
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            view = await live.inspect("t")
            beats = [record.heartbeat for record in (*view.readers.values(), *view.writers.values())]
            assert max(beats) <= clock.at + AHEAD_S
            assert dead_writer.writer_id in view.writers  # its time begins now
            r = await live.reader("t", SCHEMA, hold=0)
            clock.at += 60.0
            await r.downgrade_since(0)
            await w.compare_and_append([("a", 1, 1, 1)], 1, 2)
            clock.at += 60.0
            await w.compare_and_append([("a", 1, 2, 1)], 2, 3)
            view = await live.inspect("t")
            assert dead_writer.writer_id not in view.writers
            assert dead_reader.reader_id not in view.readers
            assert w.writer_id in view.writers and r.reader_id in view.readers
            await dead.aclose()


async def test_a_clock_that_was_behind_ends_nobody_for_good(place: Any) -> None:
    """Goal: the library survives a moment in 1970: a handle whose lease was ended registers anew."""
    clock = Clock()
    async with client_of(place, clock) as client, client_of(place, clock) as other:
        async with (
            client.writer("t", SCHEMA) as w,
            other.writer("t", SCHEMA) as v,
            other.reader("t", SCHEMA) as r,
        ):
            await v.compare_and_append([("a", 1, 0, 1)], 0, 1)
            right, clock.at = clock.at, 0.0
            await w.compare_and_append([("a", 1, 1, 1)], 1, 2)
            clock.at = right
            await w.compare_and_append([("a", 1, 2, 1)], 2, 3)
            await v.compare_and_append([("a", 1, 3, 1)], 3, 4)
            async with r.snapshot() as s:
                assert await s.rows() == [("a", 1, 4)]


async def test_a_mark_of_the_future_stops_no_retention(place: Any) -> None:
    """Goal: uppers that were seen while the clock was ahead grow old from the moment at which it is right."""
    clock = Clock()
    async with client_of(place, clock) as client, client.writer("t", SCHEMA) as w:
        clock.at += YEARS_S
        await client.admin.retain("t", timedelta(seconds=40))
        await w.compare_and_append([("a", 1, 0, 1)], 0, 5)
        await client.admin.force_compaction("t")
        clock.at -= YEARS_S
        await client.admin.force_compaction("t")
        assert (await client.admin.inspect("t")).since == ap.Antichain(0)
        for step in range(5, 15):
            clock.at += 15.0
            await w.compare_and_append([("a", 1, step, 1)], step, step + 1)
            await client.admin.force_compaction("t")
        since: Any = (await client.admin.inspect("t")).since.time
        assert 10 <= since <= 13
        policy = (await client.admin.inspect("t")).retention
        assert policy is not None and max(mark.at for mark in policy.marks) <= clock.at


async def test_clocks_that_differ_a_little_cost_nothing(place: Any) -> None:
    """Goal: what two processes tell the clock of a server apart writes no record of others."""
    clock = Clock()
    async with client_of(place, clock) as client, client.reader("t", SCHEMA, create=True) as r:
        async with client.writer("t", SCHEMA) as w, client.reader("t", SCHEMA, hold=0):
            before = {
                key: record.heartbeat for key, record in (await client.admin.inspect("t")).readers.items()
            }
            clock.at -= AHEAD_S / 2
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            after = {
                key: record.heartbeat for key, record in (await client.admin.inspect("t")).readers.items()
            }
            assert after == before and r.upper is not None
