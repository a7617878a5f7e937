"""Goal: the way of a write is short. How many Python functions one call enters, in memory and without
maintenance, is the same in each run, on any machine; time is not."""

import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state.once import hash_of
from aiopersist.table.transaction.transact import _record_of

Call = Callable[[], Awaitable[Any]]
REPEATS, ROUNDS = 20, 5
BUDGETS = {"append": 275, "put": 415, "update": 425, "get": 125, "transact": 750, "once": 880}
"""Of Python 3.13; the loops of 3.11 enter a function for each comprehension, and make no eager tasks."""


def ids(count: int) -> list[str]:
    """Ids that one shard remembers: the first one of each opens it."""
    names = (f"id {number}" for number in range(1_000_000))
    found: list[str] = []
    while len(found) < count:
        name = next(names)
        if _record_of(hash_of(name)) == "07":
            found.append(name)
    return found


def calls_of(client: ap.Client, writer: ap.WriteHandle[str, int]) -> dict[str, Call]:
    stock, orders = client.table("stock", key=str, val=int), client.table("orders", key=str, val=int)
    times, counts, marks = iter(range(10_000)), iter(range(10_000)), iter(ids((ROUNDS + 2) * REPEATS))

    async def append() -> None:
        time = next(times)
        await writer.compare_and_append([("tea", 1, time, 1)], time, time + 1)

    async def move(tx: ap.Transaction) -> None:
        tx.put(stock, "tea", (await tx.get(stock, "tea") or 0) - 1)
        tx.put(orders, "tea", (await tx.get(orders, "tea") or 0) + 1)

    return {
        "append": append,
        "put": lambda: stock.put("tea", next(counts)),
        "update": lambda: stock.update("tea", lambda count: (count or 0) + 1),
        "get": lambda: stock.get("tea"),
        "transact": lambda: client.transact(move),
        "once": lambda: client.transact(move, once=next(marks)),
    }


async def counted(call: Call) -> float:
    """The functions that a call enters, on the average of the best of some rounds: in the others a timer may
    have come in between. A step of a coroutine is one."""
    for _ in range(REPEATS):
        await call()
    return min([await _entered(call) for _ in range(ROUNDS)])


async def _entered(call: Call) -> float:
    entered = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal entered
        entered += event == "call"

    sys.setprofile(profile)
    try:
        for _ in range(REPEATS):
            await call()
    finally:
        sys.setprofile(None)
    return entered / REPEATS


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 13), reason="each Python enters as many functions as it likes"
)
@pytest.mark.parametrize("name", BUDGETS)
async def test_a_call_enters_few_functions(name: str) -> None:
    location, schema = f"mem://{uuid.uuid4().hex}", ap.Schema(str, int)
    async with ap.open(location, maintenance=False) as client, client.writer("raw", schema) as writer:
        calls = calls_of(client, writer)
        await calls["put"]()
        assert await counted(calls[name]) <= BUDGETS[name]
