"""Moves: the owner writes, seals and gives up history, one call at a time, several, or some cut off."""

import asyncio

from tests.indexed.game.batches import check_batches, next_batch
from tests.indexed.game.calls import outcome
from tests.indexed.game.draws import some_changes, some_command, some_commands
from tests.indexed.game.model import Destroy
from tests.indexed.game.state import Game
from tests.indexed.seeded_loop import spin


async def command(game: Game) -> None:
    assert game.owner is not None
    command, game.possible.segment = some_command(game), game.possible.segment + 1
    game.note(f"{command}")
    batch = next_batch(game, command)
    result = await outcome(game, game.owner, command)
    game.story[-1] += f" -> {result}"
    game.possible.judge([command], [result])
    if batch is not None and result[0] == "seqno" and game.decided:
        await check_batches(game, batch)


async def together(game: Game) -> None:
    """Several calls at once: they take their seqnos in this order."""
    assert game.owner is not None
    commands = some_commands(game, 2)
    game.note(f"together {commands}")
    results = await asyncio.gather(*(outcome(game, game.owner, command) for command in commands))
    game.story[-1] += f" -> {results}"
    game.possible.judge(commands, results)
    game.possible.check_looks(commands, results)


async def cut_off(game: Game) -> None:
    """Calls that are cancelled on the way."""
    assert game.owner is not None
    commands = some_changes(game, 1)
    tasks = [asyncio.create_task(outcome(game, game.owner, command)) for command in commands]
    await spin(game.rng.randrange(12))
    for task in tasks:
        if game.rng.random() < 0.6:
            task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    results = [("cancelled", r) if isinstance(r, asyncio.CancelledError) else r for r in done]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    barrier = Destroy("s98")
    answer = await outcome(game, game.owner, barrier)
    game.rude = True
    game.note(f"cut off {commands} -> {results}")
    game.possible.judge([*commands, barrier], [*results, answer])
