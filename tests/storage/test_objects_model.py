"""The small model of consensus on objects: two writers, a truncation and a reader, in all orders of their
requests. Each defence is needed: without it an order is found in which a version is lost, doubled or forked.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from aiopersist.base.errors import Indeterminate
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.objects.bucket import Bucket, Object, Tagged
from aiopersist.storage.objects.consensus import ObjectsConsensus
from aiopersist.storage.objects.names import floor_name, folder_of, version_name
from aiopersist.storage.objects.reads import Look
from aiopersist.testing.storage.heads import grow
from tests.storage.objects_kit import Choose, Objects, World, explore

Makes = Mapping[str, type[ObjectsConsensus]]

RUNS_MAX = 200_000


class Scenario:
    """A key with versions up to 1, and what actors find out about it."""

    def __init__(self, makes: Makes, *, passes: bool = False) -> None:
        self.world = World(makes, passes=passes)
        self.seen: dict[int, set[bytes]] = {}
        """What was known at some moment to be a version."""
        self.refused: set[bytes] = set()
        self.acknowledged = 1

    def saw(self, versions: list[Versioned]) -> None:
        for seqno, data in versions:
            self.seen.setdefault(seqno, set()).add(data)

    async def begin(self, *, later: int = 0) -> None:
        """Write the first versions. A handle of `a` knows 1 as the head, and `later` versions are written
        after that; those before the last one are truncated."""
        setup = self.world.handle("setup")
        await grow(setup, "k", 2)
        self.a = await self.opened("a")
        for seqno in range(1, 1 + later):
            assert await setup.compare_and_set("k", seqno, b"%d" % (seqno + 1))
            await setup.truncate("k", seqno + 1)
        self.acknowledged += later
        self.saw(await setup.scan("k", 0, 100))

    async def opened(self, who: str) -> ObjectsConsensus:
        """A handle that knows the head."""
        handle = self.world.handle(who)
        await handle.head("k")
        return handle

    def writer(self, handle: ObjectsConsensus, who: str, *expected: int) -> Callable[[], Awaitable[None]]:
        """Writes one version after the other, until it does not succeed."""

        async def write() -> None:
            for seqno in expected:
                data = f"{who}{seqno + 1}".encode()
                try:
                    won = await handle.compare_and_set("k", seqno, data)
                except Indeterminate:
                    return
                if not won:
                    self.refused.add(data)
                    return
                self.acknowledged = max(self.acknowledged, seqno + 1)
                self.saw([Versioned(seqno + 1, data)])

        return write

    def truncater(self, handle: ObjectsConsensus, seqno: int | None = None) -> Callable[[], Awaitable[None]]:
        """Truncates at the head, or at `seqno` if it is there."""

        async def truncate() -> None:
            at = seqno
            if at is None:
                head = await handle.head("k")
                assert head is not None
                at = head.seqno
            with suppress(ValueError):
                await handle.truncate("k", at)

        return truncate

    def reader(self, handle: ObjectsConsensus, what: str) -> Callable[[], Awaitable[None]]:
        async def read() -> None:
            before = self.acknowledged
            self.world.tell(before)
            if what == "head":
                head = await handle.head("k")
                assert head is not None and head.seqno >= before, f"an old head: {head}"
                found = [head]
            elif what == "likely":
                head = await handle.likely_head("k", 2)
                assert head is not None and head.seqno >= before, f"an old head: {head}"
                found = [head]
            elif what == "versions":
                found = await handle.versions("k", 1, 4)
            else:
                found = await handle.scan("k", 1, 100)
                seqnos = [version.seqno for version in found]
                assert seqnos == list(range(seqnos[0], seqnos[-1] + 1)), f"a gap: {seqnos}"
                assert seqnos[-1] >= before, f"an old end: {seqnos}"
            self.saw(found)

        return read

    async def verdict(self) -> None:
        """What must hold at the end."""
        handle = self.world.handle("verdict")
        log, head = await handle.scan("k", 0, 100), await handle.head("k")
        assert head is not None and log[-1] == head, "the log does not end at the head"
        assert [v.seqno for v in log] == list(range(log[0].seqno, head.seqno + 1)), "a gap in the log"
        assert head.seqno >= self.acknowledged, "an acknowledged version is lost"
        self.saw(log)
        forks = {seqno: found for seqno, found in self.seen.items() if len(found) > 1}
        assert not forks, f"a fork: {forks}"
        doubled = self.refused & {data for found in self.seen.values() for data in found}
        assert not doubled, f"a refused version is there: {doubled}"


Cast = Callable[[Scenario], Awaitable[dict[str, Callable[[], Awaitable[None]]]]]


def played(cast: Cast, makes: Makes | None = None, *, passes: bool = False) -> int:
    """Play the scenario in all orders; the number of runs. `makes`: the stores of actors that lack a
    defence."""
    with asyncio.Runner() as runner:

        async def one(choose: Choose) -> None:
            scenario = Scenario(makes or {}, passes=passes)
            await scenario.world.run(await cast(scenario), choose)
            await scenario.verdict()

        return explore(lambda choose: runner.run(one(choose)), RUNS_MAX)


async def race(s: Scenario) -> dict[str, Any]:
    """Two writers; the answers of one of them may be lost, its creations come late or twice."""
    await s.begin()
    s.world.faults["a"] = ("lost", "late", "twice")
    return {"a": s.writer(s.a, "a", 1, 2), "b": s.writer(await s.opened("b"), "b", 1, 2)}


async def truncated(s: Scenario) -> dict[str, Any]:
    """A writer that may sleep, one that goes on, and a truncation."""
    await s.begin()
    return {
        "a": s.writer(s.a, "a", 1),
        "b": s.writer(await s.opened("b"), "b", 1, 2),
        "t": s.truncater(await s.opened("t")),
    }


async def gap(s: Scenario) -> dict[str, Any]:
    """A writer that expects a version which does not come."""
    await s.begin()
    return {"a": s.writer(s.a, "a", 3), "b": s.writer(await s.opened("b"), "b", 1)}


def in_turn(*acts: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def act() -> None:
        for each in acts:
            await each()

    return act


def read(what: str) -> Cast:
    """A reader beside a writer that has slept, and one that goes on and truncates what the reader finds."""

    async def cast(s: Scenario) -> dict[str, Any]:
        await s.begin(later=1)
        b = await s.opened("b")
        return {
            "a": s.writer(s.a, "a", 1),
            "b": in_turn(s.writer(b, "b", 2), s.truncater(b, 3)),
            "r": s.reader(s.world.handle("r"), what),
        }

    return cast


async def known(s: Scenario) -> dict[str, Any]:
    """A reader of versions that it knows to be there, while they are truncated, beside a writer that has
    slept."""
    await s.begin()
    b = await s.opened("b")
    for seqno in range(1, 4):
        await s.writer(b, "b", seqno)()
    return {
        "a": s.writer(s.a, "a", 1),
        "b": in_turn(s.writer(b, "b", 4), s.truncater(b, 5)),
        "r": s.reader(await s.opened("r"), "versions"),
    }


async def overtaken(s: Scenario) -> dict[str, Any]:
    """A writer that loses, looks at the head and goes on, beside one that goes on and truncates, and one that
    has slept."""
    await s.begin()
    b = await s.opened("b")
    return {
        "a": in_turn(s.writer(s.a, "a", 1), s.reader(s.a, "head"), s.writer(s.a, "aa", 2)),
        "b": in_turn(s.writer(b, "b", 1, 2), s.truncater(b, 3)),
    }


CASTS = {
    "overtaken": overtaken,
    "race": race,
    "truncated": truncated,
    "gap": gap,
    "head": read("head"),
    "scan": read("scan"),
    "likely": read("likely"),
    "known": known,
}


class WithoutTails(ObjectsConsensus):
    """As of versions that are large."""

    def __init__(self, bucket: Bucket, **options: Any) -> None:
        super().__init__(bucket, **options)
        self._tails.before = lambda key, seqno: []  # type: ignore[method-assign]


class OfMany(ObjectsConsensus):
    """As of lists of versions that are too long to go on to the floors."""

    def __init__(self, bucket: Bucket, **options: Any) -> None:
        super().__init__(bucket, **options)
        self._heads.live = lambda key: 1000  # type: ignore[method-assign]

    async def _versions(self, key: str, from_seqno: int) -> tuple[list[Tagged], list[Tagged] | None]:
        return (await super()._versions(key, from_seqno))[0], None


class OfManyWithoutTails(OfMany, WithoutTails):
    """Both."""


@pytest.fixture(autouse=True)
def _short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few versions do not fit in one."""
    for module in "tails", "reads":
        monkeypatch.setattr(f"aiopersist.storage.objects.{module}.TAIL_MAX", 2)


