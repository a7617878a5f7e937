"""A world in which everything may take part, and what must be true of it at its end.

Machines that crash run programs (`programs/`); which ones, and which faults there are, is drawn from the
seed. A `Ledger`, which no crash touches, has what each was told; `verdict.py` compares it with what is there.
In one world of ten the stores are put back to a backup on the way; one of twelve begins with a location of
the last release."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import aiopersist as ap
from aiopersist.testing.simulation import STORMY, Played, Weather, World, simulate
from tests.support.schemas import SCHEMA
from tests.worlds import old, verdict
from tests.worlds.programs import (
    appends,
    beside,
    consumers,
    mortals,
    players,
    publications,
    races,
    readers,
    tables,
    tags,
    upkeep,
)
from tests.worlds.scene import ACCOUNTS, EACH, Scene


class Role(NamedTuple):
    """A program that may take part."""

    program: Any
    most: int
    """Machines that run it."""
    ends: bool = True
    """Whether it ends by itself; the others stop when those have ended."""
    on_events: bool = False
    keeps: bool = False
    """Whether it keeps shards small, until all others have ended."""
    inline: bool = False
    """Whether its small appends are inline in each world."""
    mortal: bool = False
    """Whether tombstones stay for a short time only."""


ROLES: Mapping[str, Role] = {
    "writer": Role(appends.writer, 2, on_events=True),
    "repeater": Role(appends.repeater, 2, on_events=True),
    "stager": Role(appends.stager, 2, on_events=True),
    "joint": Role(appends.joint, 2, on_events=True),
    "replica": Role(appends.replica, 2),
    "counter": Role(tables.counter, 3),
    "putter": Role(tables.putter, 2),
    "mover": Role(tables.mover, 2),
    "guard": Role(tables.guard, 3),
    "streamer": Role(beside.streamer, 2),
    "stasher": Role(beside.stasher, 2),
    "evolver": Role(beside.evolver, 2),
    "heir": Role(old.heir, 2),
    "racer": Role(races.racer, 3, inline=True),
    "mortal": Role(mortals.mortal, 2, inline=True, mortal=True),
    "undertaker": Role(mortals.undertaker, 1, ends=False, mortal=True),
    "player": Role(players.player, 3),
    "reader": Role(readers.reader, 1, ends=False, on_events=True),
    "listener": Role(readers.listener, 1, ends=False, on_events=True),
    "holder": Role(readers.holder, 1, ends=False, on_events=True),
    "owner": Role(readers.owner, 2, ends=False, on_events=True),
    "biller": Role(consumers.biller, 2, ends=False, on_events=True),
    "sharer": Role(consumers.sharer, 2, ends=False, on_events=True),
    "acker": Role(consumers.acker, 2, ends=False, on_events=True),
    "relay": Role(consumers.relay, 2, ends=False, on_events=True),
    "teller": Role(tables.teller, 1, ends=False),
    "tagger": Role(tags.tagger, 2, ends=False),
    "publisher": Role(publications.publisher, 3, ends=False),
    "keeper": Role(upkeep.keeper, 2, ends=False, keeps=True),
    "partner": Role(upkeep.partner, 1, ends=False, keeps=True),
}
ON_EVENTS = [name for name, role in ROLES.items() if role.on_events and role.ends]
FOLLOWERS = [name for name, role in ROLES.items() if role.on_events and not role.ends]
BESIDE = "racer"  # takes part by dice of its own, beside any others
MORTALS = ("mortal", "undertaker")  # so do these, beyond the seeds that find planted bugs
PLAYERS = ("player",)
MORE_FROM = 1000
FAR_FROM = 2 * MORE_FROM
TAGS_FROM = 3 * MORE_FROM
PUBLISHED_FROM = 4 * MORE_FROM
APART = (BESIDE, *MORTALS, *PLAYERS)
OTHERS = [name for name, role in ROLES.items() if role.ends and not (role.on_events or name in APART)]


MOSTLY = 6  # times more of one fault than usual


class Everything:
    """See the header."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dice = world.dice
        self.scene = Scene(world)
        self.cast = {name: world.size(name, 0, ROLES[name].most) for name in self.drawn()}
        if random.Random(f"{BESIDE} {world.seed}").random() < 0.25:
            self.cast[BESIDE] = world.size(BESIDE, 0, ROLES[BESIDE].most)
        for names in (MORTALS, PLAYERS) if world.seed >= MORE_FROM else ():
            if random.Random(f"{names[0]}s {world.seed}").random() < 0.1:
                self.cast |= {name: world.size(name, 1, ROLES[name].most) for name in names}
        if world.seed >= TAGS_FROM and random.Random(f"taggers {world.seed}").random() < 0.5:
            self.cast["tagger"] = world.size("tagger", 1, ROLES["tagger"].most)
            self.cast["keeper"] = max(self.cast.get("keeper", 0), 1)
        if world.seed >= PUBLISHED_FROM and random.Random(f"publishers {world.seed}").random() < 0.5:
            self.cast["publisher"] = world.size("publisher", 1, ROLES["publisher"].most)
            self.cast["keeper"] = max(self.cast.get("keeper", 0), 1)
        self.roles = {name for name, machines in self.cast.items() if machines}
        self.world.counts.update(f"role {name}" for name in self.roles)
        self.forever = 0
        self.restores = self.dice.random() < 0.1
        self.tasks: dict[tuple[str, int], asyncio.Task[Any]] = {}

    def some_weather(self) -> Weather:
        """Of the world's weather: some faults are left out, and one may be much more frequent."""
        weather = self.world.weather
        for kind in weather.kinds:
            if self.dice.random() < 0.2:
                weather = weather.without(kind)
        if weather.kinds and self.dice.random() < 0.5:
            kind = self.dice.choice(weather.kinds)
            weather = replace(weather, **{kind: min(MOSTLY * getattr(weather, kind), 0.5)})
        return weather

    def with_strangers(self, weather: Weather) -> Weather:
        """In some worlds something between answers, too: by dice of its own, beyond the seeds that find
        planted bugs."""
        dice = random.Random(f"strangers {self.world.seed}")
        if self.world.seed < MORE_FROM or not weather.kinds or dice.random() < 0.5:
            return weather
        return replace(weather, foreign=dice.choice([0.01, 0.05]), dates=dice.choice([0.0, 0.02]))

    def with_distances(self, weather: Weather) -> Weather:
        """In some worlds some machines are far, likewise."""
        dice = random.Random(f"distances {self.world.seed}")
        is_drawn = self.world.seed >= FAR_FROM and dice.random() < 0.5
        return replace(weather, far=0.3) if is_drawn else weather

    def drawn(self) -> list[str]:
        """The programs of this world."""
        kind = self.dice.random()
        if kind < 0.6:  # one shard, who writes it and who follows it
            names = self.dice.sample(ON_EVENTS, self.dice.choice([1, 1, 2]))
            names += self.dice.sample(FOLLOWERS, self.dice.choice([1, 2]))
        else:
            names = [*self.dice.sample(OTHERS, self.dice.choice([1, 2]))]
            names += ["teller"] if {"counter", "putter"} & {*names} else []
        if self.dice.random() < 0.6:
            names += ["keeper"] + ["partner"] * (self.dice.random() < 0.3)
        return names

    async def play(self) -> None:
        if "heir" in self.roles:
            old.fill(self.world)
            self.forever = old.STAGED
        await self.begin()
        self.world.network.weather = self.with_distances(self.with_strangers(self.some_weather()))
        self.observing = asyncio.create_task(self.observe())
        programs = asyncio.create_task(self.run_programs())
        if self.restores:
            await self.restored()
        await programs
        await self.world.heal()
        await self.finish()

    @property
    def has_events(self) -> bool:
        return any(ROLES[name].on_events for name in self.roles)

    async def begin(self) -> None:
        """What must be there before."""
        async with self.world.open(settings=self.scene.calm) as honest:
            if "mover" in self.roles:
                await honest.table("money", str, int).put_many(dict.fromkeys(ACCOUNTS, EACH))
            if "player" in self.roles:
                await players.begin(self.scene, honest)
            if "guard" in self.roles:
                await honest.table("duty", str, int).put_many({"ann": 1, "bob": 1})
            if "counter" in self.roles:
                await honest.table("counts", str, int).put("all", 0)
            if self.has_events:
                await (await honest.writer("events", SCHEMA)).aclose()
                await (await honest.subscription("events", SCHEMA, name="observer")).aclose()
                if self.dice.random() < 0.5:
                    await honest.retain("events", 0)

    async def restored(self) -> None:
        """A backup is taken, and some time later the stores are put back to it, if all programs are there to
        go on from it: what they had begun when it was taken may be in it, and nobody was told."""
        await self.world.sleep(self.dice.uniform(0, 2))
        backup, ledger = self.world.backup(), deepcopy(self.scene.ledger)
        await self.world.sleep(self.dice.uniform(0, 2))
        if not any(task.done() for task in self.tasks.values()):
            await self.stop_observing()
            self.world.restore(backup)
            self.scene.ledger = ledger
            self.observing = asyncio.create_task(self.observe())

    async def run_programs(self) -> None:
        """All at once, each on a machine of its own."""
        named = [(name, at) for name, machines in self.cast.items() for at in range(machines)]
        self.tasks = {(name, at): self.task(name, at) for name, at in named}
        self.scene.is_over = await self.ended(lambda role: role.ends)
        self.scene.is_quiet = await self.ended(lambda role: not role.keeps)
        await self.ended(lambda role: True)

    async def ended(self, which: Callable[[Role], bool]) -> bool:
        """Wait for those programs; what one of them raises is raised."""
        for (name, _), task in self.tasks.items():
            if which(ROLES[name]):
                await task
        return True

    def task(self, name: str, number: int) -> "asyncio.Task[Any]":
        machine = self.world.machine(f"{name}{number}")
        app: Callable[..., Any] = partial(ROLES[name].program, self.scene, machine.name)
        within_s = self.dice.choice([0.05, 0.5, 2.0])
        settings = self.scene.inline if ROLES[name].inline else self.scene.settings
        if ROLES[name].mortal:
            settings = settings.model_copy(update={"tombstone_retention_s": mortals.RETENTION_S})
        return asyncio.create_task(
            machine.supervise(app, settings=settings, crashes_max=2, within_s=within_s)
        )

    # --- the end ---------------------------------------------------------------------------------

    async def finish(self) -> None:
        async with self.world.open(settings=self.scene.calm) as honest:
            await self.observed(honest)
            await self.stop_observing()
            if "player" in self.roles:
                await players.check(self.scene, honest)
            await verdict.check(self.scene, honest, self.roles)
            await verdict.check_upkeep(self.scene, honest, self.forever)
            await verdict.check_times(self.scene, honest)
            await verdict.check(self.scene, honest, self.roles)
            if self.scene.ledger.publications:
                await publications.check_ended(self.scene, honest)
                await verdict.check_nothing_is_left(honest, self.forever)
        verdict.check_nothing_runs(self.scene)
        async with self.world.open(settings=self.scene.calm) as honest:
            await verdict.check_no_lease_is_left(honest)

    async def observe(self) -> None:
        """All updates of `events`, as a subscription is told them to which nothing happens."""
        if not self.has_events:
            return
        async with (
            self.world.open(settings=self.scene.calm) as honest,
            honest.subscription("events", SCHEMA, name="observer") as sub,
        ):
            async for step in sub:
                ledger = self.scene.ledger
                told = [(u.key, u.val, u.time, u.diff) for u in step.updates]
                ledger.log += [update for update in told if update[2] >= ledger.frontier]
                ledger.frontier = max(step.upper.time, ledger.frontier)  # type: ignore[type-var,assignment]
                await sub.ack(step, durable=self.dice.random() < 0.5)

    async def observed(self, honest: ap.Client) -> None:
        """Wait until the observer was told everything."""
        upper = (await honest.upper("events")).time if self.has_events else 0
        while self.scene.ledger.frontier < upper:  # type: ignore[operator]
            await self.world.sleep(0.1)
            assert not self.observing.done() or self.observing.result()

    async def stop_observing(self) -> None:
        self.observing.cancel()
        with suppress(asyncio.CancelledError):
            await self.observing


async def everything(world: World) -> None:
    await Everything(world).play()


def play(seed: int, weather: Weather = STORMY) -> Played:
    return simulate(everything, seed, weather)
