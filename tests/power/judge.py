"""Whether a location after a loss of power has everything that was acknowledged before."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiopersist as ap
from tests.power.disk import Disk
from tests.power.trace import Call
from tests.power.work import SCHEMA, SETTINGS

Syncs = Callable[[Disk, Call], bool]
"""Whether a call of fsync is carried out: a planted bug leaves some out."""


def every_sync(disk: Disk, call: Call) -> bool:
    return True


@dataclass
class Point:
    """A moment at which the power is lost: after so many calls; `seed` chooses what survives."""

    calls: int
    seed: int


def points(calls: Sequence[Call], many: int, seed: int) -> list[Point]:
    """Moments all over the run, in order; most are just before or after something was told or synced."""
    dice = Random(seed)
    notable = [
        at for at, call in enumerate(calls) if call.name in ("fsync", "fdatasync", "renameat", "write")
    ]
    chosen = []
    for _ in range(many):
        at = dice.choice(notable) + dice.randrange(3) if dice.random() < 0.7 else dice.randrange(len(calls))
        chosen.append(Point(min(at, len(calls)), dice.randrange(2**32)))
    return sorted(chosen, key=lambda point: point.calls)


@dataclass
class Found:
    """What a run of points found."""

    tried: int = 0
    told: int = 0
    """Acknowledged operations that were looked for."""
    problems: list[str] = field(default_factory=list)


async def tried(
    calls: Sequence[Call], root: Path, chosen: Sequence[Point], folder: Path, syncs: Syncs = every_sync
) -> Found:
    """Lose the power at each of these points."""
    disk, done, found = Disk(root), 0, Found()
    for number, point in enumerate(chosen):
        for call in calls[done : point.calls]:
            disk.apply(call, synced=call.name not in ("fsync", "fdatasync") or syncs(disk, call))
        done = max(done, point.calls)
        place = folder / str(number)
        disk.lose_power(place, Random(point.seed))
        problems = await judged(place / "new" / "loc", disk.said)
        found.problems += [f"after {point.calls} calls, seed {point.seed}: {problem}" for problem in problems]
        found.tried += 1
        found.told += sum(line.startswith(("told log", "told stock")) for line in disk.said)
        shutil.rmtree(place)
    return found


async def judged(place: Path, said: Sequence[str]) -> list[str]:
    """What is wrong there."""
    try:
        return await _judged(place, said)
    except ap.Error as error:
        return [f"{type(error).__name__}: {error}"]


async def _judged(place: Path, said: Sequence[str]) -> list[str]:
    lines = [line.split(" ", 2) for line in said]
    told = {(kind, *rest) for what, kind, *rest in lines if what == "told"}
    began = {(kind, *rest) for what, kind, *rest in lines if what == "began"}
    problems: list[str] = []
    settings = SETTINGS.model_copy(update={"retry_timeout_s": 60.0, "open_timeout_s": 60.0})
    async with ap.open(str(place), settings=settings, maintenance=False) as client:
        names = [found.name for found in await client.admin.overview() if found.seqno is not None]
        log: dict[str, int] = {}
        if "log" in names:
            async with client.reader("log", SCHEMA) as reader:
                if (await reader.fetch_recent_upper()) != ap.Antichain(0):
                    async with reader.snapshot() as snapshot:
                        rows = await snapshot.rows()
                    log = {key: val for key, val, _ in rows}
                    problems += [f"{key} is there {diff} times" for key, _, diff in rows if diff != 1]
        stock = {key: val async for key, val in client.table("stock", str, int).items()}
        problems += [
            f"{of} was acknowledged, and is lost" for of in told if of[0] == "log" and of[1] not in log
        ]
        problems += [f"{key} was never written" for key in log if ("log", key) not in began]
        for _, text in (of for of in told if of[0] == "stock"):
            key, val = text.split(" ")
            if stock.get(key, -1) < int(val):
                problems.append(f"{key} was acknowledged as {val}, and is {stock.get(key)}")
        for name in names:
            report = await client.admin.fsck(name)
            problems += [f"{name}: {problem}" for problem in report.problems]
        async with client.writer("log", SCHEMA) as writer:
            upper = writer.upper.time
            assert isinstance(upper, int)
            await writer.compare_and_append([("after", 0, upper, 1)], upper, upper + 1)
    return problems