SMALL = [
    *((name, True, ObjectsConsensus) for name in ("race", "truncated", "gap", "overtaken", "head")),
    *((name, False, ObjectsConsensus) for name in ("scan", "likely")),
    *((name, False, OfMany) for name in ("race", "truncated", "overtaken", "head", "likely")),
]
ALL = product(CASTS, [True, False], [ObjectsConsensus, OfMany, WithoutTails, OfManyWithoutTails])
TOO_LARGE = [
    ("scan", True, OfManyWithoutTails),
    *(("known", *case) for case in product([True, False], [OfMany, WithoutTails, OfManyWithoutTails])),
]
LARGE = [case for case in ALL if case not in SMALL and case not in TOO_LARGE]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "passes", "store"), [*SMALL, *(pytest.param(*case, marks=pytest.mark.long) for case in LARGE)]
)
def test_nothing_is_lost_doubled_or_forked(name: str, passes: bool, store: type[ObjectsConsensus]) -> None:
    """`passes`: with lists that take time; among their orders are all those of lists that take none."""
    makes = dict.fromkeys(("setup", "a", "b", "t", "r", "verdict"), store)
    runs = played(CASTS[name], makes, passes=passes)
    print(f"{runs} runs")
    assert runs > 1


# --- each defence is needed ----------------------------------------------------------------------


