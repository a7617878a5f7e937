"""Transactions of one client read what those before them make, before it is durable; and so share commits."""

import asyncio
import uuid
from random import Random
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.frontier import successor
from aiopersist.table.commit.participant import TableParticipant
from aiopersist.table.handle import opened
from aiopersist.table.transaction.transact import QUIET_AFTER
from tests.conftest import StoreUrls
from tests.support.shards import open_at
from tests.table.kit import gated, table, versions

TASKS, EACH = 16, 4


async def participant(t: ap.Table[str, int]) -> TableParticipant:
    return (await opened(t)).participant


@pytest.mark.several_shards
async def test_transactions_that_want_the_same_keys_share_commits(location: StoreUrls) -> None:
    """Goal: far fewer commits than transactions, though each changes what the others read."""
    async with open_at(location) as client:
        a, b = table(client, "a"), table(client, "b")
        await a.put("k", 0)
        await b.put("k", 0)
        before = await versions(client, "a")

        async def transfer(tx: ap.Transaction) -> None:
            for each, diff in ((a, -1), (b, 1)):
                tx.put(each, "k", (await tx.get(each, "k") or 0) + diff)

        async def task() -> None:
            for _ in range(EACH):
                await client.transact(transfer)

        await asyncio.gather(*(task() for _ in range(TASKS)))
        assert (await a.get("k"), await b.get("k")) == (-TASKS * EACH, TASKS * EACH)
        assert await versions(client, "a") - before <= TASKS * EACH / 2


async def test_bodies_that_wait_share_a_commit_too() -> None:
    """Goal: bodies that wait come into each other's way, and then run one after the other. What they make is
    one commit all the same: none waits until the one before it is durable."""
    async with gated(f"mem://{uuid.uuid4().hex}") as (client, gate):
        t = table(client, "t")
        await t.put("k", 0)

        async def add(tx: ap.Transaction) -> None:
            val = await tx.get(t, "k")
            for _ in range(5):
                await asyncio.sleep(0)
            tx.put(t, "k", (val or 0) + 1)

        gate.hold("compare_and_set", "compare_and_set_many")
        before = await versions(client, "t")
        first = asyncio.create_task(t.put("k", 1))
        await gate.held.wait()
        others = [asyncio.create_task(client.transact(add)) for _ in range(TASKS)]
        group = client._services.tables.group
        while len(group._queue.waiting) < TASKS or group.speculation.val_of(
            await participant(t), '"k"'
        ) != str(TASKS + 1):
            await asyncio.sleep(0.001)
            group.speculation.refresh()
        gate.open()
        await asyncio.gather(first, *others)
        assert await t.get("k") == TASKS + 1
        assert await versions(client, "t") - before == 2


async def test_what_is_being_committed_is_read() -> None:
    """Goal: a body reads what is on its way, and what waits behind it; none of it runs twice."""
    async with gated(f"mem://{uuid.uuid4().hex}") as (client, gate):
        t, seen = table(client, "t"), list[int | None]()
        await t.put("k", 0)

        async def add(tx: ap.Transaction) -> None:
            val = await tx.get(t, "k")
            seen.append(val)
            tx.put(t, "k", (val or 0) + 1)

        gate.hold("compare_and_set", "compare_and_set_many")
        first = asyncio.create_task(client.transact(add))
        await gate.held.wait()
        others = [asyncio.create_task(client.transact(add)) for _ in range(3)]
        while len(seen) < 4:
            await asyncio.sleep(0)
        assert seen == [0, 1, 2, 3]
        assert not first.done()
        gate.open()
        await asyncio.gather(first, *others)
        assert (await t.get("k"), len(seen)) == (4, 4)


async def test_what_does_not_happen_is_forgotten() -> None:
    """Goal: an operation that waits is cancelled, after another one has read what it would write. That one
    runs again, without it."""
    async with gated(f"mem://{uuid.uuid4().hex}") as (client, gate):
        t, seen = table(client, "t"), list[dict[str, int]]()
        await t.put("k", 0)

        async def look(tx: ap.Transaction) -> None:
            seen.append(await tx.get_many(t, ["k", "l"]))
            tx.put(t, f"saw {seen[-1]}", 1)

        gate.hold("compare_and_set", "compare_and_set_many")
        first = asyncio.create_task(t.put("k", 1))
        await gate.held.wait()
        waits = asyncio.create_task(t.put("l", 2))
        await asyncio.sleep(0)
        last = asyncio.create_task(client.transact(look))
        while not seen:
            await asyncio.sleep(0)
        waits.cancel()
        gate.open()
        await asyncio.gather(first, last)
        assert seen == [{"k": 1, "l": 2}, {"k": 1}]
        assert dict([entry async for entry in t.items()]) == {"k": 1, "saw {'k': 1}": 1}


