"""Plays one game of the random tests again, by the seed that a failure names.

python -m tests.replay tables 17
python -m tests.replay tables 17 --times 20     until it fails
python -m tests.replay tables-brief 0 --seeds 5000    each once; those that fail are named
python -m tests.replay cuts write lost 3        a scene, a trouble, the call or wait where it happens
"""

import argparse
import asyncio
import logging
import os
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import Any

Game = Callable[[int], Awaitable[Any]]


def indexed(seed: int) -> Awaitable[Any]:
    return import_module("tests.indexed.game.play").play(seed, faulty=False)


def indexed_faulty(seed: int) -> Awaitable[Any]:
    return import_module("tests.indexed.game.play").play(seed, faulty=True)


def stash(seed: int) -> Awaitable[Any]:
    return import_module("tests.stash.adversary").play(seed)


def round_trips(seed: int) -> Awaitable[Any]:
    return import_module("tests.read.test_round_trips").Game(seed).play(setattr)


async def states(seed: int) -> Any:
    return import_module("tests.state.command_game").Game(seed).play()


def tables(seed: int) -> Awaitable[Any]:
    return import_module("tests.table.game").play(seed)


def tables_brief(seed: int) -> Awaitable[Any]:
    return asyncio.to_thread(import_module("tests.table.game").play_brief, seed)  # it has a loop of its own


def subscriptions(seed: int) -> Awaitable[Any]:
    return import_module("tests.subscription.game").play(seed)


def subscriptions_brief(seed: int) -> Awaitable[Any]:
    return asyncio.to_thread(import_module("tests.subscription.game").play_brief, seed)


def worlds(seed: int) -> Awaitable[Any]:
    """A world that fails is made smaller."""
    everything = import_module("tests.worlds.everything").everything
    search = import_module("aiopersist.testing.simulation").search
    return asyncio.to_thread(search, everything, [seed])  # it has a loop of its own


def processes(seed: int) -> Awaitable[Any]:
    return import_module("tests.table.processes").replay(seed)


GAMES: dict[str, Game] = {
    game.__name__.replace("_", "-"): game
    for game in (
        indexed,
        indexed_faulty,
        stash,
        round_trips,
        states,
        tables,
        tables_brief,
        subscriptions,
        subscriptions_brief,
        worlds,
        processes,
    )
}


def cuts(scene: str, trouble: str, at: int) -> Awaitable[Any]:
    test = import_module("tests.cuts.test_cuts")
    return test.play(scene, next(found for found in test.TROUBLES if found == trouble), at)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python -m tests.replay", description=__doc__.partition("\n")[0])
    found.add_argument("--debug", action="store_true", help="show the library's log")
    games = found.add_subparsers(dest="game", required=True)
    for name in GAMES:
        one = games.add_parser(name)
        one.add_argument("seed", type=int)
        one.add_argument("--times", type=int, default=1, help="play it so often")
        one.add_argument("--seeds", type=int, default=1, help="play so many, from this seed on")
    one = games.add_parser("cuts")
    one.add_argument("scene")
    one.add_argument("trouble")
    one.add_argument("at", type=int)
    return found


def main() -> None:
    chosen = parser().parse_args()
    if chosen.debug:
        logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)6d %(name)s: %(message)s")
    if "AIOPERSIST_TEST_PLANTED" in os.environ:
        import_module("tests.worlds.planted.search").plant_asked_for()
    if chosen.game == "cuts":
        print(asyncio.run(_awaited(lambda: cuts(chosen.scene, chosen.trouble, chosen.at))))
        return
    if chosen.seeds > 1:
        logging.disable(logging.CRITICAL)
        raise SystemExit(search(GAMES[chosen.game], range(chosen.seed, chosen.seed + chosen.seeds)))
    for _ in range(chosen.times):
        print(asyncio.run(_awaited(lambda: GAMES[chosen.game](chosen.seed))))


def search(game: Game, seeds: range) -> int:
    """Play all, and print what fails; how many do."""
    failed, counts = 0, Counter[str]()
    for number, seed in enumerate(seeds, 1):
        try:
            counts += asyncio.run(_awaited(partial(game, seed))) or Counter()
        except Exception:
            failed += 1
            print(f"seed {seed}:", traceback.format_exc(), flush=True)
        if number % 100 == 0 or number == len(seeds):
            print(f"{number} games, {failed} failed; {dict(counts)}", flush=True)
    return failed


async def _awaited(play: Callable[[], Awaitable[Any]]) -> Any:
    return await play()


if __name__ == "__main__":
    main()
