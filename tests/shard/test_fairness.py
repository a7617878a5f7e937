"""Goal: every writer comes through beside one that is 25 times nearer to the store and never pauses, within a
bound that `docs/limits.md` names. In virtual time, so the pace of the machine decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import aiopersist as ap
from aiopersist.client.open import open as open_client
from aiopersist.shard.catalog import IndexedId, find
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.writing import Occupy
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.wrapper import Request, T, WrappedBlob, WrappedConsensus
from aiopersist.testing.simulation import CALM, World, simulate

NEAR_S, FAR_S = 0.001, 0.025  # for a round trip
ROUND_TRIPS, MORE = 20, 10  # of the one that is far: as `docs/limits.md` says
CALLS = 2
SECONDS = 1.5


class Distant(WrappedConsensus):
    """Each request takes a round trip, half of it on the way there."""

    def __init__(self, inner: Consensus, round_trip_s: float) -> None:
        super().__init__(inner)
        self.round_trip_s = round_trip_s
        self.asked: list[str] = []

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        if op in ("now", "clock", "watch"):  # computed here, or no request
            return request()

        async def on_its_way() -> T:
            self.asked.append(op)
            await asyncio.sleep(self.round_trip_s / 2)
            answer = await request()
            await asyncio.sleep(self.round_trip_s / 2)
            return answer

        return on_its_way()

    async def aclose(self) -> None:
        pass


class Kept(WrappedBlob):
    async def aclose(self) -> None:
        pass


@asynccontextmanager
async def client_at(world: World, round_trip_s: float) -> AsyncIterator[ap.Client]:
    consensus = Distant(world.consensus, round_trip_s)
    opening = open_client(
        blob=Kept(world.blob), consensus=consensus, maintenance=False, runtime=world.runtime
    )
    async with opening as client:
        yield client


def table(client: ap.Client, name: str = "t") -> ap.Table[str, int]:
    return client.table(name, key=str, val=int)


# What the one does that is far: `begin(client)` gives a call to repeat.
Call = Callable[[int], Awaitable[object]]
Begin = Callable[[ap.Client], Awaitable[Call]]


async def put(client: ap.Client) -> Call:
    return lambda n: table(client).put("n", n)


async def insert(client: ap.Client) -> Call:
    return lambda n: table(client).insert(f"far {n}", n)


async def update(client: ap.Client) -> Call:
    """Of a key that the other one changes all the time."""
    return lambda n: table(client).update("n", lambda old: (old or 0) + 1)


async def delete(client: ap.Client) -> Call:
    return lambda n: table(client).delete("n")


async def put_many(client: ap.Client) -> Call:
    return lambda n: table(client).put_many([(f"far {i}", n) for i in range(100)])


async def large_put_many(client: ap.Client) -> Call:
    return lambda n: table(client).put_many((f"far {i}", n) for i in range(100))


async def transact(client: ap.Client) -> Call:
    far, other = table(client), table(client, "other")

    async def body(tx: ap.Transaction) -> None:
        tx.put(other, "sum", (await tx.get(far, "far") or 0) + (await tx.get(other, "sum") or 0))
        tx.put(far, "far", 1)

    return lambda n: client.transact(body)


async def transact_once(client: ap.Client) -> Call:
    far = table(client)

    async def body(tx: ap.Transaction) -> None:
        tx.put(far, "far", 1)

    return lambda n: client.transact(body, once=f"once {n}")


async def transact_on_what_the_other_changes(client: ap.Client) -> Call:
    far = table(client)

    async def body(tx: ap.Transaction) -> None:
        tx.put(far, "far", await tx.get(far, "n") or 0)

    return lambda n: client.transact(body)


async def transact_that_reads(client: ap.Client) -> Call:
    far = table(client)

    async def body(tx: ap.Transaction) -> tuple[int | None, int | None]:
        return await tx.get(far, "n"), await tx.get(far, "far")

    return lambda n: client.transact(body)


async def write(client: ap.Client) -> Call:
    writer = await client.writer("s", ap.Schema(str, int), clock="wall")
    return lambda n: writer.write([("far", n)])


async def write_once(client: ap.Client) -> Call:
    writer = await client.writer("s", ap.Schema(str, int), clock="wall")
    return lambda n: writer.write([("far", n)], once=f"once {n}")


async def compare_and_append(client: ap.Client) -> Call:
    """In a loop, as users write it."""
    writer = await client.writer("s", ap.Schema(str, int), clock="wall")

    async def until_it_is_in(n: int) -> None:
        while True:
            upper = (await writer.fetch_recent_upper()).time
            try:
                return await writer.compare_and_append([("far", n, upper, 1)], upper, upper + 1)
            except ap.UpperMismatch:
                continue

    return until_it_is_in


async def append_what_was_read(client: ap.Client) -> Call:
    """As a job that replaces rows: each attempt holds what it reads, which takes commits, too."""
    writer = await client.writer("s", ap.Schema(str, int), clock="wall")
    await writer.write([("far", 0)])

    async def until_it_is_in(n: int) -> None:
        while True:
            async with client.reader("s") as reader, await reader.snapshot() as snapshot:
                upper = snapshot.as_of + 1
                assert [update async for update in snapshot]
            try:
                return await writer.compare_and_append([("far", n, upper, 1)], upper, upper + 1)
            except ap.UpperMismatch:
                continue

    return until_it_is_in


async def index(client: ap.Client) -> Call:
    ix = await client.indexed("ix", background=False)
    stream = await ix.register("s", str, int)
    return lambda n: ix.write([(stream, [("far", n, n, 1)])])


async def beat(client: ap.Client) -> Call:
    """Commits to the shard of an `Indexed`, which one client writes: heartbeats."""
    found = await find(client._stack, "ix", IndexedId)
    assert found is not None
    register = Shard(client._stack, found).register
    await register.refresh()
    return lambda n: commit(register, Occupy(""))


async def subscribe(client: ap.Client) -> Call:
    async def opened(n: int) -> None:
        async with table(client).subscription(f"far {n}"):
            pass

    return opened


async def acknowledge(client: ap.Client) -> Call:
    subscription = await table(client).subscription("far")

    async def acknowledged(n: int) -> None:
        await subscription.ack(await anext(subscription), durable=True)

    return acknowledged


async def read(client: ap.Client) -> Call:
    async def opened(n: int) -> None:
        async with client.reader("t") as reader, await reader.snapshot():
            pass

    return opened


async def hold(client: ap.Client) -> Call:
    handle = await client.critical_since("t", "far")

    async def moved(n: int) -> None:
        await handle.compare_and_downgrade_since(n, n + 1, handle.since)

    return moved


async def retain(client: ap.Client) -> Call:
    return lambda n: client.admin.retain("t", 10**9 + n)


async def maintain(client: ap.Client) -> Call:
    return lambda n: client.admin.force_gc("t")


COMMITS: dict[Begin, int] = {
    put: 1,
    insert: 1,
    update: 1,
    delete: 1,
    put_many: 1,
    large_put_many: 1,
    transact: 1,
    transact_once: 2,
    transact_on_what_the_other_changes: 1,
    transact_that_reads: 3,
    write: 1,
    write_once: 1,
    compare_and_append: 1,
    append_what_was_read: 4,
    index: 1,
    subscribe: 3,
    acknowledge: 1,
    read: 2,
    hold: 1,
    retain: 1,
    maintain: 2,
}
"""How many of them a call makes, or how often it tries in vain, which takes as long."""
NEAR: dict[Begin, Begin] = {
    write: write,
    write_once: write,
    compare_and_append: write,
    append_what_was_read: write,
    index: beat,
}
"""What the other one does meanwhile, if it is not `put`."""


@asynccontextmanager
async def busy(call: Call) -> AsyncIterator[list[int]]:
    """It is repeated without a pause; how often it was."""
    done, is_over = [0], False

    async def repeated() -> None:
        n = 0
        while not is_over:
            await call(n := n + 1)
            done[0] += 1

    running = asyncio.ensure_future(repeated())
    try:
        yield done
    finally:
        is_over = True
        await running


async def took_s(world: World, call: Awaitable[object]) -> float:
    began = world.now_s
    async with asyncio.timeout(10 * ROUND_TRIPS * FAR_S):
        await call
    return world.now_s - began


@pytest.mark.parametrize("begin", COMMITS, ids=lambda begin: begin.__name__)
def test_who_is_far_comes_through(begin: Begin) -> None:
    took: list[float] = []

    async def play(world: World) -> None:
        async with client_at(world, NEAR_S) as near, client_at(world, FAR_S) as far:
            await table(near).put("far", 0)
            call = await begin(far)
            await call(0)
            async with busy(await NEAR.get(begin, put)(near)) as done:
                took.extend([await took_s(world, call(n)) for n in range(1, CALLS + 1)])
                assert done[0] * FAR_S > sum(took), "it is no nearer, or does nothing"

    simulate(play, 1, CALM)
    assert max(took) <= COMMITS[begin] * ROUND_TRIPS * FAR_S


@pytest.mark.parametrize(
    "round_trips_s",
    [[NEAR_S] * 4 + [FAR_S], [NEAR_S] + [FAR_S] * 4, [0.001, 0.002, 0.005, 0.012, 0.025]],
    ids=["four near", "four far", "all distances"],
)
def test_each_of_several_comes_through(round_trips_s: list[float]) -> None:
    """Goal: also beside others that wish to go first, and those that are near have their turn, too."""
    longest = dict.fromkeys(range(len(round_trips_s)), 0.0)

    async def play(world: World) -> None:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(client_at(world, s)) for s in round_trips_s]
            for client in clients:
                await table(client).put("k", 0)
            ends = world.now_s + SECONDS

            async def puts(i: int) -> None:
                while world.now_s < ends:
                    longest[i] = max(longest[i], await took_s(world, table(clients[i]).put(f"k{i}", 0)))

            await asyncio.gather(*map(puts, longest))

    simulate(play, 1, CALM)
    bound = ROUND_TRIPS + MORE * (len(round_trips_s) - 1)
    assert max(longest.values()) <= bound * max(round_trips_s)


def _lost(client: ap.Client) -> int:
    return client.metrics().mismatches


@pytest.mark.parametrize("clients", [2, 4])
def test_who_is_busy_goes_in_turn(clients: int) -> None:
    """Goal: clients that are as near and never pause take turns. They lose few races, so together they commit
    about as much as one, and each about as much as the others."""
    done, lost = [0] * clients, 0

    async def play(world: World) -> None:
        nonlocal lost
        async with AsyncExitStack() as stack:
            busy = [await stack.enter_async_context(client_at(world, NEAR_S)) for _ in done]
            for client in busy:
                await table(client).put("k", 0)
            before, ends = [_lost(client) for client in busy], world.now_s + SECONDS

            async def puts(i: int) -> None:
                while world.now_s < ends:
                    await table(busy[i]).put("k", done[i])
                    done[i] += 1

            await asyncio.gather(*map(puts, range(clients)))
            lost = sum(_lost(client) for client in busy) - sum(before)

    simulate(play, 1, CALM)
    assert sum(done) > 0.6 * SECONDS / NEAR_S
    assert lost < 0.03 * sum(done)
    assert min(done) > 0.5 * max(done)


def test_who_meets_nobody_is_asked_for_no_request_and_no_pause() -> None:
    asked: list[str] = []

    async def play(world: World) -> None:
        async with client_at(world, FAR_S) as far:
            await table(far).put("k", 0)
            distant, before = far._stack.consensus, world.now_s
            while not isinstance(distant, Distant):
                assert isinstance(distant, WrappedConsensus)
                distant = distant.inner
            distant.asked.clear()
            for n in range(10):
                await table(far).put("k", n + 1)
            assert world.now_s - before <= 12 * FAR_S
            asked.extend(distant.asked)

    simulate(play, 1, CALM)
    assert asked.count("compare_and_set") == 10
    assert "wish" not in asked
