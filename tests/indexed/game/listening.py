"""Moves: listeners are told exactly what came after their snapshots, in order, or that they are behind."""

import asyncio
from itertools import groupby
from typing import Any

import aiopersist as ap
from aiopersist.indexed import Records, Sealed
from tests.indexed.game.calls import read_carefully
from tests.indexed.game.draws import some_name
from tests.indexed.game.model import Told
from tests.indexed.game.state import SPINS, TRANSIENT, Game, Listening, stream


async def listen(game: Game) -> None:
    player, name = game.rng.choice([p for p in (game.owner, game.reader) if p is not None]), some_name(game)
    if name not in game.model.streams or not game.decided or len(player.listeners) > 3:
        return
    try:
        snapshot, events = await player.ix.listen(stream(name))
    except TRANSIENT:
        assert game.faulty
        return
    game.note(f"listen {name} owner={player is game.owner}")
    owners = player is game.owner
    player.listeners.append(Listening(name, events, snapshot.seqno, snapshot.seal.time, owners=owners))
    async with snapshot:
        game.possible.saw(name, await read_carefully(game, snapshot))


async def take_all(game: Game, *, every: bool = False) -> None:
    """Listeners have been told exactly what came after their snapshots."""
    if not game.decided:
        return
    for player in (game.owner, game.reader):
        for listening in [*(player.listeners if player is not None else [])]:
            if not every and game.rng.random() < 0.5:
                continue
            if not await take(game, listening):
                assert player is not None
                player.listeners.remove(listening)
                await listening.events.aclose()


async def take(game: Game, of: Listening) -> bool:
    """All that is to be taken now; whether it goes on."""
    log = [told for told in game.model.log if told.name == of.name]
    log = [told for told in log if told.seqno > of.start or told.what == "end"][of.taken :]
    of.taken += len(log)
    ends = any(told.what == "end" for told in log)
    segments = [[*many] for _, many in groupby((t for t in log if t.what != "end"), lambda t: t.segment)]
    most = game.settings.listen_queue_max
    must = of.owners and least_commits(game, of, segments) > most
    may = sum(map(len, segments)) > most
    try:
        for many in segments:
            await take_segment(game, of, many)
        rest = await next_event(game, of, wanted=ends)
    except ap.LeaseExpired:
        assert may, f"the listener of {of.name} is not behind"
        game.counts["behind"] += 1
        return False
    assert not must, f"the listener of {of.name} is {len(segments)} commits behind"
    assert rest is (StopAsyncIteration if ends else None), rest
    game.counts["told"] += len(segments)
    return not ends


def least_commits(game: Game, of: Listening, segments: list[list[Told]]) -> int:
    """In how many commits these were at least that there is anything to tell of."""
    seal, least = of.seal, 0
    for many in segments:
        last = max((told.data for told in many if told.what == "seal"), default=seal)
        least += last > seal or any(told.what == "rows" for told in many)
        seal = last
    return least


async def take_segment(game: Game, of: Listening, many: list[Told]) -> None:
    """Concurrent calls are told in one commit or several, in order."""
    rows = [row for told in many if told.what == "rows" for row in told.data]
    seals = [told.data for told in many if told.what == "seal"]
    alone, got = len({told.seqno for told in many}) == 1, 0
    while got < len(rows) or (seals and of.seal != seals[-1]):
        event = await next_event(game, of, wanted=True)
        if isinstance(event, Records):
            came = [tuple(row) for row in event.updates.rows()]
            assert came, "an event without updates"
            assert came == rows[got : got + len(came)], (of.name, came, rows[got:])
            assert not alone or len(came) == len(rows)
            got += len(came)
        else:
            assert isinstance(event, Sealed), event
            assert event.time in seals and event.time >= of.seal, (event, seals, of.seal)
            assert not alone or got == len(rows)
            of.seal = event.time


async def next_event(game: Game, of: Listening, *, wanted: bool) -> Any:
    """The next event, or that it ended; `None` if nothing comes that is not wanted."""
    for attempt in range(1000):
        task = asyncio.ensure_future(anext(of.events))
        for turn in range(SPINS * (4 if wanted else 1)):
            if task.done():
                break
            await asyncio.sleep(0 if turn < SPINS else 0.001)
        if not task.done():
            task.cancel()
        try:
            return await task
        except StopAsyncIteration:
            return StopAsyncIteration
        except asyncio.CancelledError:
            assert not wanted, f"the listener of {of.name} is told nothing"
            return None
        except TRANSIENT:
            assert game.faulty and attempt < 900
    raise AssertionError("nothing but failures")
