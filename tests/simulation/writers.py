"""Actors: writers append by every way there is, and may be cut off in the middle of any call."""

import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import aiopersist as ap
from tests.simulation.game import Game, pause
from tests.simulation.verdict import Piece

REFUSED = (ap.UpperMismatch, ap.LeaseExpired, ap.BatchExpired)  # an append that surely did not happen


async def writer(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    handle: ap.WriteHandle[str, int] = await client.writer(game.name, game.schema)
    for _ in range(moves):
        await pause(rng)
        if rng.random() < 0.1:
            await handle.aclose()
            handle = await client.writer(game.name, game.schema)
        if game.definite or game.product or rng.random() < 0.6:
            await append(game, rng, handle)
        else:
            await write(game, rng, handle)
    await handle.aclose()


async def append(game: Game, rng: random.Random, handle: ap.WriteHandle[str, int]) -> None:
    lower = handle.upper if rng.random() < 0.7 else await handle.fetch_recent_upper()
    upper = game.after(rng, lower)
    rows = game.rows(rng, game.within(lower, upper))
    rng.shuffle(rows)
    piece = Piece(rows, lower, upper)
    if game.definite and not game.product and rng.random() < 0.5:
        (time,) = lower.elements
        begin = max(0, time - rng.choice([0, 1, 4]))  # type: ignore[operator]
        rows = game.rows(rng, list(range(begin, upper.elements[0])))  # type: ignore[arg-type]
        call = handle.append(rows, begin, upper)
    else:
        call = handle.compare_and_append(rows, lower, upper)
    await cut_off(game, rng, handle, call, piece)


async def write(game: Game, rng: random.Random, handle: ap.WriteHandle[str, int]) -> None:
    piece = Piece(game.rows(rng, [0]))
    if piece.rows:
        await cut_off(game, rng, handle, handle.write([(k, v, d) for k, v, _, d in piece.rows]), piece)


async def cut_off(
    game, rng: random.Random, handle: ap.WriteHandle[str, int], call: Awaitable[Any], piece: Piece
) -> None:
    """Note what became of the call, perhaps by `settle` after it was cut off. If this process is killed
    meanwhile, the outcome is unknown."""
    game.seen.pieces.append(piece)
    try:
        if rng.random() < 0.6:
            result = await call
        else:
            async with asyncio.timeout(rng.choice([0, 0.0002, 0.001, 0.004, 0.02])):
                result = await call
    except REFUSED as error:
        game.counts[type(error).__name__] += 1
        piece.happened = False
    except (TimeoutError, ap.Indeterminate):
        game.counts["cut off"] += 1
        await settled(game, handle, piece)
    else:
        piece.happened = True
        if piece.lower is None:
            piece.at(result)


async def settled(game: Game, handle: ap.WriteHandle[str, int], piece: Piece) -> None:
    try:
        outcome = await handle.settle()
    except ap.Indeterminate:  # its registration and its version are gone
        game.counts["unknowable"] += 1
        return
    piece.happened = isinstance(outcome, ap.Committed)
    game.counts["and committed"] += piece.happened
    if isinstance(outcome, ap.Committed) and piece.lower is None:
        piece.at(outcome.upper.elements[0] - 1)  # type: ignore[operator]
