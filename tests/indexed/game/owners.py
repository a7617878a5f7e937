"""Moves: owners come and go. One is killed, stopped, or taken over from, with calls on their way; the one
that was taken over from goes on as a *ghost*, and must change nothing."""

import asyncio

import aiopersist as ap
from aiopersist.indexed import Fenced
from tests.indexed.game.calls import close, drained, outcome
from tests.indexed.game.draws import some_changes, some_command, some_name
from tests.indexed.game.model import ANSWERS, Destroy, Look, Register
from tests.indexed.game.state import TRANSIENT, Game, Player
from tests.indexed.seeded_loop import spin


async def open_owner(game: Game) -> None:
    game.owner = await game.open(background=game.rng.random() < 0.2)
    game.possible.decide(expand=True)
    game.note(f"open {'with background' if game.owner.background else ''}")


async def crash(game: Game) -> None:
    """Kill the owner, perhaps in the middle of commands."""
    assert game.owner is not None
    commands = some_changes(game, 1) if game.rng.random() < 0.7 else []
    tasks = [asyncio.create_task(outcome(game, game.owner, command)) for command in commands]
    stepping = asyncio.create_task(careless_step(game, game.owner))
    await spin(game.rng.randrange(25))
    game.owner.line.is_cut = True
    for task in (*tasks, stepping):
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(stepping, return_exceptions=True)
    results = [("gone",) if isinstance(r, asyncio.CancelledError) else r for r in done]
    for result in results:
        if isinstance(result, BaseException):
            raise result
    await game.kill(game.owner)
    game.rude = True
    game.note(f"crash {commands} -> {results}")
    game.possible.judge(commands, results)
    game.possible.decide(expand=True)
    game.owner = None


async def careless_step(game: Game, player: Player) -> None:
    if game.rng.random() < 0.5:
        try:
            await player.ix.step()
        except ap.Error:
            assert game.faulty


async def take_over(game: Game) -> None:
    """Another one opens, while commands of the old one are on their way."""
    assert game.owner is not None
    if game.ghost is not None:
        await game.kill(game.ghost)
    game.ghost, commands = game.owner, some_changes(game, 0)
    calls = asyncio.gather(*(outcome(game, game.ghost, command) for command in commands))
    opening = game.open(background=game.rng.random() < 0.1)
    game.owner, results = await asyncio.gather(opening, calls)
    game.rude = True
    game.note(f"take over {commands} -> {results}")
    game.possible.judge(commands, results)
    game.possible.decide(expand=True)


async def stop(game: Game) -> None:
    """Stop the owner, with commands on their way."""
    assert game.owner is not None
    commands = some_changes(game, 0)
    tasks = [asyncio.create_task(outcome(game, game.owner, command)) for command in commands]
    await spin(game.rng.randrange(3))
    await close(game, game.owner)
    results = await asyncio.gather(*tasks)
    game.note(f"stop {commands} -> {results}")
    game.possible.judge(commands, results)
    game.owner = None


async def ghost_acts(game: Game) -> None:
    """What was taken over from changes nothing, and shows the past until it knows."""
    if game.ghost is None:
        return
    knew, choice = game.ghost.fenced, game.rng.random()
    if choice < 0.4:
        name = some_name(game)
        seen = await outcome(game, game.ghost, Look(name))
        assert seen[0] in ("Fenced", "failed") if knew else True, seen
        assert seen[0] in ("Fenced", "failed") or game.possible.was_possible(name, seen), seen
    elif choice < 0.8:
        command = some_command(game)
        seen = await outcome(game, game.ghost, command)
        idle = isinstance(command, Register | Destroy) and seen[0] in ANSWERS and not knew
        assert seen[0] in (("Fenced",) if knew else ("Fenced", "failed", "unknown")) or idle, (
            command,
            seen,
        )
        if idle and isinstance(command, Destroy):
            assert seen != ("done", True)
    else:
        await ghost_steps(game, game.ghost, knew)
    game.note(f"ghost {choice:.1f} {knew}")
    if game.ghost.fenced:
        await check_fenced(game, game.ghost)


async def check_fenced(game: Game, ghost: Player) -> None:
    """Its listeners end and say so, and so does every call."""
    calls = [
        ghost.ix.step(),
        ghost.ix.load("s0", str, int),
        ghost.ix.inspect("s0"),
        ghost.ix.destroy("s0"),
    ]
    told = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(each, Fenced) for each in told), told
    for listening in ghost.listeners:
        told = await asyncio.gather(drained(listening.events), return_exceptions=True)
        assert isinstance(told[0], Fenced | ap.LeaseExpired) or listening.name in game.model.destroyed, told
    ghost.listeners = []


async def ghost_steps(game: Game, ghost: Player, knew: bool) -> None:
    try:
        await ghost.ix.step()
    except Fenced:
        ghost.fenced = True
    except (*TRANSIENT, ap.LeaseExpired, ap.BatchExpired):
        assert game.faulty
    else:
        assert not knew
