"""Goal: a client that lives for months, opens what is not there or is no table, and acknowledges the steps of
one source after the other, keeps none of it."""

import asyncio
import gc

import pytest

import aiopersist as ap
from aiopersist.shard.follow import LINGER_S
from tests.support.virtual import in_virtual_time


async def consume(client: ap.Client, number: int) -> None:
    """A step of a source of its own, in a transaction."""
    async with client.table(f"source{number}", str, int) as source:
        await source.put("a", 1)
        async with source.subscription("sub") as sub:
            step = await anext(sub)

            async def body(tx: ap.Transaction) -> None:
                tx.put(client.table("out", str, int), "k", number)

            await client.transact(body, acks=[(sub, step)])


async def open_in_vain(client: ap.Client, number: int) -> None:
    """What is no table, and, by a client that cannot make it, what is not there."""
    await (await client.writer(f"plain{number}", ap.Schema(str, int))).aclose()
    wrong = client.table(f"plain{number}", str, int)
    with pytest.raises(ap.InvalidUsage, match="NOT_A_TABLE"):
        await wrong.get("a")
    await wrong.aclose()


@in_virtual_time
async def test_nothing_is_kept_of_what_is_over() -> None:
    async with ap.open("mem://left", maintenance=False) as client:
        for number in range(5):
            await consume(client, number)
            await open_in_vain(client, number)
        await asyncio.sleep(10 * LINGER_S)
        gc.collect()
        known = [shard for ref in client._shards._open.valuerefs() if (shard := ref()) is not None]
        assert {shard.known_as for shard in known} <= {"out"}
        assert len(client._services.tables._open) <= 1
        assert not client._services.tables.group._slots
    async with ap.open("mem://left", readonly=True) as client:
        for number in range(5):
            table = client.table(f"none{number}", str, int)
            with pytest.raises(ap.UnknownShard):
                await table.get("a")
            await table.aclose()
        assert not client._services.tables._open
