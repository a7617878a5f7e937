"""No answer rests on a state older than its call: what wrote nothing, and what failed, was looked at."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from tests.support.processes import Place
from tests.table.kit import gated, in_time, sent


async def test_a_get_sees_what_another_client_has_put(location: Any) -> None:
    """Each linearizable read sees every put that was acknowledged before it began, in any client."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as one,
        ap.open(blob=location.blob, consensus=location.consensus) as two,
    ):
        a, b = one.table("t", str, int), two.table("t", str, int)
        for number in range(10):
            await a.put("k", number)
            assert await b.get("k") == number
            await b.put("k", -number)
            assert await a.get_many(["k"]) == {"k": -number}
            assert [entry async for entry in a.items()] == [("k", -number)]


async def test_gets_share_a_read_that_was_not_sent(place: Place) -> None:
    """100 gets while one read is under way: one more for all of them."""
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        await table.put("k", 1)
        before = gate.calls["head"]
        gate.hold("head")
        first = asyncio.create_task(table.get("k"))
        await in_time(gate.held.wait())
        others = [asyncio.create_task(table.get("k")) for _ in range(100)]
        await asyncio.sleep(0.01)
        gate.open()
        assert await asyncio.gather(first, *others) == [1] * 101
        assert gate.calls["head"] - before == 2


async def test_a_read_that_was_sent_serves_no_later_get(place: Place) -> None:
    """A read of the head whose answer is on its way is older than the get."""
    async with gated(place.urls) as (client, gate):
        table, other = client.table("t", str, int), (await place.client()).table("t", str, int)
        await table.put("k", 1)
        gate.hold("head", late=True)  # it reads now, and answers later
        early = asyncio.create_task(table.get("k"))
        await in_time(gate.held.wait())
        await asyncio.sleep(0.01)
        await other.put("k", 2)
        late = asyncio.create_task(table.get("k"))
        await asyncio.sleep(0.01)
        gate.open()
        assert await early in (1, 2)
        assert await late == 2


def calls(table: Any) -> dict[str, Any]:
    def fails(old: Any) -> Any:
        if old == 1:
            raise ZeroDivisionError
        return 7

    return {
        "put": lambda: table.put("k", 1),
        "put_many": lambda: table.put_many({"k": 1}),
        "delete": lambda: table.delete("gone"),
        "insert": lambda: table.insert("k", 5),
        "update": lambda: table.update("k", lambda old: old),
        "raises": lambda: table.update("k", fails),
    }


@pytest.mark.parametrize("call", calls(None))
async def test_what_wrote_nothing_is_looked_at(call: str, place: Place) -> None:
    """This client does not hear of anything: another one changes what the call would read. The call must act
    on that change, though by its own view there is nothing to write, or a reason to fail."""
    async with gated(place.urls, watch_timeout_s=1000.0) as (client, gate):
        gate.losing_hints = True
        table, other = client.table("t", str, int), (await place.client()).table("t", str, int)
        await table.put("k", 1)
        await table.get("k")
        await other.delete("k")
        await other.put("gone", 1)
        assert await table.get_many(["k", "gone"], stale=True) == {"k": 1}
        before = sent(client)
        answer = await in_time(calls(table)[call]())
        expected = {"put": 1, "put_many": 1, "delete": None, "insert": 5, "update": None, "raises": 7}[call]
        assert await other.get("k") == expected
        assert await other.get("gone") == (None if call == "delete" else 1)
        assert (sent(client) - before)["consensus.head"] >= 1
        if call == "raises":
            assert answer == 7


@pytest.mark.parametrize("call", calls(None))
async def test_a_look_that_was_sent_before_does_not_do(call: str, place: Place) -> None:
    """A read of the head is on its way as the call begins: another one is sent."""
    async with gated(place.urls, watch_timeout_s=1000.0) as (client, gate):
        gate.losing_hints = True
        table, other = client.table("t", str, int), (await place.client()).table("t", str, int)
        await table.put("k", 1)
        await other
        gate.hold("head", late=True)
        early = asyncio.create_task(table.get("k"))
        await in_time(gate.held.wait())
        await asyncio.sleep(0.01)  # it has read
        await other.put("k", 2)
        await other.put("gone", 1)
        work = asyncio.create_task(calls(table)[call]())
        await asyncio.sleep(0.01)
        gate.open()
        await asyncio.wait([early, work])
        expected = {"put": 1, "put_many": 1, "delete": 2, "insert": 2, "update": 2, "raises": 7}[call]
        assert await other.get("k") == expected
        assert await other.get("gone") == (None if call == "delete" else 1)
        if call == "insert":
            assert isinstance(work.exception(), ap.KeyExists)
        else:
            assert work.exception() is None


async def test_the_look_of_one_table_is_none_of_another(place: Place) -> None:
    """A group over two tables loses one of them to another client. What writes nothing in the other is looked
    at all the same."""
    async with gated(place.urls, watch_timeout_s=1000.0) as (client, gate):
        gate.losing_hints = True
        a, b = client.table("a", str, int), client.table("b", str, int)
        theirs = await place.client()
        others = theirs.table("a", str, int), theirs.table("b", str, int)
        await asyncio.gather(a.put("k", 1), b.put("k", 1))
        for other in others:
            await other.put("l", 1)
        await others[1].put("k", 3)  # b's client does not know
        a_put, b_put, b_insert = await in_time(
            asyncio.gather(a.put("k", 2), b.put("k", 1), b.insert("new", 1), return_exceptions=True)
        )
        assert a_put > 0
        assert b_put > 0
        assert b_insert > 0
        assert await others[1].get_many(["k", "new"]) == {"k": 1, "new": 1}


async def test_a_stale_get_follows(place: Place) -> None:
    """What another client puts is heard of without a call."""
    one, two = await place.client(), await place.client()
    a, b = one.table("t", str, int), two.table("t", str, int)
    await a.put("k", 1)
    await b
    await a.put("k", 2)
    async with asyncio.timeout(50):
        while await b.get("k", stale=True) != 2:
            await asyncio.sleep(0.001)
