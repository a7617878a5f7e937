"""An adversary for stashes: `play(seed)` is one game of several openers on one stash.

Their tasks append, upsert, transfer, migrate and consolidate, all at once. Each call of a store may be
refused, lose its answer, never arrive, or arrive long after its caller was told that it was lost; it takes
its time. Openers are taken over from, share, are closed amid their calls and forgotten by the store as
after a long pause; callers are cancelled at any await.

Each change leaves an entry of its own in one collection. So a naive model is enough: what was acknowledged is
there once; what was refused is not there, and never will be; all else is there once or not at all, and as a
whole. No time passes: a game is repeated by its seed.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, InvalidUsage, StorageUnavailable
from aiopersist.base.settings import Settings
from aiopersist.stash import MemoryStash, Stash, StashCollection, StashError, TypedCollection, transact
from aiopersist.stash.memory import MemoryStore, StashTables
from aiopersist.stash.open import Mode, StashLocation, opened
from tests.indexed.seeded_loop import SeededRuntime, spin
from tests.stash.collections import ACCOUNTS, NAMES
from tests.support.shards import Call

LEDGER = TypedCollection("ledger", str, int)
NOTES = TypedCollection("notes", str, str)
TOTAL = 300
STEPS = 3  # of migrations, in all

RARELY = {"refused": 0.06, "lost": 0.06, "dropped": 0.05, "late": 0.05}


class Wire:
    """The random faults of calls of stores; late calls land when they are told to."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.late: list[Call] = []
        self.rates: dict[str, float] = {}

    async def call(self, call: Call, *, changes: bool) -> Any:
        await spin(self.rng.choice((0, 0, 1, 2, 5)))
        fate = self._fate()
        if fate == "refused" or (fate and not changes):
            raise StorageUnavailable(f"injected: {fate}")
        if fate == "late":
            self.late.append(call)
        if fate in ("late", "dropped"):
            raise Indeterminate(f"injected: {fate}")
        result = await call()
        await spin(self.rng.choice((0, 0, 1, 2, 5)))
        if fate == "lost":
            raise Indeterminate("injected: lost")
        return result

    async def land(self) -> None:
        """Some of what is late arrives."""
        self.rng.shuffle(self.late)
        for _ in range(self.rng.randrange(len(self.late) + 1)):
            await self.late.pop()()

    def _fate(self) -> str:
        draw = self.rng.random()
        for fate, rate in self.rates.items():
            draw -= rate
            if draw < 0:
                return fate
        return ""


class WiredStore(MemoryStore):
    """A store in memory at the other end of a wire."""

    def __init__(self, tables: StashTables, wire: Wire) -> None:
        super().__init__(tables)
        self._wire = wire

    async def load(self, *args: Any) -> Any:
        return await self._wire.call(lambda: MemoryStore.load(self, *args), changes=False)

    async def commit(self, *args: Any) -> Any:
        return await self._wire.call(lambda: MemoryStore.commit(self, *args), changes=True)

    async def token(self, *args: Any) -> Any:
        return await self._wire.call(lambda: MemoryStore.token(self, *args), changes=False)

    async def consolidate(self, *args: Any) -> Any:
        return await self._wire.call(lambda: MemoryStore.consolidate(self, *args), changes=True)


