"""A transaction on a snapshot reads all its tables as of one time, whatever is written meanwhile."""

import uuid
from collections.abc import AsyncIterator

import pytest

import aiopersist as ap
from aiopersist.table.transaction.consistent_read import ConsistentRead
from aiopersist.table.transaction.snapshot_transaction import SnapshotTransaction
from aiopersist.table.transaction.transaction import RunAgain
from tests.table.kit import table


@pytest.fixture
async def client() -> AsyncIterator[ap.Client]:
    async with ap.open(f"mem://{uuid.uuid4().hex}") as client:
        yield client


@pytest.fixture
async def tx(client: ap.Client) -> SnapshotTransaction:
    """A transaction on "a" as of a time after which all of its keys changed."""
    at = await table(client, "a").put_many({"k": 1, "l": 2})
    await table(client, "a").put_many({"k": 10, "l": 20, "m": 30})
    return SnapshotTransaction(client._services.tables, ConsistentRead(client._stack), ["a"], at)


async def test_all_reads_are_as_of_its_time(client: ap.Client, tx: SnapshotTransaction) -> None:
    a = table(client, "a")
    assert await tx.get(a, "k") == 1
    assert await tx.get(a, "m") is None
    assert await tx.get_many(a, ["k", "l", "m"]) == {"k": 1, "l": 2}
    assert [entry async for entry in tx.items(a)] == [("k", 1), ("l", 2)]
    assert tx.reads_only


async def test_a_write_ends_it(client: ap.Client, tx: SnapshotTransaction) -> None:
    with pytest.raises(RunAgain):
        await tx.insert(table(client, "a"), "n", 1)
    assert not tx.reads_only


async def test_what_it_reads_after_a_write_ends_it(client: ap.Client, tx: SnapshotTransaction) -> None:
    a = table(client, "a")
    tx.put(a, "k", 5)
    with pytest.raises(RunAgain):
        await tx.get(a, "k")


async def test_another_table_ends_it(client: ap.Client, tx: SnapshotTransaction) -> None:
    with pytest.raises(RunAgain):
        await tx.get(table(client, "b"), "k")
