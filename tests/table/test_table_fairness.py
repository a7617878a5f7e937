"""Goal: a large put comes through beside another process that changes more and more of its keys, after a
bounded number of tries; and whoever has left a wish, and is gone, costs others little."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard import fairness
from aiopersist.shard.register import Register
from aiopersist.table.handle import opened
from aiopersist.table.transaction.transact import WISHES_AFTER
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.support.processes import Place
from tests.support.shards import Call
from tests.table.kit import entries, in_time
from tests.table.test_bulk import LIMITS, stream

REQUESTS_MAX = 1000  # it makes about 100, and up to 300 beside a busy Postgres; without an end, any number


class Raced(Faults):
    """Once `requests` is a number, counts the requests of a client, apart from those for news, and lets
    another one change a key within each read of a blob, if that does not stand back."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: int | None = None
        self.changed, self.are_too_many = asyncio.Event(), asyncio.Event()

    async def call(self, op: str, act: Call) -> Any:
        if self.requests is not None:
            self.requests += op not in ("head", "watch", "scan")
            if self.requests > REQUESTS_MAX:
                self.are_too_many.set()
            if op in ("get", "get_range"):
                self.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self.changed.wait()
        return await super().call(op, act)


async def test_it_comes_through_beside_one_who_changes_more_and_more_of_its_keys(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiopersist.storage.wishes.MOST_S", 40.0)
    raced, other = Raced(), await place.apart()
    opening = ap.open(
        blob=FaultyBlob(place.blob, raced),
        consensus=FaultyConsensus(place.clock, raced),
        settings=ap.Settings(**{**place.settings, **LIMITS, "blob_cache_bytes": 1}),
        maintenance=False,
    )
    client = await place.stack.enter_async_context(opening)
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    await table.put_many(stream(5000, "a"))
    is_done = False

    async def changes() -> None:
        for number in range(5000):
            if is_done:
                return
            await theirs.put(f"k{number:05}", f"theirs {number}")
            raced.changed.set()

    changing = asyncio.ensure_future(changes())
    raced.requests = 0
    putting = asyncio.ensure_future(table.put_many(stream(5000, "b")))
    endless = asyncio.ensure_future(raced.are_too_many.wait())
    await in_time(asyncio.wait([putting, endless], return_when=asyncio.FIRST_COMPLETED))
    is_done, raced.requests = True, None
    await in_time(changing)
    assert not endless.done()
    endless.cancel()
    time = await putting
    assert dict(await entries(theirs, as_of=time)) == dict(stream(5000, "b"))
    assert (await client.admin.fsck("t")).ok


async def test_others_stand_back_once_until_a_wish_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, waited = await place.apart(), list[Register]()
    theirs, apart = other.table("t", str, int), other.table("apart", str, int)
    for table in (theirs, apart):
        await table.put("a", 1)
    register = (await opened(theirs)).participant.register
    await place.consensus().wish([register.key], "gone", 0.5, 0.0)
    await theirs.put("a", 2)
    assert other._stack.consensus.stand_back_s(register.key, "other", 0.0) > 0
    yield_to_others = fairness.yield_to_others

    async def noted(registers: Iterable[Register]) -> bool:
        given = list(registers)
        reading = asyncio.ensure_future(theirs.get("a"))
        if found := await yield_to_others(given):
            waited.extend(given)
            assert reading.done(), "gets go on"
        await reading
        return found

    monkeypatch.setattr(fairness, "yield_to_others", noted)
    await apart.put("a", 2)
    assert waited == []
    await in_time(theirs.put("a", 3))
    assert waited == [register]
    await theirs.put("a", 4)
    assert waited == [register], "whoever left it may be gone"


async def test_a_transaction_that_takes_long_asks_others_to_stand_back(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: its body takes longer than another client needs to change what it has read, each time. It comes
    through all the same, and then the other one goes on."""
    monkeypatch.setattr("aiopersist.storage.wishes.MOST_S", 40.0)
    client, other = await place.client(), await place.apart()
    table, theirs = client.table("t", str, int), other.table("t", str, int)
    changed, is_done = asyncio.Event(), False

    async def change() -> None:
        number = 0
        while not is_done:
            await theirs.put("k", number := number + 1)
            changed.set()

    async def slow(tx: ap.Transaction) -> None:
        val = await tx.get(table, "k")
        changed.clear()
        for _ in range(2):  # the first may have been under way
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await changed.wait()
            changed.clear()
        tx.put(table, "seen", val or 0)

    changing = asyncio.ensure_future(change())
    await changed.wait()
    await in_time(client.transact(slow, max_attempts=WISHES_AFTER + 20))
    changed.clear()
    await in_time(changed.wait())
    is_done = True
    await in_time(changing)


async def test_who_stands_back_at_one_shard_needs_no_longer_at_another(
    quiet_mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a slot is as long as a try takes: not as what was waited for others, which would make the next
    slot longer, and what they wait, too."""
    tables = [quiet_mem.table(name, key=str, val=int) for name in "ab"]
    first, second = [(await opened(table)).shard.register for table in tables]
    stack, waits = first.stack, {first.key: 0.2}
    monkeypatch.setattr(stack.consensus, "stand_back_s", lambda key, who, waited_s: waits.get(key, 0.0))
    await fairness.lost({second: 0})
    assert await fairness.yield_to_others([first, second]) >= 0.2
    await fairness.lost({second: 1})
    assert 0 < second.losses.slot_s < 0.1


async def test_what_was_lost_long_ago_makes_no_slot_longer(quiet_mem: ap.Client) -> None:
    """Goal: a try that began after the last loss needs no longer than itself: ids of `once=` lie in many
    shards, each of which is seldom written."""
    shard = (await opened(quiet_mem.table("t", key=str, val=int))).shard
    await fairness.lost({shard.register: 0})
    await asyncio.sleep(0.2)
    fairness.begin([shard.register])
    await fairness.lost({shard.register: 1})
    assert 0 < shard.register.losses.slot_s < 0.1
