"""Moves: steps and compactions by hand, at odd moments and wrongly."""

from typing import Any

import aiopersist as ap
from aiopersist.indexed import UnknownStream
from tests.indexed.game.batches import check_merged, check_requests, check_step, inspected
from tests.indexed.game.state import TRANSIENT, Game, Player


async def step(game: Game) -> None:
    player = game.owner
    assert player is not None
    before = await inspected(game, player)
    try:
        requests = await player.ix.step()
    except (*TRANSIENT, ap.BatchExpired, ap.LeaseExpired) as error:
        game.note(f"step failed {error!r:.60}")
        assert game.faulty
        return
    game.note(f"step {requests}")
    after = await inspected(game, player)
    if before is not None and after is not None:
        for name in game.model.streams:
            check_step(game, name, before[name], after[name])
        check_requests(game, player, after, {request.stream: request for request in requests})
    player.flights |= {request.stream: request for request in requests}


async def compact(game: Game) -> None:
    """Carry out a compaction; hand in the result, an error, both, or something old."""
    player, choice = game.owner, game.rng.random()
    assert player is not None
    if game.responses and choice < 0.2:
        await hand_in(game, player, *game.rng.choice(game.responses))
        return
    if player.flights and choice < 0.3:
        await hand_in(game, player, game.rng.choice([*player.flights]), OSError("it failed"))
        return
    if not player.flights:
        await step(game)
        if game.rng.random() < 0.3:
            return
    if player.background or not player.flights:
        return
    name = game.rng.choice([*player.flights])
    try:
        response = await player.ix.compact(player.flights[name])
    except TRANSIENT:
        assert game.faulty
        return
    except UnknownStream:
        assert name not in game.model.streams or not game.decided
        player.flights.pop(name)
        return
    game.rude = True
    game.responses = [*game.responses[-3:], (name, response)]
    if game.rng.random() < 0.25:  # an error is told first, and it is asked for again
        await hand_in(game, player, name, OSError("it failed"))
        await step(game)
    for _ in range(game.rng.choice([0, 1, 1, 1, 2])):
        await hand_in(game, player, name, response)


async def hand_in(game: Game, player: Player, name: str, response: Any) -> None:
    before, unexpected = await inspected(game, player), player.ix.counters()["unexpected_responses"]
    done = player.ix.counters()["compactions"]
    failed = isinstance(response, OSError)
    fits = name in player.flights and (failed or response.request is player.flights[name])
    game.note(f"hand in {name} fits={fits} failed={failed}")
    try:
        await player.ix.apply(name, response)
    except TRANSIENT:
        assert game.faulty
        if fits:
            del player.flights[name]
        return
    if fits:
        del player.flights[name]
    after, counters = await inspected(game, player), player.ix.counters()
    if player.background or before is None or after is None:
        return
    there = name in game.model.streams
    assert counters["unexpected_responses"] - unexpected == (not fits or not there), (name, fits)
    assert counters["compactions"] - done == (fits and there and not failed)
    changed = {n: view for n, view in after.items() if view.trace != before[n].trace}
    assert set(changed) == ({name} if fits and there and not failed else set()), (before, after)
    if changed:
        game.counts["compacted"] += 1
        check_merged(game, name, response, before[name], after[name])
