"""Random commands to an `Indexed`, compared with a plain list of updates: `play(seed)` is one game.

An owner writes, seals and gives up history, one command at a time and several at once; readers look on;
steps and compactions are done by hand, at odd moments and wrongly; owners are killed, stopped, cut off in
their calls and taken over from; another client collects and sweeps. Stores fail. What was read is compared
at once with every state that is possible by what callers were told: there is more than one where an answer
was lost, until something that is read decides.

No time passes and no thread runs: clock, ids, delays and the order of tasks come from the seed, so a game is
repeated, but for the order in which sets of tasks end. A failure names its seed and what was done last.

| module | holds |
|---|---|
| `model.py` | the commands, and what the specification says that they do |
| `worlds.py` | the states that are possible |
| `state.py` | what the moves share: stores, players, story |
| `draws.py`, `calls.py` | a random command; one call, and what its caller is told |
| `commands.py`, `owners.py`, `looks.py`, `listening.py`, `steps.py` | the moves, with their checks |
| `batches.py`, `ending.py` | the checks on batches; those at the end |
| `play.py` | which move comes next, and the game from its beginning to its end |
"""

import asyncio
from collections import Counter

from aiopersist.indexed import UnknownStream
from aiopersist.testing.faults import Outcome
from tests.indexed.game.commands import command, cut_off, together
from tests.indexed.game.ending import verify
from tests.indexed.game.listening import listen, take_all
from tests.indexed.game.looks import describe, look_again, look_at_all, owner_looks, reader_looks
from tests.indexed.game.owners import crash, ghost_acts, open_owner, stop, take_over
from tests.indexed.game.state import NAME, TRANSIENT, Game
from tests.indexed.game.steps import compact, step
from tests.indexed.seeded_loop import no_threads
from tests.support.shards import RATES


async def play_to_the_end(game: Game) -> None:
    first = await game.maintainer()
    refused = await asyncio.gather(first.indexed(NAME, readonly=True), return_exceptions=True)
    assert isinstance(refused[0], UnknownStream)
    await first.aclose()
    if game.faulty:
        game.faults.rates = {outcome: rate * game.rng.choice([0.2, 1, 2]) for outcome, rate in RATES.items()}
    game.possible.keep(game.possible.worlds, "")
    await open_owner(game)
    for _ in range(game.rng.choice([20, 50, 50, 90])):
        await act(game)
    await verify(game)


async def act(game: Game) -> None:
    if game.owner is None:
        await game.rng.choice([open_owner, open_owner, reader_looks])(game)
        return
    if not game.decided and game.rng.random() < 0.5:
        await look_at_all(game)
    acts = [
        *[command] * 22,
        *[together] * 7,
        *[step] * 7,
        *[compact] * 6,
        *[owner_looks] * 5,
        *[reader_looks] * 4,
        *[listen] * 3,
        *[take_all] * 6,
        *[look_again] * 3,
        *[cut_off] * 2,
        maintain,
        sweep,
        *[ghost_acts] * 3,
        game.rng.choice([crash, take_over, stop]),
        storm,
        *[doubt] * (4 if game.faulty else 0),
        describe,
    ]
    await game.rng.choice(acts)(game)


async def maintain(game: Game) -> None:
    """Maintenance by another client."""
    client = await game.maintainer()
    try:
        report = await client.admin.maintain()
        assert game.faulty or not report.failures, report
    except TRANSIENT:
        assert game.faulty
    await client.aclose()
    game.note("maintain")


async def sweep(game: Game) -> None:
    client = await game.maintainer()
    try:
        swept = await client.admin.sweep_leaked_blobs(dry_run=False)
        game.counts["blobs swept"] += len(swept.keys)
    except TRANSIENT:
        assert game.faulty
    await client.aclose()
    game.note("sweep")


async def storm(game: Game) -> None:
    """A store that is gone for a moment, or requests that land late."""
    if not game.faulty:
        return
    await game.faults.land()
    for op in game.rng.sample(["compare_and_set", "scan", "head", "set", "get_range", "delete"], 2):
        game.faults.fail_next(op, game.rng.choice([*RATES]), game.rng.randint(1, 4))
    game.note("storm")


async def doubt(game: Game) -> None:
    """A commit whose outcome is not known for a while."""
    lost = game.rng.choice([Outcome.LOST, Outcome.LOST, Outcome.LATE, Outcome.DROPPED])
    game.faults.fail_next("compare_and_set", lost)
    game.faults.fail_next("scan", Outcome.REFUSED, game.rng.choice([0, 1, 2]))
    game.note(f"doubt {lost}")
    await game.rng.choice([command, together, step, compact])(game)
    if game.rng.random() < 0.5:
        await game.faults.land()


async def play(seed: int, *, faulty: bool) -> Counter[str]:
    """One game; what happened in it, by kind."""
    game = Game(seed, faulty=faulty)
    try:
        with no_threads(game.lag):
            async with asyncio.timeout(50):
                await play_to_the_end(game)
    except BaseException as error:
        error.add_note(f"seed {seed}, faulty={faulty}: {game.settings!r}")
        error.add_note("\n".join(game.story[-25:]))
        raise
    return game.counts
