"""Transactions: what they read, write, return and raise; whole histories are strictly serializable."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.conftest import StoreUrls
from tests.support.shards import open_at
from tests.table.serializable import Op, check

JOURNAL: ap.Schema[str, int, int] = ap.Schema(str, int)


@pytest.fixture
async def two(location: StoreUrls) -> AsyncIterator[tuple[ap.Client, ap.Client]]:
    """Two clients of one location."""
    async with open_at(location) as one, open_at(location) as other:
        yield one, other


def table(client: ap.Client, name: str = "t") -> ap.Table[str, int]:
    return client.table(name, key=str, val=int)


# --- one transaction --------------------------------------------------------------------------------


async def test_it_sees_its_own_writes_and_moves_all_tables_at_one_time(
    two: tuple[ap.Client, ap.Client],
) -> None:
    one, other = two
    a, b, seen = table(one, "a"), table(one, "b"), []
    await a.put_many({"k1": 1, "k2": 2, "l": 3})
    async with one.writer("journal", JOURNAL, clock="wall") as journal:

        async def body(tx: ap.Transaction) -> str:
            seen.append(tx)
            tx.put(a, "k3", 30)
            tx.delete(a, "k1", "never")
            tx.put_many(b, {"x": 1, "y": 2})
            tx.append(journal, [("moved", 1)])
            assert await tx.get(a, "k1") is None
            assert await tx.get_many(a, ["k2", "k3", "none"]) == {"k2": 2, "k3": 30}
            await tx.insert(b, "z", 3)
            assert [entry async for entry in tx.items(a, prefix="k")] == [("k2", 2), ("k3", 30)]
            assert [entry async for entry in tx.items(b, "y")] == [("y", 2), ("z", 3)]
            return "done"

        assert await one.transact(body) == "done"
        time = seen[-1].time
    for name, contents in (("a", {"k2": 2, "k3": 30, "l": 3}), ("b", {"x": 1, "y": 2, "z": 3})):
        assert dict([entry async for entry in table(other, name).items(as_of=time)]) == contents
        assert await table(other, name).get("x", as_of=time - 1) is None
        assert (await other.upper(name)).time == time + 1
    async with other.reader("journal") as r, r.snapshot(time) as s:
        assert await s.rows() == [("moved", 1, 1)]
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        seen[-1].put(a, "k", 1)


async def test_tables_that_were_only_read_take_part(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: a cut by time over several tables is a prefix of the order of commits."""
    one, _ = two
    a, b, times = table(one, "a"), table(one, "b"), []
    await a.put("k", 1)
    await b.put("k", 1)

    async def body(tx: ap.Transaction) -> None:
        times.append(tx)
        tx.put(a, "k", (await tx.get(b, "k") or 0) + 1)

    await one.transact(body)
    assert (await one.upper("b")).time == times[0].time + 1


async def test_an_exception_leaves_nothing(two: tuple[ap.Client, ap.Client]) -> None:
    one, _ = two
    a = table(one, "a")
    await a.put("k", 1)
    upper = await one.upper("a")

    async def body(tx: ap.Transaction) -> None:
        tx.put(a, "k", 2)
        assert await tx.get(a, "k") == 2
        raise LookupError("the body's own")

    with pytest.raises(LookupError, match="the body's own"):
        await one.transact(body, once="failed")
    assert await a.get("k") == 1
    assert await one.upper("a") == upper
    assert await one.happened("failed") is None


