"""Many appends at once; see `test_append_many.py`."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.register import Register
from aiopersist.testing.faults import Outcome
from tests.support.cancelling import cancelled_after
from tests.support.internals import shard_of
from tests.support.rigs import sums
from tests.support.schemas import SCHEMA, Writer
from tests.support.shards import becomes
from tests.write.append_many_kit import NAMES, contents, rig, rows, writers


async def transfer(client: ap.Client, ws: Sequence[Writer], key: str) -> None:
    """Append to all at their uppers, as often as it takes."""
    while True:
        appends = []
        for w in ws:
            t: Any = w.upper.time
            appends.append(ap.Append(w, rows(key, t), t, t + 1))
        try:
            return await client.compare_and_append_many(appends)
        except ap.UpperMismatch:
            continue


@pytest.mark.parametrize("shared", [True, False], ids=["shared_handles", "own_handles"])
async def test_overlapping_appends_do_not_block_each_other(shared: bool) -> None:
    """Goal: no order of shards leads to a deadlock, nor to a wait for a turn that only time ends."""
    async with rig() as r:
        r.faults.latency_s = (0.001, 0.002)
        times = 3 if shared else 1
        common = dict(zip(NAMES, await writers(r, NAMES), strict=True))
        orders = [*itertools.permutations(NAMES, 2), tuple(NAMES), tuple(reversed(NAMES))]

        async def work(number: int, order: Sequence[str]) -> None:
            ws = [common[name] for name in order] if shared else await writers(r, order)
            for n in range(times):
                await transfer(r.client, ws, f"{number}-{n}")

        async with asyncio.timeout(50):
            await asyncio.gather(*(work(number, order) for number, order in enumerate(orders)))
        found = await contents(r, NAMES)
        for name, one in zip(NAMES, found, strict=True):
            expected = {
                f"{i}-{n}": 1 for i, order in enumerate(orders) if name in order for n in range(times)
            }
            assert one == expected


async def test_opposite_orders_take_turns_without_waiting_for_a_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Goal: turns are taken in one order by all, so two calls that name the shards in opposite orders do
    not hold each other up."""
    taken: list[bool] = []
    take_turn = Register.take_turn

    async def watched(self: Register) -> bool:
        taken.append(await take_turn(self))
        return taken[-1]

    monkeypatch.setattr(Register, "take_turn", watched)
    monkeypatch.setattr("aiopersist.shard.register.TURN_S", 1000.0)  # a wait that only time ends has no end
    async with rig() as r:
        r.faults.latency_s = (0.001, 0.001)
        forth, back = await writers(r, ["a", "b"]), await writers(r, ["b", "a"])

        async def beat(ws: Sequence[Writer]) -> None:
            for _ in range(5):
                await r.client.compare_and_append_many([ap.Append(w, [], 0, 0) for w in ws])

        async with asyncio.timeout(50):
            await asyncio.gather(beat(forth), beat(back))
        assert all(taken)


async def test_with_single_appends_of_the_same_writers() -> None:
    """Goal: one handle serves several kinds of appends at once."""
    async with rig() as r:
        r.faults.latency_s = (0.0, 0.001)
        a, b = await writers(r)

        async def writes(w: Writer, name: str) -> None:
            for n in range(15):
                await w.write([(f"{name}{n}", 1)])

        async def transfers() -> None:
            for n in range(15):
                await transfer(r.client, [a, b] if n % 2 else [b, a], f"both{n}")

        async with asyncio.timeout(50):
            await asyncio.gather(writes(a, "a"), writes(b, "b"), writes(a, "x"), transfers())
        both = {f"both{n}": 1 for n in range(15)}
        found = await contents(r)
        assert found[0] == both | {f"{name}{n}": 1 for name in "ax" for n in range(15)}
        assert found[1] == both | {f"b{n}": 1 for n in range(15)}


@pytest.mark.several_shards
async def test_several_clients_on_every_store(location: Any) -> None:
    """Goal: appends of several clients to the same shards: each is in all or in none, whichever wins."""
    blob, consensus = location
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(ap.open(blob=blob, consensus=consensus)) for _ in range(3)]

        async def work(number: int) -> None:
            ws = [await stack.enter_async_context(clients[number].writer(name, SCHEMA)) for name in NAMES]
            for n in range(4):
                await transfer(clients[number], random.Random(n).sample(ws, 3), f"{number}-{n}")

        async with asyncio.timeout(50):
            await asyncio.gather(*map(work, range(3)))
        expected = {f"{number}-{n}": 1 for number in range(3) for n in range(4)}
        for name in NAMES:
            assert await sums(clients[0], name) == expected


@pytest.mark.parametrize("seed", range(6))
async def test_two_shards_that_are_written_together_stay_alike(seed: int) -> None:
    """Goal: under faults, cancellations and rivals, two shards that are only ever written together hold the
    same, and what was acknowledged or settled as committed."""
    chance = random.Random(seed)
    async with rig(inline_writes_single_max_bytes=chance.choice([0, 16384])) as r:
        r.faults._random.seed(seed)
        committed: set[str] = set()

        async def work(number: int) -> None:
            ws = await writers(r, ["a", "b"] if number % 2 else ["b", "a"])
            for n in range(12):
                key = f"{number}-{n}"
                uppers = [await w.fetch_recent_upper() for w in ws]
                staged: Any = [rows(key, u.time) for u in uppers if isinstance(u.time, int)]
                batches = []
                if chance.random() < 0.5:
                    batches = [await ws[0].batch(staged[0], uppers[0], staged[0][0][2] + 1)]
                    staged[0] = batches
                ends = [u.time + 1 for u in uppers if isinstance(u.time, int)]
                appends = [ap.Append(*one) for one in zip(ws, staged, uppers, ends, strict=True)]
                try:
                    done = not await cancelled_after(
                        r.client.compare_and_append_many(appends),
                        chance.choice([10**4, chance.randrange(1, 150)]),
                    )
                except ap.UpperMismatch:
                    done = False
                else:
                    if not done:
                        answers = [await w.settle() for w in chance.sample(ws, 2)]
                        assert type(answers[0]) is type(answers[1])
                        done = isinstance(answers[0], ap.Committed)
                if done:
                    committed.add(key)
                else:
                    for batch in batches:
                        await batch.delete()

        r.faults.latency_s = (0.0, 0.001)
        r.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.05)
        await asyncio.gather(*map(work, range(3)))
        r.faults.heal()
        await r.faults.land()
        await asyncio.sleep(0.02)
        found = await contents(r)
        assert found[0] == found[1] == dict.fromkeys(committed, 1)
        observers = await writers(r, client=r.honest)
        assert observers[0].upper == observers[1].upper
        named = {
            part.key
            for w in observers
            for batch in shard_of(w).state.batches.values()
            for part in batch.parts
            if part.key
        }
        await becomes(r.parts, sorted(named))
