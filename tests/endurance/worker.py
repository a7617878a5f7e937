"""A process of the long run: tasks that append, count and transfer, read what they wrote, and follow a
subscription, until a file says that it is to stop, or it is killed. `python -m tests.endurance.worker ORDERS`
reads its orders from a JSON file.

A call that is answered by an error is made again with the same id. The process that takes the place of a
killed one makes the calls again of which that one was not told.
"""

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

import aiopersist as ap
from tests.endurance.forks import FORK_S, Forks
from tests.endurance.notes import Notes
from tests.endurance.publications import Publications
from tests.endurance.tags import Tags

LOG = ap.Schema(key=str, val=int)
ACCOUNTS, BALANCE = 20, 100
READ_S = 15.0
TAG_S = 5.0
PUBLISH_S = 8.0
AGAIN_S = 0.05
SETTINGS = ap.Settings(inline_writes_single_max_bytes=400, rollup_every=32, open_timeout_s=300.0)


class Wrong(AssertionError):
    """A read that contradicts what was told."""


@dataclass(frozen=True)
class Orders:
    """What a process is to do."""

    name: str
    place: str
    """Of the processes that follow each other."""
    blob: str
    consensus: str
    notes: str
    stop: str
    """It stops once this file is there."""
    local: str
    """A directory that all processes share."""
    seed: int
    pause_s: float
    """Between two operations of a task, on average."""
    retry_s: float | None
    subscribes: bool
    again: tuple[tuple[str, str], ...] = ()
    """Kinds and ids of calls of which the process before it was not told."""