async def test_a_body_that_rests_on_what_is_old_runs_again(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: its exception is given out only if what it read is so."""
    one, other = two
    mine, theirs = table(one), table(other)
    await mine.put("k", 1)
    runs = []

    async def body(tx: ap.Transaction) -> int | None:
        runs.append(await tx.get(mine, "k"))
        if len(runs) == 1:
            await theirs.put("k", 2)
        if runs[-1] == 1:
            raise ValueError("it was 1")
        return runs[-1]

    assert await one.transact(body) == 2
    assert runs == [1, 2]


async def test_tasks_of_a_body_may_run_again_with_it(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: one of them finds what is no longer so, within a group of tasks."""
    one, other = two
    mine, theirs, runs = table(one), table(other), []
    await mine.put_many({"a": 1, "b": 1})

    async def body(tx: ap.Transaction) -> int:
        runs.append(await tx.get(mine, "a"))
        if len(runs) == 1:
            await theirs.put_many({"a": 2, "b": 2})
            await mine.get("a")
        async with asyncio.TaskGroup() as group:
            found = group.create_task(tx.get(mine, "b"))
        tx.put(mine, "sum", runs[-1] + (found.result() or 0))
        return runs[-1]

    assert await one.transact(body) == 2
    assert runs == [1, 2]
    assert await mine.get("sum") == 4


async def test_a_conflict_names_what_changed(two: tuple[ap.Client, ap.Client]) -> None:
    one, other = two
    mine, theirs = table(one), table(other)
    await mine.put_many({"k": 1, "p1": 1})

    async def by_key(tx: ap.Transaction) -> None:
        before = await tx.get(mine, "k")
        await theirs.put("k", (before or 0) + 1)
        tx.put(mine, "k", 0)

    with pytest.raises(ap.Conflict) as conflict:
        await one.transact(by_key, max_attempts=2)
    assert conflict.value.keys == [("t", "k")]

    async def by_range(tx: ap.Transaction) -> None:
        count = len([entry async for entry in tx.items(mine, prefix="p")])
        await theirs.put(f"p{count + 1}", 1)
        tx.put(mine, "k", count)

    with pytest.raises(ap.Conflict) as conflict:
        await one.transact(by_range, max_attempts=1)
    assert conflict.value.keys == [("t", ap.ReadRange(None, None, "p"))]
    assert await mine.get("k") == 3


async def test_a_transaction_happens_once(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: whatever tables the repeat would touch, in another client, and also if nothing was written."""
    one, other = two
    a = table(one)

    def adding(client: ap.Client, name: str) -> Any:
        async def body(tx: ap.Transaction) -> int:
            of = table(client, name)
            tx.put(of, "n", (await tx.get(of, "n") or 0) + 1)
            return 7

        return body

    assert await one.transact(adding(one, "t"), once="r") == 7
    time = await one.happened("r")
    assert time is not None
    assert await one.transact(adding(one, "u"), once="r") == ap.Repeated(time)
    assert await other.transact(adding(other, "t"), once="r") == ap.Repeated(time)
    assert await other.happened("r") == time
    assert await a.get("n") == 1

    async def nothing(tx: ap.Transaction) -> int | None:
        return await tx.get(a, "n")

    assert await one.transact(nothing, once="read") == 1
    assert isinstance(await other.transact(nothing, once="read"), ap.Repeated)
    assert await one.transact(adding(one, "t"), txn=("app", 5)) == 7
    assert isinstance(await other.transact(adding(other, "t"), txn=("app", 4)), ap.Repeated)
    assert await a.get("n") == 2
    answers = await asyncio.gather(*(c.transact(adding(c, "t"), once="x") for c in (one, other) * 3))
    assert min(map(str, answers)) == "7"
    assert await a.get("n") == 3


async def test_what_a_transaction_refuses(two: tuple[ap.Client, ap.Client], mem: ap.Client) -> None:
    one, other = two
    a, foreign = table(one), table(mem)
    async with one.writer("logical", JOURNAL) as logical, other.writer("wall", JOURNAL, clock="wall") as wall:
        refused: list[tuple[Any, Any]] = [
            (lambda tx: tx.put(a, 3, 1), ap.InvalidUpdate),
            (lambda tx: tx.put(a, "k", "v"), ap.InvalidUpdate),
            (lambda tx: tx.put(foreign, "k", 1), ap.InvalidUsage),
            (lambda tx: tx.append(logical, [("k", 1)]), ap.InvalidUsage),
            (lambda tx: tx.append(wall, [("k", 1)]), ap.InvalidUsage),
            (lambda tx: tx.append(a, [("k", 1)]), TypeError),
            (lambda tx: tx.put("t", "k", 1), TypeError),
        ]
        for call, error in refused:

            async def body(tx: ap.Transaction, call: Any = call) -> None:
                call(tx)

            with pytest.raises(error):
                await one.transact(body)
    with pytest.raises(ap.InvalidUsage, match="INVALID_TXN"):
        await one.transact(lambda tx: asyncio.sleep(0), once="a", txn=("b", 1))
    with pytest.raises(ValueError, match="max_attempts"):
        await one.transact(lambda tx: asyncio.sleep(0), max_attempts=0)
    assert await a.count() == 0


async def test_a_body_that_waits_for_its_own_client_does_not_hang(mem: ap.Client) -> None:
    """Goal: after three conflicts it runs alone, and others of its client wait a second at most."""
    t, runs = table(mem), []
    await t.put("k", 0)

    async def body(tx: ap.Transaction) -> int:
        runs.append(await tx.get(t, "k") or 0)
        if len(runs) <= 5:
            await t.put("k", runs[-1] + 1)
        tx.put(t, "done", 1)
        return len(runs)

    assert await mem.transact(body) == 6


async def test_a_body_sees_no_half_of_another_transaction(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: reads of several tables are of one moment in each run, also in those that run again."""
    one, other = two
    await table(one, "a").put("k", 50)
    await table(one, "b").put("k", 50)
    sums, moving = [], True

    async def sum_up(tx: ap.Transaction) -> None:
        first = await tx.get(table(one, "a"), "k")
        await asyncio.sleep(0)
        sums.append((first or 0) + (await tx.get(table(one, "b"), "k") or 0))

    async def move(tx: ap.Transaction) -> None:
        for name, diff in (("a", -1), ("b", 1)):
            tx.put(table(other, name), "k", (await tx.get(table(other, name), "k") or 0) + diff)

    async def keep_moving() -> None:
        while moving:
            await other.transact(move)
            await asyncio.sleep(0.005)

    mover = asyncio.create_task(keep_moving())
    for _ in range(20):
        await one.transact(sum_up)
    moving = False
    await mover
    assert set(sums) == {100}


# --- histories --------------------------------------------------------------------------------------

TABLES, KEYS = ("a", "b"), "pqrs"
RATES = {Outcome.REFUSED: 0.03, Outcome.LOST: 0.05, Outcome.DROPPED: 0.03}


@dataclass
class Player:
    """One task that plays operations on its client, and notes what it saw."""

    client: ap.Client
    dice: random.Random
    ops: list[Op]
    number: int

    async def play(self, count: int) -> None:
        for turn in range(count):
            name = f"{self.number}.{turn}"
            began = time.monotonic()
            op = await self.dice.choice(
                [self.transaction, self.transaction, self.get, self.put, self.update]
            )(name)
            op.name, op.began, op.ended = name, began, time.monotonic()
            self.ops.append(op)

    def key(self) -> tuple[str, str]:
        return self.dice.choice(TABLES), self.dice.choice(KEYS)

    def table(self, name: str) -> ap.Table[str, str]:
        return self.client.table(name, key=str, val=str)

    async def get(self, name: str) -> Op:
        key = self.key()
        return Op(name, 0, 0, reads={key: await self.table(key[0]).get(key[1])})

    async def put(self, name: str) -> Op:
        key = self.key()
        at = await self.table(key[0]).put(key[1], name, once=name)
        return Op(name, 0, 0, writes={key: name}, time=at)

    async def update(self, name: str) -> Op:
        key, op = self.key(), Op(name, 0, 0)

        def change(old: str | None) -> str | None:
            op.reads, op.writes = {key: old}, {key: name}
            return name

        await self.table(key[0]).update(key[1], change, once=name)
        op.time = await self.client.happened(name, key[0])
        return op

    async def transaction(self, name: str) -> Op:
        ranged, wrote = self.dice.random() < 0.3, self.dice.random() < 0.7
        read = [self.key() for _ in range(self.dice.randrange(3))]
        written = [self.key() for _ in range(self.dice.randrange(1, 3))] if wrote else []
        within = self.dice.choice(TABLES)
        op, last = Op(name, 0, 0), list[ap.Transaction]()

        async def body(tx: ap.Transaction) -> None:
            last.append(tx)
            op.reads, op.ranges, op.writes = {}, [], {}
            for key in read:
                op.reads[key] = await tx.get(self.table(key[0]), key[1])
            if ranged:
                found = dict([entry async for entry in tx.items(self.table(within), "q", "s")])
                op.ranges.append((within, "q", "s", found))
            for key in written:
                deletes = self.dice.random() < 0.2
                op.writes[key] = None if deletes else name
                if deletes:
                    tx.delete(self.table(key[0]), key[1])
                else:
                    tx.put(self.table(key[0]), key[1], name)

        once = name if self.dice.random() < 0.5 else None
        await self.client.transact(body, once=once)
        op.time = last[-1].time if op.writes else None
        if once is not None and op.writes:
            assert await self.client.happened(once) == op.time
        return op


async def _history(location: StoreUrls, seed: int, clients: int, faulty: bool) -> list[Op]:
    dice, ops = random.Random(seed), list[Op]()
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(clients):
            blob, consensus = ap.open_blob(location.blob), ap.open_consensus(location.consensus)
            if faulty:
                faults = Faults(dice.randrange(2**32), RATES, latency_s=(0.0, 0.003))
                blob, consensus = FaultyBlob(blob, faults), FaultyConsensus(consensus, faults)
            stack.push_async_callback(blob.aclose)
            stack.push_async_callback(consensus.aclose)
            opening = ap.open(blob=blob, consensus=consensus, settings=ap.Settings(watch_timeout_s=0.05))
            opened.append(await stack.enter_async_context(opening))
        players = [
            Player(client, random.Random(dice.random()), ops, number)
            for number, client in enumerate(opened * 3)
        ]
        await asyncio.gather(*(player.play(6) for player in players))
    return ops


@pytest.mark.parametrize("seed", range(3))
async def test_histories_are_strictly_serializable(location: StoreUrls, seed: int) -> None:
    ops = await _history(location, seed, clients=2, faulty=False)
    assert len(ops) == 36
    assert check(ops) == []


@pytest.mark.parametrize("seed", range(6))
async def test_histories_under_faults_are_strictly_serializable(tmp_path: Any, seed: int) -> None:
    """Goal: requests fail, and answers are lost."""
    url = f"mem://transactions-{seed}-{random.random()}"
    assert check(await _history(StoreUrls(url, url), seed, clients=3, faulty=True)) == []


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1000, 1300))
async def test_many_histories_under_faults(seed: int) -> None:
    """Goal: as above, with more seeds."""
    url = f"mem://transactions-{seed}-{random.random()}"
    assert check(await _history(StoreUrls(url, url), seed, clients=3, faulty=True)) == []
