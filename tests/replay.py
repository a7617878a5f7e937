"""Plays one game of the random tests again, by the seed that a failure names.

python -m tests.replay shards 17
python -m tests.replay shards 17 --times 20     until it fails
python -m tests.replay cuts write lost 3        a scene, a trouble, the call or wait where it happens
"""

import argparse
import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

Game = Callable[[int], Awaitable[Any]]


def shards(seed: int) -> Awaitable[Any]:
    return import_module("tests.simulation.adversary").play(seed)


async def interleavings(seed: int) -> None:
    test = import_module("tests.simulation.test_interleavings")
    for collected in (False, True):
        await test.interleave(seed, *await test.prepared(collected=collected))


def indexed(seed: int) -> Awaitable[Any]:
    return import_module("tests.indexed.game.play").play(seed, faulty=False)


def indexed_faulty(seed: int) -> Awaitable[Any]:
    return import_module("tests.indexed.game.play").play(seed, faulty=True)


def stash(seed: int) -> Awaitable[Any]:
    return import_module("tests.stash.adversary").play(seed)


def round_trips(seed: int) -> Awaitable[Any]:
    return import_module("tests.api.test_round_trips").Game(seed).play(setattr)


async def states(seed: int) -> Any:
    return import_module("tests.state.test_all_commands").Game(seed).play()


def tables(seed: int) -> Awaitable[Any]:
    return import_module("tests.table.game").play(seed)


def subscriptions(seed: int) -> Awaitable[Any]:
    location = import_module("tests.conftest").StoreUrls(f"mem://{seed}", f"mem://{seed}")
    return import_module("tests.subscription.game").Game(seed, location, 20).play()


def processes(seed: int) -> Awaitable[Any]:
    return import_module("tests.table.processes").replay(seed)


GAMES: dict[str, Game] = {
    game.__name__.replace("_", "-"): game
    for game in (
        shards,
        interleavings,
        indexed,
        indexed_faulty,
        stash,
        round_trips,
        states,
        tables,
        subscriptions,
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
    one = games.add_parser("cuts")
    one.add_argument("scene")
    one.add_argument("trouble")
    one.add_argument("at", type=int)
    return found


def main() -> None:
    chosen = parser().parse_args()
    if chosen.debug:
        logging.basicConfig(level=logging.DEBUG, format="%(relativeCreated)6d %(name)s: %(message)s")
    if chosen.game == "cuts":
        print(asyncio.run(_awaited(lambda: cuts(chosen.scene, chosen.trouble, chosen.at))))
        return
    for _ in range(chosen.times):
        print(asyncio.run(_awaited(lambda: GAMES[chosen.game](chosen.seed))))


async def _awaited(play: Callable[[], Awaitable[Any]]) -> Any:
    return await play()


if __name__ == "__main__":
    main()
