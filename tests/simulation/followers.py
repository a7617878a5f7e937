"""Actors: followers listen, go away and come back by cursor; sleepers outlive the leases of what they have
open."""

import asyncio
import random
from datetime import timedelta
from typing import Any

import aiopersist as ap
from tests.simulation.game import ENDLESS_S, Game, nap, pause
from tests.simulation.verdict import Told
from tests.simulation.world import HONEST


async def follower(game: Game, rng: random.Random, client: ap.Client, told: Told) -> None:
    """Follows to the end, with pauses; goes away and comes back by cursor, perhaps after its process was
    killed. Whoever holds on to what it was not told yet must never find history given up."""
    named = {"hold_name": told.name, "lease_s": ENDLESS_S} if told.faithful == "named" else {}
    async with client.reader(game.name, game.schema, create=True, **named) as handle:
        hold: Any = handle
        if told.faithful == "critical":
            hold = await client.critical_since(game.name, told.name)
        while True:
            try:
                async with await open_listen(game, rng, handle, hold, told) as listen:
                    if await follow(game, rng, handle, hold, listen, told):
                        return
            except ap.LeaseExpired:
                game.counts["lease expired"] += 1
            except ap.SinceViolation as error:
                game.counts["history given up"] += 1
                game.seen.promise(not told.faithful, error)
                return


async def open_listen(game: Game, rng: random.Random, handle: Any, hold: Any, told: Told) -> ap.Listen:
    if not told.cursor:
        return await begin(game, rng, handle, hold, told)
    game.counts["resumed"] += 1
    assert told.cursor.isascii() and told.cursor.replace("-", "").replace("_", "").isalnum()
    return await (handle.listen if rng.random() < 0.5 else handle.subscribe)(cursor=told.cursor)


async def begin(game: Game, rng: random.Random, handle: Any, hold: Any, told: Told) -> ap.Listen:
    upper = await handle.fetch_recent_upper()
    time = rng.choice(game.within(hold.since, game.after(rng, upper)) or [upper.join(hold.since).elements[0]])
    way = rng.choice(["listen", "subscribe", "listen at", "subscribe at"])
    if told.faithful or game.product:
        way = rng.choice(["listen at", "subscribe at"])
    if way == "listen":
        listen = await handle.listen()
    elif way == "subscribe":
        listen = await handle.subscribe()
    else:
        listen = await (handle.listen if "listen" in way else handle.subscribe)(as_of=time)
    told.snapshot = "subscribe" in way and listen.as_of is not None
    told.as_of, told.begin = listen.as_of, listen.frontier
    told.frontier, told.cursor = listen.frontier, listen.cursor
    game.seen.follows.append(told)
    return listen


async def follow(game: Game, rng: random.Random, handle: Any, hold: Any, listen: Any, told: Told) -> bool:
    """For a while; whether all has been told."""
    steps = rng.random() < 0.5
    while rng.random() < 0.9:
        if await has_all(game, handle, listen):
            return True
        updates = await (take_step(game, rng, listen) if steps else take_items(game, rng, listen))
        told.seen += updates
        told.frontier, told.cursor = listen.frontier, listen.cursor
        if rng.random() < 0.3 and told.faithful:
            await let_go(game, hold, told)
        await (nap(rng) if rng.random() < 0.1 else pause(rng))
    return False


async def let_go(game: Game, hold: Any, told: Told) -> None:
    """Of what lies before the cursor. A snapshot that was not told yet begins at its frontier."""
    assert told.frontier is not None
    done = told.frontier != told.begin or not told.snapshot
    since = ap.Antichain(*(max(e - 1, 0) if done else e for e in told.frontier.elements))
    try:
        if told.faithful == "named":
            await hold.downgrade_since(since)
        else:
            await hold.compare_and_downgrade_since(hold.opaque, hold.opaque, since)
    except ap.Indeterminate:
        game.counts["unknowable"] += 1


async def take_step(game: Game, rng: random.Random, listen: ap.Listen) -> list[Any]:
    try:
        async with asyncio.timeout(rng.choice([0, 0.001, 0.01, 0.1])):
            step = await anext(listen.steps())
    except TimeoutError:
        return []
    assert step.upper == listen.frontier
    return step.updates.rows()


async def take_items(game: Game, rng: random.Random, listen: ap.Listen) -> list[Any]:
    """Items up to the next progress. Before anything came the wait may be given up."""
    pending: list[Any] = []
    while True:
        try:
            item = await asyncio.wait_for(anext(listen), rng.choice([0, 0.001, 0.01, 0.1]))
        except TimeoutError:
            if not pending and rng.random() < 0.5:
                return []
            continue
        if isinstance(item, ap.Progress):
            assert item.upper == listen.frontier
            return pending
        pending += item.rows()


async def has_all(game: Game, handle: Any, listen: ap.Listen) -> bool:
    if game.writing:
        return False
    upper = await handle.fetch_recent_upper()
    due = listen.frontier == ap.Antichain(listen.as_of) if listen.as_of is not None else False
    return bool(upper <= listen.frontier) or (due and upper.less_equal(listen.as_of))


async def sleeper(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    """Falls asleep over what it has open, until its lease has run out and what it held is compacted and
    collected: when it wakes up it is told so, or reads on rightly."""
    for _ in range(moves // 5):
        told = Told()
        try:
            async with (
                client.reader(game.name, game.schema, create=True) as handle,
                await begin(game, rng, handle, handle, told) as listen,
                handle.snapshot(any_time(game, rng, handle), wait=False) as snapshot,
            ):
                await forget_all(game, rng)
                await follow(game, rng, handle, handle, listen, told)
                game.seen.snapshots.append((snapshot.as_of, await snapshot.rows()))
        except ap.LeaseExpired:
            game.counts["lease expired"] += 1
        except (ap.SinceViolation, ap.NotReadable):
            game.counts["history given up"] += 1


async def forget_all(game: Game, rng: random.Random) -> None:
    """Let the leases of readers run out, and keep nothing but the newest time."""
    game.world.clock.jump(rng.choice([500, 1000]))
    async with game.client(rng) as other:
        try:
            await other.retain(game.name, timedelta(0) if game.product else 1)
            await other.force_compaction(game.name)
            await other.force_gc(game.name)
            await other.retain(game.name, None)
        except HONEST as error:
            game.counts[f"forget: {type(error).__name__}"] += 1


def any_time(game: Game, rng: random.Random, handle: Any) -> Any:
    least = (0, 0) if game.product else 0
    return rng.choice(game.within(handle.since, game.after(rng, handle.upper)) or [least])
