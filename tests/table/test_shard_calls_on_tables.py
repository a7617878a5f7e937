"""Goal: no way into a shard writes a table behind the back of its rule, one val per key. Spark's ways are in
`tests/spark/test_tables.py`."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.shards import Shards
from aiopersist.write.remote import register_writer
from tests.support.internals import shards_of

SCHEMA = ap.Schema(str, int)
NOT_A_TABLE, NOT_FROM_HERE = ap.UsageKind.NOT_A_TABLE, ap.UsageKind.BATCH_NOT_FROM_THIS_SHARD


class Ways:
    """A client with a table `t`, a plain shard beside it, and a batch of the table that somebody staged."""

    def __init__(self, client: ap.Client, plain: ap.WriteHandle[str, int], batch: ap.Batch) -> None:
        self.client = client
        self.plain = plain
        self.batch = batch

    async def by_a_writer(self, **given: Any) -> None:
        async with self.client.writer("t", SCHEMA, **given) as writer:
            await writer.write([("a", 2)])

    async def by_its_id(self) -> None:
        async with self.client.writer(await self.client.shard_id("t"), SCHEMA):
            pass

    async def by_a_wall_writer(self) -> None:
        await self.by_a_writer(clock="wall")

    async def by_a_registered_writer(self) -> None:
        await self.client.workers.register_writer("t", SCHEMA, 60.0)

    async def by_a_batch_of_the_table(self) -> None:
        upper = await self.plain.fetch_recent_upper()
        await self.plain.compare_and_append_batch([self.batch], upper, ap.Antichain())

    async def by_a_replica_of_the_batch(self) -> None:
        upper = await self.plain.fetch_recent_upper()
        await self.plain.append_batch(self.batch, upper, ap.Antichain())

    async def by_a_batch_from_elsewhere(self) -> None:
        await self.plain.batch_from_transmittable(self.batch.to_transmittable())

    async def by_many_appends(self) -> None:
        upper = await self.plain.fetch_recent_upper()
        append = ap.Append(self.plain, self.batch, upper, ap.Antichain())
        await self.client.compare_and_append_many([append])

    async def by_a_transaction(self) -> None:
        table = self.client.table("t", str, int)

        async def body(tx: ap.Transaction) -> None:
            tx.append(table, [("a", 2)])  # a table is no writer

        await self.client.transact(body)


@pytest.fixture
async def ways() -> AsyncIterator[Ways]:
    async with ap.open("mem://") as client:
        await client.table("t", str, int).put("a", 1)
        plain = await client.writer("plain", SCHEMA, clock="wall")
        shards: Shards = shards_of(client)
        grant = await register_writer(shards, "t", SCHEMA, 60.0, tables=True)  # as Spark's upserts
        async with client.workers.builder_from_transmittable(grant, 0) as builder:
            await builder.extend([("a", 2, 0, 1)])
            batch = await builder.finish(1)
        yield Ways(client, plain, batch)
        with suppress(ap.InvalidUsage):  # it was handed over
            await batch.delete()


WAYS: dict[str, tuple[Callable[[Ways], Awaitable[None]], Any]] = {
    "a writer": (Ways.by_a_writer, NOT_A_TABLE),
    "its id": (Ways.by_its_id, NOT_A_TABLE),
    "a wall writer": (Ways.by_a_wall_writer, NOT_A_TABLE),
    "a registered writer": (Ways.by_a_registered_writer, NOT_A_TABLE),
    "a batch of the table": (Ways.by_a_batch_of_the_table, NOT_FROM_HERE),
    "a replica of the batch": (Ways.by_a_replica_of_the_batch, NOT_FROM_HERE),
    "a batch from elsewhere": (Ways.by_a_batch_from_elsewhere, NOT_FROM_HERE),
    "many appends": (Ways.by_many_appends, NOT_FROM_HERE),
    "a transaction": (Ways.by_a_transaction, None),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_way_past_the_table_is_closed(ways: Ways, way: str) -> None:
    """Goal: refused with an error that says why, and the table is as it was."""
    call, kind = WAYS[way]
    error = ap.InvalidUsage if kind is not None else TypeError
    upper = await ways.client.upper("t")
    with pytest.raises(error) as found:
        await call(ways)
    assert kind is None or (isinstance(found.value, ap.InvalidUsage) and found.value.kind is kind)
    assert await ways.client.upper("t") == upper
    async with ways.client.reader("t", SCHEMA) as reader, reader.snapshot() as snapshot:
        assert await snapshot.rows() == [("a", 1, 1)]


async def test_other_kinds_have_names_of_their_own(ways: Ways) -> None:
    """Goal: an Indexed and a stash that are named as a table is are beside it."""
    async with ways.client.indexed("t"), ways.client.stash("t"):
        pass
    assert await ways.client.table("t", str, int).get("a") == 1