class Game:
    """See the header."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"stash {seed}")
        self.runtime = SeededRuntime(seed)
        self.tables = StashTables()
        self.wire = Wire(random.Random(f"wire {seed}"))
        self.openers: list[tuple[Stash, dict[str, StashCollection[Any, Any]]]] = []
        self.number = 0
        self.done: set[str] = set()
        self.refused: set[str] = set()
        self.unknown: set[str] = set()
        self.counts: Counter[str] = Counter()

    async def play(self) -> Counter[str]:
        await self.open(exclusive=True)
        stash, _ = self.openers[0]
        await ACCOUNTS.upsert(stash, [(name, TOTAL // 3) for name in NAMES])
        for table in (LEDGER, NOTES):
            await table.upsert(stash, [])
        self.wire.rates = {fate: rate * self.rng.choice((0, 1, 3)) for fate, rate in RARELY.items()}
        for _ in range(self.rng.randrange(4, 14)):
            await self.turn()
        self.wire.rates = {}
        await self.check()
        while self.wire.late:
            await self.wire.land()
        await self.check()
        for stash, _ in self.openers:
            await stash.aclose()
        return self.counts

    async def turn(self) -> None:
        """Something happens to the openers, while some changes are made at once."""
        work = [self.changed() for _ in range(self.rng.choice((1, 1, 2, 4, 7)))]
        await asyncio.gather(*work, self.trouble())

    async def trouble(self) -> None:
        await spin(self.rng.randrange(30))
        pick = self.rng.random()
        if pick < 0.12:
            await self.open(exclusive=True)
        elif pick < 0.3:
            await self.open(exclusive=False)
        elif pick < 0.4 and len(self.openers) > 1:
            self.counts["closed"] += 1
            await self.openers.pop(self.rng.randrange(len(self.openers)))[0].aclose()
        elif pick < 0.5:
            self.counts["forgotten"] += 1
            self.tables.openers.clear()
        elif pick < 0.75:
            self.counts["landed"] += len(self.wire.late)
            await self.wire.land()

    async def open(self, *, exclusive: bool) -> None:
        place = StashLocation(MemoryStash, lambda _: WiredStore(self.tables, self.wire))
        settings = Settings(retry_timeout_s=self.rng.choice((0.0, 0.02, None)))
        stash = await opened(place, Mode(exclusive=exclusive), settings, self.runtime)
        self.openers.append((stash, {}))
        self.counts["taken over" if exclusive else "shared"] += 1

    # --- changes -------------------------------------------------------------------------------------

    async def changed(self) -> None:
        """Make a change, and note what its caller is told."""
        stash, _ = self.rng.choice(self.openers[-3:])
        self.number += 1
        name = f"n{self.number}"
        ways = (self.noted, self.noted_by_insert, self.transferred, self.put, self.migrated)
        way = self.rng.choices(ways, (3, 2, 4, 3, 1))[0]
        call = asyncio.ensure_future(way(stash, name))
        if self.rng.random() < 0.2:
            await spin(self.rng.randrange(12))
            call.cancel()
        try:
            outcome = await call
        except (asyncio.CancelledError, Indeterminate):
            self.told(name, way, "unknown")
        except InvalidUsage as error:
            if error.kind is not ap.UsageKind.CLOSED:
                raise
            self.told(name, way, "unknown")
        except (StorageUnavailable, StashError):
            self.told(name, way, "refused")
        else:
            self.told(name, way, outcome)

    def told(self, name: str, way: Any, what: str) -> None:
        getattr(self, what).add(name)
        self.counts[what] += 1
        self.counts[f"{way.__name__} {what}"] += 1

    async def noted(self, stash: Stash, name: str) -> str:
        await NOTES.upsert_key(stash, name, name)
        return "done"

    async def noted_by_insert(self, stash: Stash, name: str) -> str:
        assert await NOTES.insert_without_overwrite(stash, name, name) == name
        return "done"

    async def transferred(self, stash: Stash, name: str) -> str:
        giver, taker = self.rng.sample(NAMES, 2)

        def change(accounts: Any, ledger: Any) -> None:
            amount = min(7, accounts.get(giver))
            accounts.set(giver, accounts.get(giver) - amount)
            accounts.set(taker, accounts.get(taker) + amount)
            ledger.insert(name, amount)

        await transact(stash, change, ACCOUNTS, LEDGER)
        return "done"

    async def put(self, stash: Stash, name: str) -> str:
        """By batches on two collections, many of them in vain."""
        raw = await stash.collection("raw", str, int)
        notes = await NOTES.get(stash)
        batches = [await raw.make_batch(stash), await notes.make_batch(stash)]
        raw.append_to_batch(batches[0], name, 1, 1)
        notes.append_to_batch(batches[1], name, name, 1)
        await stash.append(batches)
        with suppress(StashError, StorageUnavailable, Indeterminate, InvalidUsage):
            await stash.consolidate(raw)
        return "done"

    async def migrated(self, stash: Stash, name: str) -> str:
        """Each step adds a collection and a note. Of calls that make the same one, one call's lasts."""

        async def step(tx: Stash) -> None:
            made = await tx.collection(f"made {name}", str, int)
            await tx.update(made, (name, 1), 0, 1)
            await NOTES.upsert_key(tx, name, name)

        async def never(tx: Stash) -> None:
            raise AssertionError("a step of an earlier version runs again")

        version = self.tables.version
        if version == STEPS:
            return "refused"
        assert await stash.migrate([never] * version + [step]) == version + 1 <= self.tables.version
        return "unknown"

    # --- what must hold ------------------------------------------------------------------------------

    async def check(self) -> None:
        """By an opener that changes nothing."""
        place = StashLocation(MemoryStash, lambda _: MemoryStore(self.tables))
        stash = await opened(place, Mode(readonly=True), Settings(), self.runtime)
        try:
            assert sum((await ACCOUNTS.peek_one(stash)).values()) == TOTAL
            found = Counter([*await NOTES.peek_one(stash), *await LEDGER.peek_one(stash)])
            if any(stored.name == "raw" for stored in self.tables.collections.values()):
                raw = await stash.iter(await stash.collection("raw", str, int))
                assert all(diff == 1 for _, _, diff in raw), raw
                assert {key for (key, _), _, _ in raw} <= found.keys()
        finally:
            await stash.aclose()
        assert set(found.values()) <= {1}
        assert self.done <= found.keys(), f"acknowledged and lost: {self.done - found.keys()}"
        assert not self.refused & found.keys(), f"refused and there: {self.refused & found.keys()}"
        assert found.keys() <= self.done | self.unknown
        made = {stored.name for stored in self.tables.collections.values() if stored.name[:4] == "made"}
        assert len(made) == self.tables.version <= STEPS
        assert {name.removeprefix("made ") for name in made} <= found.keys()


async def play(seed: int) -> Counter[str]:
    """One game; what happened in it."""
    return await asyncio.wait_for(Game(seed).play(), 60)
