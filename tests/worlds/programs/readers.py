"""Programs that read `events`, and that keep its history: leases, named holds, critical holds."""

from typing import Any

import aiopersist as ap
from tests.worlds.scene import LEASE_S, Scene

LONG_S = 300.0
LEASED_S = 3 * LEASE_S / 4  # what was open for less has no reason to be lost


async def reader(scene: Scene, name: str, client: ap.Client) -> None:
    """Snapshots of now and of earlier, some of them read long after they were opened."""
    while not scene.is_over:
        began, as_of = scene.world.now_s, None
        try:
            async with scene.reader(client) as reader:
                since, upper = reader.since.time, (await reader.fetch_recent_upper()).time
                as_of = None if since >= upper or scene.rolled(0.5) else scene.dice.randrange(since, upper)
                async with reader.snapshot(as_of) as snapshot:
                    began = scene.world.now_s
                    await scene.slowly()
                    await scene.check_contents(snapshot)
        except ap.LeaseExpired:
            assert scene.world.now_s - began > LEASED_S, "a snapshot was lost while its lease ran"
        except ap.NotReadable:
            scene.counts["not readable"] += 1
        except ap.SinceViolation:
            assert as_of is not None, "the newest contents cannot be read"
            scene.counts["not readable"] += 1
        await scene.pause()


async def listener(scene: Scene, name: str, client: ap.Client) -> None:
    """Is told each update once, across crashes: it keeps its cursor with what it was told."""
    heard = scene.ledger.heard.setdefault(name, [])
    async with scene.reader(client, hold_name=name, lease_s=LONG_S) as reader:
        while not scene.is_over:
            cursor = scene.ledger.cursors.get(name)
            try:
                async with reader.listen(cursor=cursor) if cursor else reader.subscribe() as listen:
                    steps = listen.steps()
                    while (step := await scene.next_of(steps)) is not None:
                        heard += list(step.updates.rows())
                        scene.ledger.cursors[name] = step.cursor
                        scene.ledger.promised[name] = step.upper.time
                        scene.counts["heard"] += 1
            except ap.NotReadable:
                await scene.pause()


async def holder(scene: Scene, name: str, client: ap.Client) -> None:
    """A hold that the next life takes over keeps what it was told to keep."""
    while not scene.is_over:
        try:
            async with scene.reader(client, hold_name=name, lease_s=LONG_S) as reader:
                promised = scene.ledger.promised.get(name, 0)
                assert reader.since.time >= promised, (reader.since, promised)
                scene.ledger.promised[name] = reader.since.time
                while not scene.is_over:
                    await kept(scene, reader, name, reader.since.time)
                    upper = (await reader.fetch_recent_upper()).time
                    if upper > reader.since.time + 1:
                        target = scene.dice.randrange(reader.since.time, upper)
                        moved = await reader.downgrade_since(target)
                        assert moved.time >= target, (moved, target)
                        scene.ledger.promised[name] = moved.time
                    await scene.slowly()
        except ap.OpaqueMismatch:
            scene.counts["holds taken over"] += 1


async def kept(scene: Scene, reader: Any, name: str, as_of: int) -> None:
    """What it holds is readable, unless it was only just moved."""
    upper = (await reader.fetch_recent_upper()).time
    if as_of >= upper:
        return
    try:
        async with reader.snapshot(as_of) as snapshot:
            await scene.check_contents(snapshot)
            scene.counts["held"] += 1
    except ap.LeaseExpired:
        scene.counts["not readable"] += 1


async def owner(scene: Scene, name: str, client: ap.Client) -> None:
    """A critical hold, which several fight for: whoever moved it last knows where it is."""
    async with client.critical_since("events", "owned") as critical, scene.reader(client) as reader:
        mine = scene.dice.getrandbits(30)
        opaque = critical.opaque
        while not scene.is_over:
            upper, since = (await reader.fetch_recent_upper()).time, critical.since.time
            target = since if upper <= since + 1 else scene.dice.randrange(since, upper)
            try:
                moved = await critical.compare_and_downgrade_since(opaque, mine, target)
            except ap.OpaqueMismatch as error:
                scene.promise(error.actual != opaque, error)
                scene.counts["owners fenced"] += 1
                opaque = critical.opaque if scene.rolled(0.5) else mine
                continue
            opaque = mine
            scene.ledger.promised["owned"] = max(scene.ledger.promised.get("owned", 0), moved.time)
            scene.counts["critical"] += 1
            await scene.slowly()
            if moved.time < upper:
                await check_kept(scene, client, reader, moved.time)


async def check_kept(scene: Scene, client: ap.Client, reader: Any, since: int) -> None:
    """What a critical hold keeps is readable, unless its owner has moved it."""
    try:
        async with reader.snapshot(since) as snapshot:
            await scene.check_contents(snapshot)
    except ap.LeaseExpired:
        scene.counts["not readable"] += 1
    except ap.SinceViolation as error:
        now = (await client.admin.inspect("events")).critical["owned"].since.time
        scene.promise(now > since, f"a critical hold at {now} did not keep {since}: {error}")
