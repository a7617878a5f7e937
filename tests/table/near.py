"""A process that is near to the stores, and does one thing again and again without a pause: each line of its
input says which from then on. It answers each line once it has begun, and ends with its input.

python -m tests.table.near BLOB CONSENSUS STASH
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import aiopersist as ap
from aiopersist.shard.catalog import IndexedId, find
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.writing import Occupy

Call = Callable[[int], Awaitable[object]]
NUMBERS = ap.stash.TypedCollection("numbers", str, int)


async def call_of(client: ap.Client, what: str, stash: str) -> Call:
    if what == "stash":
        opened = await ap.stash.open(stash, exclusive=False)
        return lambda n: NUMBERS.upsert_key(opened, "near", n)
    if what == "write":
        writer = await client.writer("s", ap.Schema(str, int), clock="wall")
        return lambda n: writer.write([("near", n)])
    if what == "index":  # one client writes it; this one commits to its shard nevertheless
        found = await find(client._stack, "ix", IndexedId)
        assert found is not None
        register = Shard(client._stack, found).register
        await register.refresh()
        return lambda n: commit(register, Occupy(""))
    return lambda n: client.table("t", key=str, val=int).put("near", n)


async def main(blob: str, consensus: str, stash: str) -> None:
    async with ap.open(blob=blob, consensus=consensus, maintenance=False) as client:
        told = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        while line := await told:
            call, number = await call_of(client, line.strip(), stash), 0
            told = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
            while not told.done():
                await call(number)
                number += 1
                if number == 1:
                    print("begun", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
