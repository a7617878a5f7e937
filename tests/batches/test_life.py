"""Goal: batches in any order, with any fault, at any moment: each acknowledged append is in the shard
once."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryConsensus
from aiopersist.testing.faults import FaultyConsensus, Outcome
from tests.batches.outcomes_kit import CONSUMED, rig
from tests.support.cancelling import cancelled_after
from tests.support.internals import staged_of
from tests.support.rigs import Rig
from tests.support.schemas import Row, Writer
from tests.support.shards import becomes, refused


class Stress:
    """Clients of one place, each with its own faults; `model` holds what was acknowledged or settled as
    committed. Any number of workers."""

    def __init__(self, seed: int, r: Rig) -> None:
        self.chance = random.Random(seed)
        self.r = r
        self.model: list[Row] = []
        self.number = 0
        self.transactions: list[tuple[str, int]] = []
        """Those that are surely recorded."""
        self.posted: list[tuple[bytes, list[Row]]] = []
        """Handed over, and not restored yet; some of them twice."""
        self.done: Counter[str] = Counter()

    async def step(self, w: Writer) -> None:
        """One operation of one worker."""
        kind = self.chance.choice(
            ["stage", "stage", "stage", "post", "receive", "receive", "direct", "discard"]
        )
        self.done[kind] += 1
        upper: Any = (await w.fetch_recent_upper()).time
        if kind == "direct":
            rows = self.rows(upper)
            await self.appended(w, [], rows, w.compare_and_append(rows, upper, upper + 1))
        elif kind == "receive" and self.posted:
            data, rows = self.posted.pop(self.chance.randrange(len(self.posted)))
            try:
                batch = await w.batch_from_transmittable(data)
            except ap.BatchExpired:
                self.done["expired"] += 1
                return
            staged_of(batch).consumed_elsewhere()
            await self.used(w, batch, rows)
        else:
            rows = self.rows(upper)
            batch = await self.built(w, rows, upper)
            staged_of(batch).consumed_elsewhere()  # it may be dropped without an owner
            if kind == "post":
                data = batch.to_transmittable()
                self.posted += [(data, rows)] * self.chance.choice([1, 2, 3])
            elif kind == "discard":
                await batch.delete()
            else:
                await self.used(w, batch, rows)

    def rows(self, time: int) -> list[Row]:
        self.number += 1
        return [(f"k{self.number}", n, time, 1) for n in range(self.chance.choice([1, 1, 3]))]

    async def built(self, w: Writer, rows: list[Row], lower: int) -> ap.Batch:
        if self.chance.random() < 0.5:
            return await w.batch(rows, lower, lower + 1)
        async with w.builder(lower) as builder:
            for row in rows:
                await builder.add(*row)
            return await builder.finish(lower + 1)

    async def used(self, w: Writer, batch: ap.Batch, rows: list[Row]) -> None:
        """Append it at the upper, rewritten; or, sometimes, delete it."""
        if self.chance.random() < 0.15:
            try:
                await batch.delete()
            except ap.AlreadyAppended:
                self.done["spent"] += 1
            return
        for _ in range(5):
            upper: Any = (await w.fetch_recent_upper()).time
            batch.rewrite_ts(upper, upper + 1)
            rows = [(key, val, upper, diff) for key, val, _, diff in rows]
            txn, repeats = self.transaction()
            call = w.compare_and_append_batch([batch], upper, upper + 1, txn=txn)
            done = await self.appended(w, [] if repeats else [batch], [] if repeats else rows, call)
            if done is not None:
                if txn and done and not repeats:
                    self.transactions.append(txn)
                break
        if repeats:
            self.done["repeats"] += 1
            try:
                await batch.delete()  # it may be free still, if the call was cancelled or mismatched
            except (ap.InvalidUsage, ap.AlreadyAppended):
                pass
            return
        if staged_of(batch).use.value == "free":
            await self.free(batch)

    def transaction(self) -> tuple[tuple[str, int] | None, bool]:
        """One for an append, if any; and whether it is a repeat, which writes nothing."""
        if self.transactions and self.chance.random() < 0.1:
            return self.chance.choice(self.transactions), True
        self.number += 1
        return (f"app{self.number}", 1) if self.chance.random() < 0.2 else None, False

    async def appended(
        self, w: Writer, batches: list[ap.Batch], rows: list[Row], call: Awaitable[Any]
    ) -> bool | None:
        """Whether it was committed, and is in the model then; `None` if it may be tried again."""
        steps = self.chance.choice([10**4, self.chance.randrange(1, 80)])
        try:
            cancelled = await cancelled_after(call, steps)
        except ap.UpperMismatch:
            return None if batches else False
        except ap.AlreadyAppended:
            self.done["spent"] += 1
            return False
        except ap.BatchExpired:
            self.done["expired"] += 1
            return False
        if cancelled:
            self.done["cancelled"] += 1
            if not isinstance(await w.settle(), ap.Committed):
                return None if batches else False
        for batch in batches:
            assert await refused(batch.delete()) == CONSUMED
        self.done["committed"] += len(batches)
        self.model += rows
        return True

    async def free(self, batch: ap.Batch) -> None:
        try:
            await batch.delete()
        except ap.AlreadyAppended:
            self.done["spent"] += 1


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_life(seed: int) -> None:
    """Goal: some hundred operations of several clients under faults and cancellations: the shard holds
    what was acknowledged or settled as committed, each once; every blob that is named is there, and no
    other but those of batches that were handed over and never restored."""
    single = random.Random(seed).choice([0, 200])
    async with rig(inline_writes_single_max_bytes=single, blob_target_size=60) as r:
        stress = Stress(seed, r)
        r.faults._random.seed(seed)
        place = r.blob._name
        clients = [r.client]
        for _ in range(2):
            opening = ap.open(
                blob=r.blob,
                consensus=FaultyConsensus(MemoryConsensus(place), r.faults),
                settings=ap.Settings(retry_timeout_s=60.0, inline_writes_single_max_bytes=single),
                maintenance=False,
            )
            clients.append(await r.stack.enter_async_context(opening))
        writers = [await r.writer(client) for client in (*clients, clients[0])]
        r.faults.latency_s = (0.0, 0.0005)
        r.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.03)

        async def work(w: Writer) -> None:
            for _ in range(20):
                await stress.step(w)

        async with asyncio.timeout(40):
            await asyncio.gather(*map(work, writers))
        r.faults.heal()
        r.faults.latency_s = (0.0, 0.0)
        await r.faults.land()
        for data, _ in stress.posted:
            batch = await writers[0].batch_from_transmittable(data)
            staged_of(batch).consumed_elsewhere()
            await stress.free(batch)
        await asyncio.sleep(0.02)
        assert stress.done["cancelled"] > 0  # how many depends on the pace of the machine
        assert await r.history() == sorted(stress.model)
        await becomes(r.parts, await r.named())
