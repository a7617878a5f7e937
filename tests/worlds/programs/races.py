"""Programs that race for a shard of their own with small appends.

Nobody subscribes to the shard `race`, its times are those of the programs, and its batches are a few plain
rows that become inline parts. Each batch goes from the upper to another, so those that are there follow each
other without a gap."""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import aiopersist as ap
from tests.support.schemas import SCHEMA
from tests.worlds.scene import Scene

APPENDS = 4  # times what other programs write: they are cheap
ROWS_MAX = 4
STEPS = (1, 1, 3)  # from a lower to an upper
SENT, WON, LOST = "race sent", "race won", "race lost"
"""Where the ledger has a batch: what was sent; that it was acknowledged; that it was refused."""


class Batch(NamedTuple):
    """What was sent."""

    lower: int
    upper: int
    size: int


async def racer(scene: Scene, name: str, client: ap.Client) -> None:
    """Appends at the upper as it knows it. Whoever comes second is refused, and knows it."""
    async with client.writer("race", SCHEMA) as handle:
        time: Any = (await handle.fetch_recent_upper()).time
        while scene.ledger.done[name] < APPENDS * scene.writes:
            try:
                if scene.rolled(0.2):
                    time = await cancelled(scene, handle, name, time)
                else:
                    time = await appended(scene, handle, name, time)
            except ap.LeaseExpired:
                return
            if scene.rolled(0.1):
                await look(scene, client)
            if scene.rolled(0.5):
                await scene.pause()


def batch(scene: Scene, name: str, lower: int) -> tuple[int, list[Any], int]:
    """A new batch that begins there: its number, its rows, and its upper."""
    number = len(scene.ledger.written.get(SENT, {}))
    size, upper = scene.dice.randint(1, ROWS_MAX), lower + scene.dice.choice(STEPS)
    scene.ledger.write(SENT, number, Batch(lower, upper, size))
    scene.ledger.done[name] += 1
    return number, [(f"{number}", at, scene.dice.randrange(lower, upper), 1) for at in range(size)], upper


async def appended(scene: Scene, handle: Any, name: str, lower: int) -> int:
    """Append a batch there; returns the upper after it, or that which is there instead. An unknown outcome is
    settled."""
    number, rows, upper = batch(scene, name, lower)
    try:
        await handle.compare_and_append(rows, lower, upper)
    except ap.UpperMismatch as error:
        return refused(scene, number, error)
    except ap.Indeterminate:
        return await settled(scene, handle, number)
    scene.ledger.write(WON, number, None)
    return upper


async def cancelled(scene: Scene, handle: Any, name: str, lower: int) -> int:
    """The same, but the call is cancelled at some moment. What `settle` says is true, for ever."""
    number, rows, upper = batch(scene, name, lower)
    began = asyncio.Event()

    async def called() -> None:
        began.set()
        await handle.compare_and_append(rows, lower, upper)

    call = asyncio.create_task(called())
    await began.wait()  # before its first step there is nothing to settle
    await scene.world.sleep(scene.dice.choice([0.0, 0.001, 0.002, 0.005]))
    call.cancel()
    try:
        await call
    except (asyncio.CancelledError, ap.Indeterminate):
        return await settled(scene, handle, number)
    except ap.UpperMismatch as error:
        return refused(scene, number, error)
    scene.ledger.write(WON, number, None)
    return upper


async def settled(scene: Scene, handle: Any, number: int) -> int:
    outcome = await handle.settle()
    scene.counts[f"race settled: {type(outcome).__name__}"] += 1
    if isinstance(outcome, ap.Committed):
        upper = scene.ledger.written[SENT][number].upper
        scene.promise(outcome.upper.time == upper, (outcome, upper))
        scene.ledger.write(WON, number, None)
        return int(upper)
    scene.promise(outcome is not None, "an append that was under way has no outcome")
    scene.ledger.write(LOST, number, None)
    return int((await handle.fetch_recent_upper()).time)


def refused(scene: Scene, number: int, error: ap.UpperMismatch) -> int:
    scene.ledger.write(LOST, number, None)
    scene.counts["races lost"] += 1
    current: Any = error.current.time
    scene.promise(current > scene.ledger.written[SENT][number].lower, f"refused by an old state: {error}")
    return int(current)


async def look(scene: Scene, client: ap.Client) -> None:
    """What was acknowledged before, to whomever, is in a snapshot of now."""
    won = set(scene.ledger.written.get(WON, ()))
    if won:
        async with client.reader("race", SCHEMA) as reader, reader.snapshot() as snapshot:
            compared(scene, won, await snapshot.rows())


def compared(scene: Scene, won: set[int], rows: list[Any]) -> set[int]:
    """The batches that are there: each of those that were `won`, none that was refused, whole, and once."""
    sent = scene.ledger.written.get(SENT, {})
    assert {diff for _, _, diff in rows} <= {1}, f"rows of a race twice: {rows}"
    sizes = Counter(int(key) for key, _, _ in rows)
    assert won <= sizes.keys(), f"lost from a race: {won - sizes.keys()}"
    lost = scene.ledger.written.get(LOST, {}).keys()
    assert not sizes.keys() & lost, f"refused in a race, and there: {sizes.keys() & lost}"
    broken = {number: size for number, size in sizes.items() if size != sent[number].size}
    assert not broken, f"not whole, of a race: {broken}"
    return set(sizes)


async def check(scene: Scene, honest: ap.Client) -> None:
    """At the end: those that are there follow each other from 0 to the upper."""
    upper: Any = (await honest.upper("race")).time
    rows: list[Any] = []
    if upper:
        async with honest.reader("race", SCHEMA) as reader, reader.snapshot() as snapshot:
            rows = await snapshot.rows()
    sent, won = (scene.ledger.written.get(name, {}) for name in (SENT, WON))
    there = sorted(sent[number] for number in compared(scene, set(won), rows))
    assert [0, *(one.upper for one in there)] == [*(one.lower for one in there), upper], (there, upper)
