"""Goal: the removal of a tombstone takes nothing of a shard that was made anew under its id, however late
the requests of the removal come."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.support.internals import shard_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import MONTH_S

T = TypeVar("T")


class Halt(Faults):
    """A process that stands still at the request number `at` of those that it makes from `begin` on, until it
    is told to `go_on`: before it, or `after` it, and then without the answer."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self.at, self.after = at, after
        self.requests = -(2**30)
        self.reached, self.go_on = asyncio.Event(), asyncio.Event()

    def begin(self) -> None:
        self.requests = 0

    async def call(self, op: str, act: Callable[[], Awaitable[T]]) -> T:
        if op == "now":
            return await act()
        if not self.after:
            await self.wait()
            return await act()
        result = await act()
        if await self.wait():
            raise ap.Indeterminate(f"the answer to {op} is lost")
        return result

    async def wait(self) -> bool:  # type: ignore[override]  # also called by a listing
        self.requests += 1
        if self.requests != self.at:
            return False
        self.reached.set()
        await self.go_on.wait()
        return True


async def dropped(place: Place) -> tuple[ap.ShardId, int]:
    """A shard that was dropped a month ago by its id, which is all that it was called, and the number of its
    tombstone; what came too late lies under it."""
    client, shard = await place.client(), ap.ShardId.new()
    async with client.writer(shard, SCHEMA) as w:
        await w.compare_and_append([("old", 1, 0, 1)], 0, 1)
    await client.admin.drop(shard)
    await place.blob.set(f"{shard}/w{shard[1:]}/{shard[1:]}.parquet", b"late")
    place.clock.ahead_s += MONTH_S + 60
    tombstone = await place.clock.head(consensus_key(shard))
    assert tombstone is not None
    return shard, tombstone.seqno


async def made_anew(place: Place, shard: str, last: int) -> None:
    """What the drop left is removed by now, and a process that stays writes until the newest version has the
    number that the tombstone had."""
    await (await place.client()).maintain()
    assert await place.clock.head(consensus_key(shard)) is None
    w = await (await place.client()).writer(shard, SCHEMA)
    await w.compare_and_append([("new", 1, 0, 1)], 0, 1)
    while shard_of(w).state.seqno < last:
        await w.compare_and_append([], w.upper, shard_of(w).state.seqno)
    assert shard_of(w).state.seqno == last


async def contents(place: Place, shard: str) -> list[Any]:
    async with (await place.client()).reader(shard, SCHEMA) as r, r.snapshot() as snapshot:
        return await snapshot.rows()


@pytest.mark.parametrize("after", [False, True])
async def test_a_round_that_stands_still(after: bool) -> None:
    """Goal: at any of its requests, while another round removes the tombstone and the shard is made anew."""
    at, was_reached = 0, True
    while was_reached:
        at += 1
        async with AsyncExitStack() as stack:
            place, halt = Place(stack, {"inline_writes_single_max_bytes": 0}), Halt(at, after=after)
            blob, consensus = FaultyBlob(place.blob, halt), FaultyConsensus(place.clock, halt)
            slow = await stack.enter_async_context(ap.open(blob=blob, consensus=consensus, maintenance=False))
            shard, last = await dropped(place)
            halt.begin()
            round_, reached = (
                asyncio.ensure_future(slow.maintain()),
                asyncio.ensure_future(halt.reached.wait()),
            )
            await asyncio.wait([round_, reached], return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            was_reached = halt.reached.is_set()
            await made_anew(place, shard, last)
            halt.go_on.set()
            await round_
            assert await contents(place, shard) == [("new", 1, 1)]
    assert at > 5