class Worker:
    """See the header."""

    def __init__(self, orders: Orders, client: ap.Client, local: ap.Client) -> None:
        self.orders = orders
        self.client = client
        self.note = Notes(Path(orders.notes))
        self.dice = random.Random(f"{orders.seed} {orders.name}")
        self.stopping = asyncio.Event()
        self.forks = Forks(orders.name, orders.local, local, self.note, self.dice)
        self.tags = Tags(orders.name, client, LOG, self.note, self.dice)
        self.publications = Publications(orders.place, client, self.note, self.dice)
        self.accounts = client.table("accounts", key=str, val=int)
        self.counters = client.table("counters", key=str, val=int)
        self.delivered = client.table("delivered", key=str, val=int)
        self.writer: ap.WriteHandle[str, int] | None = None
        self.written: set[str] = set()
        """Keys in the log of which this process was told."""

    async def work(self) -> None:
        tasks: list[Awaitable[None]] = [
            self._again(),
            self._calls("write", 2),
            self._calls("count", 1),
            self._calls("transfer", 1),
            self._appends(),
            self._reads(),
            self._tags(),
            self._publishes(),
            self._puts(),
            self._forks(),
        ]
        if self.orders.subscribes:
            tasks.append(self._subscribes())
        await asyncio.gather(*tasks)

    async def until_told_to_stop(self) -> None:
        while not Path(self.orders.stop).exists():
            await asyncio.sleep(0.1)
        self.stopping.set()

    # --- calls with an id --------------------------------------------------------------------------

    async def _calls(self, kind: str, many: int) -> None:
        async def one(task: int) -> None:
            number = 0
            while not self.stopping.is_set():
                await self._pause()
                await self._once(kind, f"{self.orders.name}-{kind}{task}-{number}")
                number += 1

        await asyncio.gather(*map(one, range(many)))

    async def _again(self) -> None:
        for kind, op in self.orders.again:
            await self._once(kind, op)

    async def _once(self, kind: str, op: str) -> None:
        calls: dict[str, Callable[[str], Awaitable[Any]]] = {
            "write": self._write,
            "count": self._count,
            "transfer": self._transfer,
        }
        self.note("began", kind, op)
        while True:
            try:
                told = await calls[kind](op)
            except ap.Indeterminate as error:
                self.note("unknown", kind, op, _text(error))
            except ap.Error as error:
                self.note("failed", kind, op, _text(error))
            else:
                self.note("told", kind, op, "again" if isinstance(told, ap.Repeated) else "-")
                return
            await asyncio.sleep(AGAIN_S)

    async def _write(self, op: str) -> None:
        key = op + "x" * (len(op) % 3 * 150)  # some do not fit into the state
        if self.writer is None:
            self.writer = await self.client.writer("log", LOG)
        await self.writer.write([(key, 1)], once=op)
        self.written.add(key)

    async def _count(self, op: str) -> Any:
        return await self.counters.update(self.orders.place, lambda count: (count or 0) + 1, once=op)

    async def _transfer(self, op: str) -> Any:
        dice = random.Random(op)
        source, target = dice.sample(range(ACCOUNTS), 2)

        async def body(tx: ap.Transaction) -> None:
            balances = await tx.get_many(self.accounts, [f"a{source}", f"a{target}"])
            amount = min(dice.randrange(1, 10), balances[f"a{source}"])
            tx.put(self.accounts, f"a{source}", balances[f"a{source}"] - amount)
            tx.put(self.accounts, f"a{target}", balances[f"a{target}"] + amount)
            count = await tx.get(self.counters, "transfers") or 0
            tx.put(self.counters, "transfers", count + 1)

        return await self.client.transact(body, once=op)

    # --- calls without an id -----------------------------------------------------------------------

    async def _appends(self) -> None:
        """An append whose answer is lost is settled by its handle."""
        number = 0
        while not self.stopping.is_set():
            try:
                async with self.client.writer("log", LOG) as writer:
                    while not self.stopping.is_set():
                        await self._pause()
                        await self._append(writer, f"{self.orders.name}-append-{number}")
                        number += 1
            except ap.Error as error:  # of the opening; those of an append are noted there
                self.note("failed", "open", "-", _text(error))
                await asyncio.sleep(AGAIN_S)

    async def _append(self, writer: ap.WriteHandle[str, int], key: str) -> None:
        self.note("began", "append", key)
        while True:
            time: Any = writer.upper.time
            try:
                await writer.compare_and_append([(key, 1, time, 1)], time, time + 1)
            except ap.Indeterminate as error:
                self.note("unknown", "append", key, _text(error))
                if isinstance(await self._settled(writer), ap.Committed):
                    break
            except ap.UpperMismatch:
                pass  # the next try begins at the new one
            except ap.Error as error:
                self.note("failed", "append", key, _text(error))
                await asyncio.sleep(AGAIN_S)
            else:
                break
        self.note("told", "append", key)
        self.written.add(key)

    async def _settled(self, writer: ap.WriteHandle[str, int]) -> Any:
        while True:
            try:
                return await writer.settle()
            except ap.Indeterminate as error:
                self.note("failed", "settle", "-", _text(error))
                await asyncio.sleep(AGAIN_S)

    # --- a directory, and forks --------------------------------------------------------------------

    async def _puts(self) -> None:
        number = 0
        while not self.stopping.is_set():
            await self._pause()
            await self.forks.put(number)
            number += 1

    async def _forks(self) -> None:
        """Whatever became of what a child was to count: the call is made again with its id."""
        number = 0
        while not self.stopping.is_set():
            await self._pause(FORK_S)
            op = await self.forks.fork(number, self._counted_anew)
            number += 1
            if op is not None:
                await self._once("count", op)

    async def _counted_anew(self, op: str) -> None:
        """Count in a client of a child."""
        blob, consensus = self.orders.blob, self.orders.consensus
        async with ap.open(blob=blob, consensus=consensus, settings=SETTINGS, maintenance=False) as client:
            counters = client.table("counters", key=str, val=int)
            await counters.update(self.orders.place, lambda count: (count or 0) + 1, once=op)

    # --- reads -------------------------------------------------------------------------------------

    async def _reads(self) -> None:
        """What was told is there, once; the sum of all balances is always the same."""
        while not self.stopping.is_set():
            await self._pause(READ_S)
            told = set(self.written)
            try:
                await self._read(told)
            except ap.Error as error:
                self.note("failed", "read", "-", _text(error))

    async def _read(self, told: set[str]) -> None:
        async with self.client.reader("log", LOG) as reader, reader.snapshot() as snapshot:
            mine = pc.starts_with(pc.field("key"), pattern=self.orders.place)
            rows = await snapshot.rows(where=mine)
        if missing := told - {key for key, _, _ in rows}:
            raise Wrong(f"told and not there: {sorted(missing)[:5]}")
        if double := [row for row in rows if row[1:] != (1, 1)]:
            raise Wrong(f"there more than once: {double[:5]}")

        async def body(tx: ap.Transaction) -> int:
            return sum([val async for _, val in tx.items(self.accounts)])

        total = await self.client.transact(body)
        if total != ACCOUNTS * BALANCE:
            raise Wrong(f"the balances are {total} in all")
        self.note("told", "read", "-", str(len(rows)))

    async def _tags(self) -> None:
        """What is tagged stays as it was."""
        while not self.stopping.is_set():
            await self._pause(TAG_S)
            try:
                await self.tags.step()
            except ap.Error as error:
                self.note("failed", "tag", "-", _text(error))

    async def _publishes(self) -> None:
        """Engines read what is published, as it was."""
        while not self.stopping.is_set():
            await self._pause(PUBLISH_S)
            try:
                await self.publications.step()
            except ap.Error as error:
                self.note("failed", "publish", "-", _text(error))

    async def _subscribes(self) -> None:
        """Count what comes, in the commit that acknowledges it. The process after this one takes it over."""
        while not self.stopping.is_set():
            try:
                async with self.client.subscription("log", name="counting") as subscription:
                    while not self.stopping.is_set():
                        await self._step(subscription)
            except ap.Error as error:
                self.note("failed", "subscription", "-", _text(error))
                await asyncio.sleep(AGAIN_S)

    async def _step(self, subscription: Any) -> None:
        next_step, stop = (
            asyncio.ensure_future(anext(subscription)),
            asyncio.ensure_future(self.stopping.wait()),
        )
        try:
            await asyncio.wait([next_step, stop], return_when=asyncio.FIRST_COMPLETED)
            if not next_step.done():
                return
            step = next_step.result()
        finally:
            for future in (next_step, stop):
                future.cancel()
            await asyncio.gather(next_step, stop, return_exceptions=True)
        count = sum(update.diff for update in step.updates)

        async def body(tx: ap.Transaction) -> None:
            tx.put(self.delivered, "all", (await tx.get(self.delivered, "all") or 0) + count)

        await self.client.transact(body, acks=[(subscription, step)])

    async def _pause(self, pause_s: float | None = None) -> None:
        wait_s = self.dice.expovariate(1 / (pause_s or self.orders.pause_s))
        try:
            await asyncio.wait_for(self.stopping.wait(), wait_s)
        except TimeoutError:
            return


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:300]


async def opened(orders: Orders) -> ap.Client:
    """A client of the servers; again where these are away for longer than an opening waits."""
    settings = SETTINGS.model_copy(update={"retry_timeout_s": orders.retry_s})
    while True:
        try:
            return await ap.open(blob=orders.blob, consensus=orders.consensus, settings=settings)
        except ap.StorageUnavailable as error:
            if not error.retry:
                raise


async def main(orders: Orders) -> None:
    async with await opened(orders) as client, ap.open(orders.local) as local:
        worker = Worker(orders, client, local)
        worker.note("told", "open", "-")
        await asyncio.gather(worker.work(), worker.until_told_to_stop())
        worker.note("told", "close", "-")


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    given["again"] = tuple(map(tuple, given["again"]))
    asyncio.run(main(Orders(**given)))
