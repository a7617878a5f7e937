"""Goal: a writer tells the truth about the shard as of the look that it names: a refusal tells the upper
that refused it, and no answer comes before an append of the handle is settled."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.storage.memory import MemoryConsensus
from tests.support.schemas import SCHEMA, Writer


class Watched(MemoryConsensus):
    """Counts the looks at the head of `key`; `before` runs before the look of that number. Versions wait for
    `gate`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.key = ""
        self.looks = 0
        self.before: dict[int, Callable[[], Awaitable[object]]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.sent = asyncio.Event()

    async def head(self, key: str) -> Any:
        if key == self.key:
            self.looks += 1
            if (then := self.before.pop(self.looks, None)) is not None:
                await then()
        return await super().head(key)

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        self.sent.set()
        await self.gate.wait()
        return await super().compare_and_set(key, expected, data)


@dataclass
class Rig:
    """A writer whose client is watched, and one of another client."""

    consensus: Watched
    mine: Writer
    theirs: Writer


@asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    blob, place = f"mem://{uuid.uuid4().hex}", uuid.uuid4().hex
    watched = Watched(place)
    async with (
        ap.open(blob=blob, consensus=watched, maintenance=False) as client,
        ap.open(blob=blob, consensus=MemoryConsensus(place), maintenance=False) as other,
        client.writer("t", SCHEMA) as mine,
        other.writer("t", SCHEMA) as theirs,
    ):
        await mine.fetch_recent_upper()
        watched.key = consensus_key(mine.shard_id)
        try:
            yield Rig(watched, mine, theirs)
        finally:
            watched.gate.set()


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [1, 2])
async def test_a_mismatch_tells_the_upper_that_it_met(looks: int) -> None:
    """Goal: after any change between two looks, `current` is not what was expected; one look is enough."""
    async with rig() as r:
        r.consensus.before[looks] = lambda: r.theirs.compare_and_append([], 0, looks)
        if looks == 1:  # it is as expected by then
            await r.mine.compare_and_append([("a", 1, 1, 1)], 1, 2)
            assert r.mine.upper == ap.Antichain(2)
            return
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.mine.compare_and_append([("a", 1, 1, 1)], 1, 2)
        assert (caught.value.expected, caught.value.current) == (ap.Antichain(1), ap.Antichain(0))
        assert r.consensus.looks == 1


async def test_a_replica_that_is_covered_by_the_look_succeeds() -> None:
    """Goal: the look at which the shard is at or past the upper of a replica's append is not a refusal."""
    async with rig() as r:
        r.consensus.before[1] = lambda: r.theirs.append([("a", 1, 1, 1)], 0, 2)
        await r.mine.append([("a", 1, 1, 1)], 1, 2)
        assert r.consensus.looks == 1
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.mine.append([("a", 1, 3, 1)], 3, 4)
        assert (caught.value.expected, caught.value.current) == (ap.Antichain(3), ap.Antichain(2))
        assert r.consensus.looks == 2


async def test_a_race_lost_at_the_store_costs_no_look() -> None:
    """Goal: an append that the newest known state allowed is refused by one statement: its answer tells."""
    async with rig() as r:
        await r.theirs.compare_and_append([], 0, 5)
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.mine.compare_and_append([("a", 1, 0, 1)], 0, 1)
        assert (caught.value.expected, caught.value.current) == (ap.Antichain(0), ap.Antichain(5))
        assert r.mine.upper == ap.Antichain(5)
        assert r.consensus.looks == 0


async def test_a_mismatch_after_a_settle_costs_one_look_more() -> None:
    """Goal: the append that is settled first costs what settling costs, and the refusal one look."""
    async with rig() as r:
        await cancelled(r, r.mine.compare_and_append([("a", 1, 0, 1)], 0, 1))
        r.consensus.gate.set()
        assert isinstance(await r.mine.settle(), ap.Committed)
        settled = r.consensus.looks
        with pytest.raises(ap.UpperMismatch) as caught:
            await r.mine.compare_and_append([("a", 1, 0, 1)], 0, 1)
        assert (caught.value.expected, caught.value.current) == (ap.Antichain(0), ap.Antichain(1))
        assert r.consensus.looks == settled + 1


async def test_a_finished_shard_is_a_mismatch_of_two_uppers() -> None:
    """Goal: `current` differs from `expected` also where a write expects no time in particular."""
    async with rig() as r:
        await r.mine.compare_and_append([], 0, ap.Antichain())
        for writer in (r.mine, r.theirs):
            with pytest.raises(ap.UpperMismatch) as caught:
                await writer.write([("a", 1)])
            assert caught.value.current == ap.Antichain()
            assert caught.value.expected != caught.value.current


# --- settling first --------------------------------------------------------------------------------


async def cancelled(r: Rig, append: Any, *, awaited: bool = True) -> None:
    """`append`, whose caller goes away while the statement is on its way."""
    r.consensus.gate.clear()
    r.consensus.sent.clear()
    task = asyncio.ensure_future(append)
    await r.consensus.sent.wait()
    task.cancel()
    if awaited:
        with suppress(asyncio.CancelledError):
            await task


APPENDS: dict[str, Callable[[Writer], Any]] = {
    "compare_and_append": lambda w: w.compare_and_append([("a", 1, 0, 1)], 0, 1),
    "write": lambda w: w.write([("a", 1)]),
}
CALLS: dict[str, Callable[[Writer], Any]] = {
    "fetch_recent_upper": lambda w: w.fetch_recent_upper(),
    "wait_for_upper_past": lambda w: w.wait_for_upper_past(0),
    "settle": lambda w: w.settle(),
    "empty write": lambda w: w.write([]),
}


@pytest.mark.parametrize("append", APPENDS)
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_after_a_cancelled_append_settles_it(append: str, call: str) -> None:
    """Goal: the handle's next call answers when it is decided whether the append happened, not before."""
    async with rig() as r:
        await cancelled(r, APPENDS[append](r.mine))
        told = asyncio.ensure_future(CALLS[call](r.mine))
        await asyncio.wait([told], timeout=0.05)
        assert not told.done(), "the statement is still on its way"
        r.consensus.gate.set()
        expected: Any = {"fetch_recent_upper": ap.Antichain(1), "settle": ap.Committed(ap.Antichain(1))}
        assert await told == expected.get(call, 0 if call == "empty write" else None)
        assert r.mine.upper == ap.Antichain(1)
        known = None if call == "empty write" else ap.Committed(ap.Antichain(1))
        assert await r.mine.settle() == known  # a write is an append: what came before it is told no more


async def test_a_caller_that_did_not_wait_for_the_cancellation() -> None:
    """Goal: an append whose task was told to end, and has not ended yet, is settled as well."""
    async with rig() as r:
        await cancelled(r, APPENDS["compare_and_append"](r.mine), awaited=False)
        asyncio.get_running_loop().call_later(0.01, r.consensus.gate.set)
        assert await r.mine.fetch_recent_upper() == ap.Antichain(1)


async def test_an_append_under_way_holds_up_no_reader_of_the_upper() -> None:
    """Goal: no append is in doubt while its caller waits for the answer, so `fetch_recent_upper` does not
    wait."""
    async with rig() as r:
        r.consensus.gate.clear()
        append = asyncio.ensure_future(r.mine.compare_and_append([("a", 1, 0, 1)], 0, 1))
        await r.consensus.sent.wait()
        assert await r.mine.fetch_recent_upper() == ap.Antichain(0)
        waiting = asyncio.ensure_future(r.mine.wait_for_upper_past(0))
        r.consensus.gate.set()
        await append
        await waiting
