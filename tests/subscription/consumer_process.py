"""A process that consumes a shard until it is killed, and writes a line after each step:
`python -m tests.subscription.consumer_process BLOB CONSENSUS SEED`."""

import asyncio
import random
import sys
from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA


async def doubled(client: ap.Client, dice: random.Random) -> None:
    """From shard to shard, by `commit`."""
    out = await client.writer("out", SCHEMA)
    async with client.subscription("s", SCHEMA, name="doubled") as sub:
        async for step in sub:
            while True:
                time = (await out.fetch_recent_upper()).time
                assert isinstance(time, int)
                rows = [(update.key, 2 * update.val, time, 1) for update in step.updates]
                try:
                    await sub.commit(step, [ap.Append(out, rows, time, time + 1)])
                    break
                except ap.UpperMismatch:
                    continue
            print("doubled", flush=True)
            await asyncio.sleep(dice.uniform(0, 0.01))


async def summed(client: ap.Client, dice: random.Random) -> None:
    """From shard to table, by a transaction."""
    sums: Any = client.table("sums", str, int)
    async with client.subscription("s", SCHEMA, name="summed") as sub:
        async for step in sub:

            async def add(tx: ap.Transaction, updates: Any = step.updates) -> None:
                total = await tx.get(sums, "all") or 0
                tx.put(sums, "all", total + sum(update.val for update in updates))

            await client.transact(add, acks=[(sub, step)])
            print("summed", flush=True)
            await asyncio.sleep(dice.uniform(0, 0.01))


async def seen(client: ap.Client, dice: random.Random) -> None:
    """At least once: each val is written down before it is acknowledged."""
    async with client.subscription("s", SCHEMA, name="seen") as sub:
        async for step in sub:
            for update in step.updates:
                print("seen", update.val, flush=True)
            await sub.ack(step, durable=dice.random() < 0.5)


async def main(blob: str, consensus: str, seed: int) -> None:
    dice = random.Random(seed)
    async with ap.open(blob=blob, consensus=consensus) as client, asyncio.TaskGroup() as tasks:
        for work in (doubled, summed, seen):
            tasks.create_task(work(client, dice))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], int(sys.argv[3])))
