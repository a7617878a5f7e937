"""Tables, and stores whose calls a test holds back."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.conftest import StoreUrls
from tests.support.shards import Call


class Item(BaseModel):
    count: int


def table(client: ap.Client, name: str = "t") -> ap.Table[str, int]:
    return client.table(name, key=str, val=int)


class Gate(Faults):
    """Holds calls back while `holds(op)` says so, until `open`. With `late` a call that is held was made
    already: its answer comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.holds: Callable[[str], bool] = lambda op: False
        self.answers_late = False
        self.held = asyncio.Event()
        self._go = asyncio.Event()

    def hold(self, *ops: str, late: bool = False) -> None:
        """From now on, the next call of one of `ops` and all that follow."""
        self.holds, self.answers_late = lambda op: op in ops, late
        self.held, self._go = asyncio.Event(), asyncio.Event()

    def open(self) -> None:
        """Let them go."""
        self.holds = lambda op: False
        self._go.set()

    async def call(self, op: str, act: Call) -> Any:
        if not self.holds(op):
            return await super().call(op, act)
        go, late = self._go, self.answers_late
        self.held.set()
        if late:
            answer = await super().call(op, act)
            await go.wait()
            return answer
        await go.wait()
        return await super().call(op, act)


@asynccontextmanager
async def gated(at: str | StoreUrls, **settings: Any) -> AsyncIterator[tuple[ap.Client, Gate]]:
    """A client whose calls to the consensus store pass a gate."""
    urls = StoreUrls(at, at) if isinstance(at, str) else at
    gate, consensus = Gate(), ap.open_consensus(urls.consensus)
    limits = ap.Settings(**{"watch_timeout_s": 0.02, **settings})
    faulty = FaultyConsensus(consensus, gate)
    async with ap.open(blob=urls.blob, consensus=faulty, settings=limits, maintenance=False) as client:
        yield client, gate
    await consensus.aclose()


async def entries(table: Any, *args: Any, **filters: Any) -> list[Any]:
    return [entry async for entry in table.items(*args, **filters)]


async def versions(client: ap.Client, name: str) -> int:
    """How many versions of the shard were ever written."""
    seqno = (await client._shards.at(await client.shard_id(name)).open()).seqno
    return int(seqno)


def sent(client: ap.Client) -> Counter[str]:
    """The requests of a client so far, by kind, without those that wait for news."""
    return Counter({op: m.count for op, m in client.metrics.items() if not op.endswith("watch")})


async def least_sent(client: ap.Client, call: Callable[[], Any]) -> int:
    """The requests of one call: the least of several, since the client also looks for news now and then."""
    found = []
    for _ in range(8):
        before = sent(client)
        await call()
        found.append(sum((sent(client) - before).values()))
    return min(found)


async def in_time(work: Any) -> Any:
    """Its result; a test that hangs fails."""
    async with asyncio.timeout(50):
        return await work


async def steps_until(feed: Any, done: Callable[[list[Any]], bool]) -> list[Any]:
    """The steps of a feed until they are `done`."""
    found: list[Any] = []
    async with asyncio.timeout(50):
        while not done(found):
            found.append(await anext(feed))
    return found


def changes_of(steps: list[Any]) -> list[Any]:
    return [change for step in steps for change in step.changes]


@asynccontextmanager
async def small_writes(*writers: tuple[ap.Table[str, str], str, float]) -> AsyncIterator[None]:
    """Within it each table puts and deletes single keys all the time: vals that begin with its name, with its
    pause in seconds in between."""
    done = False

    async def write(table: ap.Table[str, str], name: str, pause_s: float) -> None:
        dice, number = random.Random(name), 0
        while not done:
            key = f"k{dice.randrange(2500):05}"
            if dice.random() < 0.2:
                await table.delete(key)
            else:
                number += 1
                await table.put(key, f"{name}-{number}")
            await asyncio.sleep(pause_s)

    tasks = [asyncio.ensure_future(write(*writer)) for writer in writers]
    try:
        yield
    finally:
        done = True
        await asyncio.gather(*tasks)


async def updates_of(client: ap.Client, table: ap.Table[str, str]) -> list[Any]:
    """All updates to a table so far."""
    now, updates = (await client.upper(table.name)).time, list[Any]()
    async with client.reader(table.name, table.schema) as reader, reader.listen(0, until=now) as listen:
        async for step in listen.steps():
            updates += list(step.updates)
    return updates
