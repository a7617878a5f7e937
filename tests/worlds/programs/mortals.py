"""Programs on shards that end: one drops the shard `mortal` again and again, and has its tombstones removed,
while others write to it. Under the name the next one is made.

Before it is dropped a shard is closed, so that nobody can append any more, and its rows are noted."""

import asyncio
from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA
from tests.worlds.scene import HONEST, LEASE_S, Scene

NAME = "mortal"
RETENTION_S = 3 * LEASE_S
LONG_S = (0.0, 0.002, 1.5 * RETENTION_S)
"""How long a cancelled append waits until it is settled: in the end for longer than a tombstone stays."""
WON, LOST, BURIED = "mortal won", "mortal lost", "mortal buried"
"""Where the ledger has the shard that took a number; those that surely have none; and the numbers of a shard
that was closed."""


async def mortal(scene: Scene, name: str, client: ap.Client) -> None:
    """Writes numbers, each sent once, to whatever shard has the name."""
    while scene.ledger.done[name] < scene.writes:
        try:
            async with client.writer(NAME, SCHEMA) as handle:
                while scene.ledger.done[name] < scene.writes:
                    await appended(scene, handle, name)
                    await scene.pause()
        except (ap.ShardFinalized, ap.LeaseExpired):
            scene.counts["shards ended"] += 1
            await scene.pause()


async def appended(scene: Scene, handle: Any, name: str) -> None:
    """One number; its call may be cancelled."""
    upper = (await handle.fetch_recent_upper()).elements
    if not upper:  # closed, and not dropped yet
        await scene.pause()
        return
    (time,) = upper
    number = scene.number(name)
    call = asyncio.create_task(handle.compare_and_append([(*scene.row(number), time, 1)], time, time + 1))
    if scene.rolled(0.5):
        await scene.world.sleep(scene.dice.choice([0.001, 0.002, 0.005]))
        call.cancel()
    try:
        await call
    except (asyncio.CancelledError, ap.Indeterminate):
        await scene.world.sleep(scene.dice.choice(LONG_S))
        await settled(scene, handle, number)
    except ap.UpperMismatch:
        scene.ledger.write(LOST, number, None)
    else:
        scene.ledger.write(WON, number, handle.shard_id)


async def settled(scene: Scene, handle: Any, number: int) -> None:
    try:
        outcome = await handle.settle()
    except ap.Indeterminate:
        scene.counts["mortal settled: unknowable"] += 1
        return
    scene.counts[f"mortal settled: {type(outcome).__name__}"] += 1
    if isinstance(outcome, ap.Committed):
        scene.ledger.write(WON, number, handle.shard_id)
    elif outcome is not None:
        scene.ledger.write(LOST, number, None)


async def undertaker(scene: Scene, name: str, client: ap.Client) -> None:
    """Closes the shard, notes what it has, drops it, and looks after tombstones."""
    while not scene.is_over:
        try:
            if await closed(scene, client):
                await client.admin.drop(NAME)
                scene.counts["dropped shards"] += 1
            await client.admin.maintain()
        except (*HONEST, ap.UnknownShard) as error:
            scene.counts[f"not dropped: {type(error).__name__}"] += 1
        await (scene.slowly() if scene.rolled(0.5) else scene.world.sleep(RETENTION_S))


async def closed(scene: Scene, client: ap.Client) -> bool:
    """Whether there is something to drop. A life before this one may have dropped half of it."""
    if NAME not in await client.list_shards():
        return False
    try:
        async with client.writer(NAME, SCHEMA) as handle:
            upper = await handle.fetch_recent_upper()
            if upper.elements:
                await handle.compare_and_append([], upper, ap.Antichain())
            rows = await numbers(client)
    except ap.UpperMismatch:
        return False
    except ap.ShardFinalized:
        return True
    scene.ledger.write(BURIED, handle.shard_id, rows)
    return True


async def numbers(client: ap.Client) -> set[int]:
    """Those in the shard, each there once."""
    async with client.reader(NAME, SCHEMA) as reader, reader.snapshot() as snapshot:
        rows = await snapshot.rows()
    found = {val for _, val, _ in rows}
    assert len(found) == len(rows) and {diff for _, _, diff in rows} <= {1}, f"twice in a shard: {rows}"
    return found


async def check(scene: Scene, honest: ap.Client) -> None:
    """What was acknowledged was in its shard to the end, and what was refused is in none."""
    buried = dict(scene.ledger.written.get(BURIED, {}))
    if NAME in await honest.list_shards():
        try:
            shard = (await honest.inspect(NAME)).shard_id
            upper = await honest.upper(NAME)
            buried[shard] = set() if upper == ap.Antichain(0) else await numbers(honest)
        except ap.ShardFinalized:  # its undertaker had no time to drop all of it
            await honest.drop(NAME)
        except ap.UnknownShard:  # it has a name only
            pass
    won, lost = (scene.ledger.written.get(name, {}) for name in (WON, LOST))
    missing = {number: shard for number, shard in won.items() if number not in buried[shard]}
    assert not missing, f"acknowledged, and missing when their shard ended: {missing}"
    there = [number for found in buried.values() for number in found]
    assert len(there) == len(set(there)), f"in two shards: {there}"
    assert not lost.keys() & set(there), f"refused, and there: {lost.keys() & set(there)}"