async def test_ranges_and_what_is_undecided_are_of_one_moment() -> None:
    """Goal: a range shows what is decided; a body that read more before runs again."""
    async with gated(f"mem://{uuid.uuid4().hex}") as (client, gate):
        t, seen = table(client, "t"), list[tuple[int | None, Any]]()
        await t.put_many({"k": 0, "l": 0})

        async def both(tx: ap.Transaction) -> None:
            one = await tx.get(t, "k")
            seen.append((one, None))
            seen[-1] = one, [val async for _, val in tx.items(t)]

        gate.hold("compare_and_set", "compare_and_set_many")
        first = asyncio.create_task(t.put_many({"k": 1, "l": 1}))
        await gate.held.wait()
        last = asyncio.create_task(client.transact(both))
        while not seen:
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(first, last)
        assert seen[0] == (1, None)
        assert seen[-1] == (1, [1, 1])
        assert all(vals in (None, [one, one]) for one, vals in seen)


async def test_what_is_undecided_is_of_one_moment_with_what_is_read() -> None:
    """Goal: what is on its way rests on a table that another client has changed since. It is not read
    together with what that client wrote then, though the body reads another table."""
    url, seen = f"mem://{uuid.uuid4().hex}", list[tuple[int | None, int | None]]()
    async with gated(url, watch_timeout_s=50.0) as (client, gate), ap.open(url) as other:
        for name in ("a", "b", "d"):
            await table(client, name).put("k", 0)

        async def set_unless(tx: ap.Transaction, at: ap.Client, unless: str, *names: str) -> None:
            if not await tx.get(table(at, unless), "k"):
                for name in names:
                    tx.put(table(at, name), "k", 1)

        async def look(tx: ap.Transaction) -> None:
            b, d = table(client, "b"), table(client, "d")
            first_read = await tx.get(b, "k")
            if not seen:
                await other.transact(lambda tx: set_unless(tx, other, "b", "a", "d"))
                assert await d.get("k") == 1
            second_read = await tx.get(d, "k")
            seen.append((first_read, second_read))

        gate.hold("compare_and_set", "compare_and_set_many", "watch")
        first = asyncio.create_task(client.transact(lambda tx: set_unless(tx, client, "a", "b")))
        await gate.held.wait()
        last = asyncio.create_task(client.transact(look))
        while not seen:
            await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(first, last)
    assert set(seen) == {(0, 1)}


async def test_ranges_come_through_beside_writers_of_the_same_client(mem: ap.Client) -> None:
    """Goal: a body that reads a range which this client changes all the time ends after a few attempts."""
    t, attempts, stop = table(mem, "t"), list[int](), asyncio.Event()

    async def write(number: int) -> None:
        while not stop.is_set():
            await t.update(f"k{number}", lambda old: (old or 0) + 1)

    async def total(tx: ap.Transaction) -> int:
        vals = [val async for _, val in tx.items(t, prefix="k")]
        for _ in range(20):
            await asyncio.sleep(0)
        attempts.append(sum(vals))
        tx.put(t, "total", sum(vals))
        return sum(vals)

    writers = [asyncio.create_task(write(number)) for number in range(8)]
    assert await mem.transact(total) == await t.get("total")
    stop.set()
    await asyncio.gather(*writers)
    assert len(attempts) <= QUIET_AFTER