class TrustsItsCreation(ObjectsConsensus):
    """Looks at no floor after a creation."""

    blind = False

    async def _create(self, key: str, seqno: int, data: bytes) -> bool:
        self.blind = True
        try:
            return await super()._create(key, seqno, data)
        finally:
            self.blind = False

    async def _floors(self, folder: str) -> list[Tagged]:
        return [] if self.blind else await super()._floors(folder)


class DeletesFirst(ObjectsConsensus):
    """Truncates, and then says so."""

    async def truncate(self, key: str, seqno: int) -> int:
        await self._delete_below(folder_of(key), seqno, [])
        return await super().truncate(key, seqno)


class DropsItsFloor(ObjectsConsensus):
    """Deletes a floor although there is no greater one."""

    async def _delete_below(self, folder: str, floor: int, listed: Sequence[Tagged]) -> None:
        await super()._delete_below(folder, floor, listed)
        await self._bucket.delete([folder + floor_name(floor)])


class IgnoresFloors(ObjectsConsensus):
    """Reads what is there."""

    async def _floor(self, folder: str, listed: Sequence[Tagged] | None = None) -> int:
        return 0


class ListsFloorsFirst(ObjectsConsensus):
    """Reads floors, and then versions."""

    async def _look(self, key: str) -> Look:
        floors = await self._floors(folder_of(key))
        return (await super()._look(key))._replace(behind=floors)


class TakesOrphansForTrue(ObjectsConsensus):
    """Believes what no list has shown."""

    def _true_of(self, unlisted: Sequence[Versioned]) -> Sequence[Versioned]:
        return unlisted


class IgnoresTags(ObjectsConsensus):
    """Reads what has the name that was listed."""

    def __init__(self, bucket: Bucket, **options: Any) -> None:
        super().__init__(Untagged(bucket), **options)


class Untagged(Objects):
    def __init__(self, bucket: Any) -> None:
        super().__init__(bucket._world)

    async def get(self, name: str) -> Object | None:
        found = await super().get(name)
        return None if found is None else Object(found.data, "")

    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        return [Tagged(name, "") for name, _ in await super().find(prefix, after=after, limit=limit)]


class WritesOverGaps(ObjectsConsensus):
    """Believes that every version was a head."""

    async def _is_head(self, key: str, expected: int | None, *, anew: bool = False) -> bool:
        return True


class TakesARefusalForOne(ObjectsConsensus):
    """Compares no token."""

    async def _create(self, key: str, seqno: int, data: bytes) -> bool:
        name = folder_of(key) + version_name(seqno)
        return await self._bucket.create(name, b"token\n" + data) is not None


WITHOUT: dict[str, tuple[Cast, Makes, bool]] = {
    "a creation that is not confirmed": (truncated, {"a": TrustsItsCreation}, False),
    "deletions before the floor": (truncated, {"t": DeletesFirst}, False),
    "a floor that is deleted": (truncated, {"t": DropsItsFloor}, False),
    "orphans that are read": (read("scan"), {"b": WithoutTails, "r": IgnoresFloors}, False),
    "orphans under names that were listed": (read("scan"), {"r": IgnoresTags}, False),
    "lists that are taken for a moment": (read("head"), {"r": IgnoresFloors}, True),
    "floors that are listed before versions": (read("head"), {"r": ListsFloorsFirst}, True),
    "orphans that no list has shown": (known, {"r": TakesOrphansForTrue}, False),
    "versions over gaps": (gap, {"a": WritesOverGaps}, False),
    "a request that is sent twice": (race, {"a": TakesARefusalForOne}, False),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("without", WITHOUT)
def test_without_a_defence_something_is_lost(without: str) -> None:
    cast, makes, passes = WITHOUT[without]
    with pytest.raises(AssertionError, match=r"lost|gap|fork|refused|old|end at the head"):
        played(cast, makes, passes=passes)
