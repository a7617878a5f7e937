"""Goal: whatever is lost, late, cancelled or abandoned, no change is skipped, no position goes back, nothing
of an earlier owner counts, and outputs are there exactly once (`game.py`). A failure names its seed."""

import os
from collections import Counter

import pytest

from tests.conftest import StoreUrls
from tests.subscription.game import play
from tests.support.location import of_kinds

LONG_GAMES = int(os.environ.get("AIOPERSIST_TEST_SUBSCRIPTIONS", "50"))


async def test_some_games() -> None:
    """As many as it takes until everything has happened."""
    wanted = ("fenced", "abandoned", "cancelled", "CONSUMED", "moved", "ack", "commit", "same", "transact")
    counts: Counter[str] = Counter()
    for seed in range(40):
        counts += await play(seed, 15)
        if all(counts[what] for what in wanted):
            return
    pytest.fail(f"it did not all happen: {counts}")


@of_kinds("files+sqlite", "s3+postgres")
@pytest.mark.several_shards
@pytest.mark.slow
async def test_a_game_on_each_store(location: StoreUrls) -> None:
    await play(7, 12, location)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(1000, 1000 + LONG_GAMES))
async def test_long_games(seed: int) -> None:
    """`AIOPERSIST_TEST_SUBSCRIPTIONS` says how many."""
    await play(seed, 60)
