"""Goal: after any calls, in any order, by any instance, and any faults of the stores, an `Indexed` agrees
with a plain list of updates, for every reader and every listener; an instance that was taken over from
changes nothing; and the blob store has no blob without a name (`game/play.py`).

A failure names its seed and what was done last; the same seed plays the same game again."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.conftest import QUICK
from tests.indexed.game.play import play

# Small games, of which a few together have everything in them, and games to go on with.
SHORT = {False: (1, 4, 6, 7, 8, 11, 12), True: (1, 2, 3, 4, 7, 9, 10)}
SHORT_MAX = 40

LONG_SEEDS = int(os.environ.get("AIOPERSIST_TEST_INDEXED_GAMES", "3000"))


LIVELY = ("Write", "Seal", "Allow", "together", "step", "look", "again", "compacted", "told", "crash", "cut")
LIVELY_IF_LONG = ("Destroy", "behind", "ghost", "take", "stop", "maintain", "sweep", "storm", "worlds")


async def _play(seeds: Sequence[int], *, faulty: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += await play(seed, faulty=faulty)
        await asyncio.sleep(0)
    return counts


def check_lively(counts: Counter[str], whats: Sequence[str]) -> None:
    """The games were worth playing: everything they are about has happened."""
    missing = [what for what in whats if not counts[what]]
    assert not missing, (missing, counts)


@pytest.mark.parametrize("faulty", [False, True], ids=["calm", "faulty"])
async def test_short_games(faulty: bool) -> None:
    """Seven, and as many more as it takes until everything has happened."""
    if QUICK:
        check_lively(await _play(range(5), faulty=faulty), LIVELY[:4])
        return
    counts = await _play(SHORT[faulty], faulty=faulty)
    for seed in range(SHORT_MAX):
        if all(counts[what] for what in LIVELY):
            return
        counts += await _play([seed], faulty=faulty)
    check_lively(counts, LIVELY)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("faulty", [False, True], ids=["calm", "faulty"])
async def test_long_games(faulty: bool) -> None:
    """`AIOPERSIST_TEST_INDEXED_GAMES` says how many, with and without failures together."""
    counts = await _play(range(100, 100 + LONG_SEEDS // 2), faulty=faulty)
    check_lively(counts, [*LIVELY, *(what for what in LIVELY_IF_LONG if faulty or what != "storm")])
