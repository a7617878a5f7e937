"""Moves: snapshots, by the owner and by a reader; what they show decides what is possible, and stays."""

import asyncio
from typing import Any

import aiopersist as ap
from aiopersist.indexed import UnknownStream
from tests.indexed.game.calls import close, outcome, read_carefully
from tests.indexed.game.draws import some_name
from tests.indexed.game.model import Look
from tests.indexed.game.state import TRANSIENT, TYPES, Game, Player, kind_of, stream


async def owner_looks(game: Game) -> None:
    assert game.owner is not None
    await look(game, game.owner)


async def look_at_all(game: Game) -> None:
    """To decide what is possible."""
    assert game.owner is not None
    for name in {name: None for w in game.possible.worlds for name in w.model.streams}:
        game.possible.saw(name, await outcome(game, game.owner, Look(name)))


async def reader_looks(game: Game) -> None:
    if game.reader is None or game.rng.random() < 0.05:
        if game.reader is not None:
            await close(game, game.reader)
        game.reader = await game.open(readonly=True)
        refusals = await asyncio.gather(game.reader.ix.step(), return_exceptions=True)
        assert isinstance(refusals[0], ap.InvalidUsage)
    await look(game, game.reader)


async def look(game: Game, player: Player) -> None:
    name = some_name(game)
    try:
        snapshot = await player.ix.snapshot(stream(name))
    except UnknownStream:
        game.possible.saw(name, ("UnknownStream",))
        return
    except TRANSIENT:
        assert game.faulty
        return
    seen = await read_carefully(game, snapshot)
    game.note(f"look {name} owner={player is game.owner} {seen}")
    game.possible.saw(name, seen)
    if seen[0] != "failed":
        await check_unsealed(game, name, snapshot)
    if seen[0] != "failed" and len(player.snapshots) < 2 and game.rng.random() < 0.3:
        player.snapshots.append((snapshot, name, seen))
    else:
        await snapshot.aclose()


async def check_unsealed(game: Game, name: str, snapshot: Any) -> None:
    """Unsealed updates are there as they came; the updates of the trace are before the seal."""
    if not game.decided:
        return
    kept = game.model.streams[name]
    try:
        beyond = (await snapshot.unsealed_rows(snapshot.seal)).rows()
        trace = (await snapshot.trace_rows()).rows()
    except TRANSIENT:
        assert game.faulty
        return
    assert [tuple(row) for row in beyond] == [row for row in kept.rows if row[2] >= kept.seal]
    assert all(time < max(kept.seal, kept.since + 1) for _, _, time, _ in trace)


async def look_again(game: Game) -> None:
    """A snapshot shows the same for as long as it is open, beside any other work."""
    held = [
        (player, entry)
        for player in (game.owner, game.reader, game.ghost)
        if player is not None
        for entry in player.snapshots
    ]
    if not held:
        return
    player, entry = game.rng.choice(held)
    snapshot, name, before = entry
    seen = await read_carefully(game, snapshot)
    game.note(f"again {name}")
    assert seen in (("failed",), before), (name, seen, before)
    if game.rng.random() < 0.3:
        player.snapshots.remove(entry)
        await snapshot.aclose()


async def describe(game: Game) -> None:
    """`description` and `load` say what is there."""
    player = game.rng.choice([p for p in (game.owner, game.reader) if p is not None])
    if not game.decided:
        return
    name = some_name(game)
    key, val = TYPES[kind_of(name)]
    try:
        found = await player.ix.load(name, key, val)
        assert (found is not None) == (name in game.model.streams), (name, found)
    except UnknownStream:
        assert name in game.model.destroyed
    except TRANSIENT:
        assert game.faulty
    try:
        said = await player.ix.description(name)
        kept = game.model.streams[name]
        assert (said.lower.time, said.upper.time, said.since.time) == (0, kept.seal, kept.since), said
    except UnknownStream:
        assert name not in game.model.streams
    except TRANSIENT:
        assert game.faulty
