"""Actors: readers take snapshots at any time, by every way there is, some with holds that must keep their
promise."""

import random
from typing import Any

import aiopersist as ap
from tests.simulation.game import ENDLESS_S, Game, give_up, nap, patient, pause


async def reader(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    handle, held = await open_reader(game, rng, client)
    for _ in range(moves):
        await pause(rng)
        if rng.random() < 0.1:
            await handle.aclose()
            handle, held = await open_reader(game, rng, client)
        try:
            if held and rng.random() < 0.3:
                await give_up(game, rng, handle)
            if rng.random() < 0.2:
                await share(game, rng, client, handle)
            else:
                await look(game, rng, handle)
        except ap.SinceViolation as error:
            kept = held and handle.since.less_equal(error.as_of)
            game.seen.promise(not kept and not error.since.less_equal(error.as_of), error)
            game.counts["history given up"] += 1
        except ap.NotReadable as error:
            game.seen.promise(error.as_of is None or error.upper.less_equal(error.as_of), error)
        except ap.LeaseExpired:  # of the reader that a process shares, under an open snapshot
            game.counts["lease expired"] += 1
    await handle.aclose()


async def open_reader(game, rng: random.Random, client: ap.Client) -> tuple[ap.ReadHandle[str, int], bool]:
    """A reader, and whether it has a hold, which never expires: not where it may be killed, since the
    hold would stay for ever."""
    handle: ap.ReadHandle[str, int] = await client.reader(game.name, game.schema, create=True)
    if game.deadly or rng.random() < 0.4:
        return handle, False
    try:
        held = await client.reader(game.name, game.schema, hold=handle.since, lease_s=ENDLESS_S)
    except ap.SinceViolation:  # it has moved on
        return handle, False
    await handle.aclose()
    return held, True


def some_time(game: Game, rng: random.Random, handle: ap.ReadHandle[str, int]) -> Any:
    """To read at, perhaps beyond what is complete; for int times also `None`."""
    if rng.random() < 0.3 and not game.product:
        return None
    times = game.within(handle.since, game.after(rng, game.after(rng, handle.upper)))
    return rng.choice(times or [(0, 0) if game.product else 0])


async def share(game: Game, rng: random.Random, client: ap.Client, handle: ap.ReadHandle[str, int]) -> None:
    """A snapshot in pieces, some of which another process reads."""
    opening = client.shared_read(game.name, some_time(game, rng, handle), wait=False)
    async with opening as read, game.client(rng) as other:
        rows = []
        for piece in await read.pieces(rng.choice([1, 3])):
            await (nap(rng) if rng.random() < 0.1 else pause(rng))
            async for batch in rng.choice([client, other]).read_piece(piece):
                rows += [(r["key"], r["val"], r["diff"]) for r in batch.to_pylist()]
        game.seen.snapshots.append((read.as_of, rows))
        game.counts["shared reads"] += 1


async def look(game: Game, rng: random.Random, handle: ap.ReadHandle[str, int]) -> None:
    async with handle.snapshot(some_time(game, rng, handle), wait=False) as snapshot:
        await (nap(rng) if rng.random() < 0.1 else pause(rng))
        way = rng.randrange(4)
        if way == 0:
            seen = await snapshot.rows()
        elif way == 1:
            seen = [row async for row in patient(rng, aiter(snapshot))]
        elif way == 2:
            tables = [batch.to_pylist() async for batch in patient(rng, snapshot.batches())]
            seen = [(r["key"], r["val"], r["diff"]) for rows in tables for r in rows]
        else:
            seen = (await snapshot.to_polars()).rows()
        game.seen.snapshots.append((snapshot.as_of, seen))
