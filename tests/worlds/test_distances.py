"""Goal: in a world where nothing fails, however far each machine is from the stores, every call comes through
within the bound that `docs/limits.md` names, though no machine ever pauses."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.simulation import CALM, World, simulate
from aiopersist.testing.simulation.machine import Machine
from aiopersist.testing.simulation.network import FAR

ROUND_TRIPS, MORE = 20, 10  # as `docs/limits.md` says
CALLS = 3
KINDS = {
    "of a table": ["put", "update", "insert", "transact"],
    "of a shard": ["write"],
    "of a stash": ["stash", "upsert"],
}
NUMBERS = ap.stash.TypedCollection("numbers", str, int)

Call = Callable[[int], Awaitable[object]]


async def calls_of(machine: Machine, client: ap.Client, stash: ap.stash.Stash) -> dict[str, Call]:
    """Each is one commit."""
    table, other = (client.table(name, key=str, val=int) for name in ("t", "other"))
    writer = await client.writer("s", ap.Schema(str, int), clock="wall")
    mine = machine.name

    async def moved(tx: ap.Transaction) -> None:
        tx.put(other, mine, (await tx.get(table, mine) or 0) + 1)
        tx.put(table, mine, 0)

    def change(numbers: Any) -> None:
        numbers.set(mine, (numbers.get(mine) or 0) + 1)

    return {
        "put": lambda n: table.put(mine, n),
        "update": lambda n: table.update("all", lambda old: (old or 0) + 1),
        "insert": lambda n: table.insert(f"{mine} {n}", n),
        "transact": lambda n: client.transact(moved),
        "write": lambda n: writer.write([(mine, n)]),
        "stash": lambda n: ap.stash.transact(stash, change, NUMBERS),
        "upsert": lambda n: NUMBERS.upsert_key(stash, mine, n),
    }


class Play:
    """Machines that call again and again, until each has come through some times."""

    def __init__(self, world: World, names: list[str]) -> None:
        self.world = world
        more = [world.dice.choice([1, 3, FAR]) for _ in range(world.size("more", 0, 3))]
        machines = [world.machine(f"m{n}", distance) for n, distance in enumerate([1, FAR, *more])]
        self.calls = {machine: world.dice.choice(names) for machine in machines}
        self.done = dict.fromkeys(machines, 0)
        self.longest_s = 0.0
        round_trip_s = 2 * max(machine.distance for machine in machines) * world.weather.latency_s
        self.bound_s = (ROUND_TRIPS + MORE * (len(machines) - 1)) * round_trip_s

    async def run(self) -> None:
        """All of them at once."""
        running = [machine.start(self._repeat(machine)) for machine in self.calls]
        async with asyncio.timeout(2 * CALLS * self.bound_s):
            await asyncio.gather(*running)

    async def _repeat(self, machine: Machine) -> None:
        async with machine.open(maintenance=False) as client, machine.stash(exclusive=False) as stash:
            call = (await calls_of(machine, client, stash))[self.calls[machine]]
            await call(-1)
            while min(self.done.values()) < CALLS:
                began = self.world.now_s
                await call(self.done[machine])
                self.longest_s = max(self.longest_s, self.world.now_s - began)
                self.done[machine] += 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
@pytest.mark.parametrize("names", KINDS.values(), ids=KINDS)
def test_each_call_comes_through(names: list[str], seed: int) -> None:
    plays: list[Play] = []

    async def play(world: World) -> None:
        plays.append(Play(world, names))
        await plays[0].run()

    simulate(play, seed, CALM)
    assert 0 < plays[0].longest_s <= plays[0].bound_s


def test_who_changes_other_collections_of_a_stash_meanwhile_comes_through() -> None:
    """Goal: its changes of what nobody else changes neither end nor delay its wish."""
    took: list[float] = []

    async def play(world: World) -> None:
        far, nears = world.machine("far", FAR), [world.machine(f"near {n}", 1) for n in range(2)]
        changed, alone, is_over = ap.stash.TypedCollection("changed", str, int), NUMBERS, False

        def change(numbers: Any) -> None:
            numbers.set("far", (numbers.get("far") or 0) + 1)

        async def repeat(machine: Machine, mine: ap.stash.TypedCollection[str, int]) -> None:
            async with machine.stash(exclusive=False) as stash:
                while not is_over:
                    await mine.upsert_key(stash, machine.name, 1)

        async def come_through() -> None:
            async with far.stash(exclusive=False) as stash:

                async def others() -> None:
                    while not is_over:
                        await alone.upsert_key(stash, "far", 1)

                meanwhile = asyncio.ensure_future(others())
                for _ in range(CALLS):
                    began = world.now_s
                    await ap.stash.transact(stash, change, changed)
                    took.append(world.now_s - began)
                nonlocal is_over
                is_over = True
                await meanwhile

        running = [near.start(repeat(near, changed)) for near in nears]
        async with asyncio.timeout(10):
            await asyncio.gather(far.start(come_through()), *running)

    simulate(play, 1, CALM)
    assert max(took) <= (ROUND_TRIPS + MORE) * 2 * FAR * CALM.latency_s
