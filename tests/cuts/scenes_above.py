"""Calls of stashes and of an `Indexed` with one fault."""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from aiopersist.indexed import Indexed
from aiopersist.stash import Stash, TypedCollection
from aiopersist.stash.errors import Fenced
from aiopersist.stash.memory import MemoryStore, StashTables
from aiopersist.stash.open import Mode, StashLocation, opened
from aiopersist.stash.sqlite import SqliteStore
from aiopersist.stash.stash import MemoryStash
from tests.cuts.faults import TroubledStore
from tests.cuts.scenes import SCENES, Call, Scene
from tests.cuts.stage import Stage

Table = dict[str, int]
Users = TypedCollection[str, int]
USERS, GROUPS = TypedCollection("users", str, int), TypedCollection("groups", str, int)
BEFORE: Table = {"a": 1, "b": 2}


class StashStage:
    """A stash whose tables are each what they were before the call, or what they were to be after it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.tables = StashTables()
        self.may_be: dict[Users, list[Table]] = {}

    async def open(self, *, calm: bool = False) -> Stash:
        s = self.stage
        trouble = s.calm() if calm else s.trouble
        path = s.place and s.place / "stash.db"

        def store(writes: bool) -> TroubledStore:
            inner = (
                MemoryStore(self.tables) if path is None else SqliteStore(path, "x", SYSTEM, writes=writes)
            )
            return TroubledStore(inner, trouble)

        settings = ap.Settings(retry_timeout_s=None if calm else s.retry_timeout_s, open_timeout_s=20.0)
        return await opened(StashLocation(MemoryStash, store), Mode(), settings, SYSTEM)

    async def expect(self, stash: Stash) -> None:
        """The contents are one of these, and stay that one from now on."""
        found = [await collection.peek_one(stash) for collection in self.may_be]
        which = {table.index(there) for table, there in zip(self.may_be.values(), found, strict=True)}
        assert len(which) == 1, found
        self.may_be = {c: [there] for c, there in zip(self.may_be, found, strict=True)}

    async def verify(self, stash: Stash) -> None:
        """It goes on; so does a later opener."""
        for again in range(2):
            await self.expect(stash)
            for collection, (table,) in self.may_be.items():
                key = f"later{again}"
                await collection.upsert(stash, {key: again})
                table[key] = again
                await stash.consolidate(await collection.get(stash))
            await self.expect(stash)
            if again == 0:
                await stash.aclose()
                stash = await self.open(calm=True)
        await stash.aclose()


def stash_scene(after: Table, call: Callable[[Stash], Awaitable[Any]], *, both: bool = False) -> Scene:
    """`call` makes `after` of the table that was there, or of two at once."""

    async def prepare(s: Stage) -> Call:
        there = StashStage(s)
        stash = await there.open()
        collections = [USERS, GROUPS] if both else [USERS]
        for collection in collections:
            await collection.upsert(stash, BEFORE)
            there.may_be[collection] = [dict(BEFORE), dict(after)]

        async def made() -> None:
            try:
                await call(stash)
            except ap.StorageUnavailable:
                there.may_be = {c: [before] for c, (before, _) in there.may_be.items()}
                raise
            there.may_be = {c: [after] for c, (_, after) in there.may_be.items()}

        s.after.append(lambda: there.verify(stash))
        return made

    return prepare


async def _append_both(stash: Stash) -> None:
    batches = []
    for collection in (USERS, GROUPS):
        c = await collection.get(stash)
        batch = await c.make_batch(stash)
        c.append_to_batch(batch, "c", 3, 1)
        batches.append(batch)
    await stash.append(batches)


async def _migrate(stash: Stash) -> None:
    async def step(tx: Any) -> None:
        await USERS.upsert_key(tx, "c", 3)
        await GROUPS.upsert_key(tx, "c", 3)

    assert await stash.migrate([step]) == 1


async def _delete(stash: Stash) -> None:
    await USERS.delete(stash, lambda key, val: key == "a")


SCENES["stash_upsert"] = stash_scene({**BEFORE, "a": 5}, lambda t: USERS.upsert(t, {"a": 5}))
SCENES["stash_insert"] = stash_scene({**BEFORE, "c": 3}, lambda t: USERS.insert_without_overwrite(t, "c", 3))
SCENES["stash_delete"] = stash_scene({"b": 2}, _delete)
SCENES["stash_append_both"] = stash_scene({**BEFORE, "c": 3}, _append_both, both=True)
SCENES["stash_migrate"] = stash_scene({**BEFORE, "c": 3}, _migrate, both=True)


async def _consolidate(s: Stage) -> Call:
    there = StashStage(s)
    stash = await there.open()
    for _ in range(3):
        await USERS.upsert(stash, BEFORE)
    there.may_be[USERS] = [dict(BEFORE)]
    c = await USERS.get(stash)
    s.after.append(lambda: there.verify(stash))
    return lambda: stash.consolidate(c)


async def _take_over(s: Stage) -> Call:
    """The earlier opener is fenced, or it goes on; a later one does in any case."""
    there = StashStage(s)
    stash = await there.open()
    await USERS.upsert(stash, BEFORE)
    there.may_be[USERS] = [dict(BEFORE)]

    async def call() -> None:
        await (await there.open()).aclose()

    async def goes_on() -> None:
        try:
            await USERS.upsert_key(stash, "c", 3)
            there.may_be[USERS][0]["c"] = 3
        except Fenced:
            pass
        await stash.aclose()
        await there.verify(await there.open(calm=True))

    s.after.append(goes_on)
    return call


SCENES |= {"stash_consolidate": _consolidate, "stash_take_over": _take_over}


# --- Indexed ------------------------------------------------------------------------------------------


class IndexedStage:
    """An `Indexed` of two streams: what was written there, and may have been."""

    def __init__(self, s: Stage, ix: Indexed, streams: list[Any]) -> None:
        self.s, self.ix, self.streams = s, ix, streams
        self.acked: set[tuple[str, int]] = set()
        self.maybe: list[set[tuple[str, int]]] = []

    async def write(self, mark: str, time: int) -> None:
        rows = [(f"{mark}{n}" + "-" * 90, n) for n in range(4)]
        group = set(rows)
        try:
            await self.ix.write([(stream, [(*row, time, 1) for row in rows]) for stream in self.streams])
        except ap.StorageUnavailable:
            raise
        except BaseException:
            self.maybe.append(group)
            raise
        self.acked |= group

    async def tend(self) -> None:
        for request in await self.ix.step():
            await self.ix.apply(request.stream, await self.ix.compact(request))

    async def check(self, ix: Indexed) -> None:
        for stream in self.streams:
            stream = await ix.load(stream.name, str, int)
            async with await ix.snapshot(stream) as snapshot:
                found: Counter[Any] = Counter()
                for key, val, _, diff in await snapshot.rows():
                    found[key, val] += diff
            assert set(found.values()) <= {1}
            for group in self.maybe:
                if group <= found.keys():
                    self.acked |= group
            self.maybe = []
            assert found.keys() == self.acked, (found.keys() - self.acked, self.acked - found.keys())

    async def verify(self) -> None:
        """The same instance goes on; a later one does."""
        for turn in range(2):
            await self.check(self.ix)
            seals = [(await self.ix.description(stream.name)).upper.time for stream in self.streams]
            await self.write(f"after{turn}", max(seals))  # type: ignore[type-var]
            await self.ix.seal(self.streams, max(seals) + 1)
            await self.ix.allow_compaction([(stream, max(seals)) for stream in self.streams])
            for _ in range(4):
                await self.tend()
            await self.check(self.ix)
            if turn == 0:
                await self.ix.stop()
                self.ix = await self.s.client.indexed("x", background=False)
        await self.ix.stop()


async def _indexed(s: Stage) -> IndexedStage:
    ix = await s.client.indexed("x", background=False)
    there = IndexedStage(s, ix, [await ix.register(name, str, int) for name in "ab"])
    for time in range(3):
        await there.write(f"w{time}", time)
        await ix.seal(there.streams, time + 1)
        await ix.step()
    s.after.append(there.verify)
    return there


def indexed_scene(call: Callable[[IndexedStage], Awaitable[Any]]) -> Scene:
    async def prepare(s: Stage) -> Call:
        return partial(call, await _indexed(s))

    return prepare


async def _compact(there: IndexedStage) -> None:
    await there.ix.allow_compaction([(stream, 2) for stream in there.streams])
    await there.tend()


async def _seal_and_step(there: IndexedStage) -> None:
    await there.write("x", 5)
    await there.ix.seal(there.streams, 6)
    await there.ix.step()


async def _reopen(there: IndexedStage) -> None:
    await there.ix.stop()
    there.ix = await there.s.client.indexed("x", background=False)


SCENES["indexed_write"] = indexed_scene(lambda there: there.write("x", 4))
SCENES["indexed_seal"] = indexed_scene(lambda there: there.ix.seal(there.streams, 4))
SCENES["indexed_allow"] = indexed_scene(
    lambda there: there.ix.allow_compaction([(stream, 2) for stream in there.streams])
)
SCENES["indexed_seal_and_step"] = indexed_scene(_seal_and_step)
SCENES["indexed_compact"] = indexed_scene(_compact)