async def test_what_waits_behind_a_large_put_is_not_mixed_with_it(mem: ap.Client) -> None:
    """Goal: a commit that takes its turn outside of a group changes what waiting operations have read: what
    they would make of the old vals is not read together with the new ones."""
    t, group = table(mem, "t"), mem._services.tables.group
    await t.put_many({"k": 0, "l": 0})
    at = await participant(t)

    async def copy(tx: ap.Transaction) -> None:
        tx.put(t, "l", (await tx.get(t, "k") or 0) + 1)

    async with group.turn:
        waits = asyncio.create_task(mem.transact(copy))
        while not group._queue.waiting:
            await asyncio.sleep(0)
        group.speculation.refresh()
        assert [group.speculation.val_of(at, key) for key in ('"k"', '"l"')] == ["0", "1"]
        upper = at.view.upper.time
        assert isinstance(upper, int)
        async with at.view.own_commit(at.view.upper, successor(upper), {'"k"': "100"}) as take:
            take()
        group.speculation.refresh()
        assert [group.speculation.val_of(at, key) for key in ('"k"', '"l"')] == ["100", "0"]
        waits.cancel()
        await asyncio.wait([waits])


class Bank:
    """Transfers within three tables by two clients; some fail, some are cancelled. Each attempt of each body
    reads the sum."""

    def __init__(self, clients: list[ap.Client], seed: int) -> None:
        self.clients, self.random = clients, Random(seed)
        self.tables = {client: [table(client, name) for name in "abc"] for client in clients}
        self.sums = list[int]()

    async def _pause(self) -> None:
        for _ in range(self.random.choice([0, 0, 1, 3, 10])):
            await asyncio.sleep(0)

    async def move(self, client: ap.Client) -> None:
        source, target = self.random.sample(range(3), 2)
        amount, fails = self.random.randrange(9), self.random.random() < 0.1

        async def body(tx: ap.Transaction) -> None:
            vals = list[int]()
            for each in self.random.sample(range(3), 3):
                vals.append(await tx.get(self.tables[client][each], "k") or 0)
                if each in (source, target):
                    diff = amount if each == target else -amount
                    tx.put(self.tables[client][each], "k", vals[-1] + diff)
                await self._pause()
            self.sums.append(sum(vals))
            if fails:
                raise LookupError(sum(vals))

        call = asyncio.create_task(client.transact(body))
        if self.random.random() < 0.1:
            await self._pause()
            call.cancel()
        await asyncio.wait([call])
        if not call.cancelled() and (error := call.exception()) is not None:
            assert isinstance(error, LookupError), error

    async def play(self, moves: int) -> None:
        async def task(client: ap.Client) -> None:
            for _ in range(moves):
                await self._pause()
                await self.move(client)

        await asyncio.gather(*(task(client) for client in self.clients for _ in range(4)))


async def one_bank(seed: int) -> None:
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url) as one, ap.open(url) as other:
        bank = Bank([one, other], seed)
        for name in "abc":
            await table(one, name).put("k", 100)
        await bank.play(6)
        assert set(bank.sums) == {300}
        assert sum([await table(other, name).get("k") or 0 for name in "abc"]) == 300


async def test_no_attempt_sees_what_never_was() -> None:
    """Goal: also attempts that read what then does not happen, or happens after a transaction of another
    client, see the sum of all accounts."""
    for seed in range(8):
        await one_bank(seed)


async def test_views_of_different_moments_that_look_alike_show_no_moment() -> None:
    """Goal: one view has taken two transactions of another client together, the second of which undoes the
    first one, and the other view only the first: they show no moment together."""
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url) as one, ap.open(url) as other:
        a, b = table(one, "a"), table(one, "b")
        far = [table(other, name) for name in "ab"]
        await a.put("k", 100)
        await b.put("k", 100)
        for t in (a, b):
            following = (await opened(t))._following
            assert following is not None
            following.cancel()  # so that views catch up here alone

        async def move(amount: int) -> None:
            async def body(tx: ap.Transaction) -> None:
                for each, diff in zip(far, (amount, -amount), strict=True):
                    tx.put(each, "k", (await tx.get(each, "k") or 0) + diff)

            await other.transact(body)

        async def caught_up(t: ap.Table[str, int]) -> TableParticipant:
            found = await participant(t)
            await found.look()
            await found.view.catch_up()
            return found

        await move(1)
        behind = await caught_up(b)
        await move(-1)
        ahead = await caught_up(a)
        assert [at.view.contents.val_of('"k"') for at in (ahead, behind)] == ["100", "99"]
        consistent_read = one._services.transactions._consistent_read
        assert not consistent_read.holds([ahead, behind])
        assert consistent_read.holds([ahead, await caught_up(b)])
