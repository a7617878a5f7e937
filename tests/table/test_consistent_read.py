"""The reads of a transaction are of one moment, which comes about however others write."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.wrapper import WrappedConsensus
from aiopersist.table.commit.participant import TableParticipant
from aiopersist.table.handle import opened
from aiopersist.table.transaction.consistent_read import ConsistentRead
from tests.table.kit import table


class Disturbed(WrappedConsensus):
    """Before each look at a head another client does something."""

    disturb: Callable[[], Awaitable[object]] | None = None

    async def _request(self, op: str, request: Any, sent: int = 0) -> Any:
        if op in ("head", "heads") and self.disturb is not None:
            await self.disturb()
        return await request()


@pytest.fixture
async def two() -> AsyncIterator[tuple[ap.Client, ap.Client, Disturbed]]:
    """Two clients of one location, and the store of the first one."""
    url = f"mem://{uuid.uuid4().hex}"
    store = Disturbed(ap.open_consensus(url))
    async with (
        ap.open(blob=url, consensus=store, maintenance=False) as one,
        ap.open(blob=url, consensus=url, maintenance=False) as other,
    ):
        yield one, other, store


async def participant(client: ap.Client, name: str) -> TableParticipant:
    return (await opened(table(client, name))).participant


async def caught_up(*participants: TableParticipant) -> None:
    for one in participants:
        await one.look()
        await one.view.catch_up()


async def test_what_one_commit_of_another_client_leaves_is_one_moment(
    two: tuple[ap.Client, ap.Client, Disturbed],
) -> None:
    """No further look is needed: both tables are at the time of that commit."""
    one, other, _ = two
    a, b = await participant(one, "a"), await participant(one, "b")
    consistent_read = ConsistentRead(one._stack)

    async def both(tx: ap.Transaction) -> None:
        tx.put(table(other, "a"), "k", 1)
        tx.put(table(other, "b"), "k", 1)

    await other.transact(both)
    await caught_up(a, b)
    assert consistent_read.holds([a, b])
    await table(other, "a").put("k", 2)
    await caught_up(a)
    assert not consistent_read.holds([a, b])  # nobody knows yet what has happened to b


async def test_a_transaction_reads_two_tables_of_which_one_never_rests(
    two: tuple[ap.Client, ap.Client, Disturbed],
) -> None:
    """Each look at a head finds that another client has written: after some the other table is closed."""
    one, other, store = two
    mine, theirs, numbers = [table(one, name) for name in "ab"], table(other, "a"), itertools.count()
    await mine[1].put("k", 7)
    await theirs.put("k", next(numbers))
    before = (await one.inspect("b")).upper
    found = []

    async def body(tx: ap.Transaction) -> None:
        found.append([await tx.get(one_table, "k") for one_table in mine])
        store.disturb = None

    async def write() -> None:
        await theirs.put("k", next(numbers))

    await asyncio.gather(*mine)
    store.disturb = write
    async with asyncio.timeout(60):
        await one.transact(body)
    assert found[0][1] == 7
    assert not (await one.inspect("b")).upper <= before
