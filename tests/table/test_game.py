"""Goal: whatever tasks of several clients do at once, and whatever fails, each call is told what one copy of
the tables would tell, in an order that follows real time and commit times; what was acknowledged is there,
and nothing is there twice (`game.py`, `serializable.py`).

A failure names its seed: `python -m tests.replay tables SEED --times 20`, since tasks and threads differ from
run to run."""

import os
from collections import Counter

import pytest

from tests.conftest import QUICK, StoreUrls
from tests.support.location import of_kinds
from tests.table import game

LONG_GAMES = int(os.environ.get("AIOPERSIST_TEST_TABLE_GAMES", "500"))
HAPPENS = (
    "put",
    "update",
    "get",
    "transact",
    "transfer",
    "both",
    "cancelled",
    "untold",
    "again",
    "maintained",
)


GAMES_MAX = 20


async def test_short_games() -> None:
    """Two; in the brief games everything happens."""
    counts = await game.play(0) + await game.play(1)
    assert sum(map(bool, map(counts.get, HAPPENS))) > len(HAPPENS) / 2, counts


def test_brief_games() -> None:
    """Goal: the same in no time; views become resident, and others again, in the middle of calls. Four, and
    as many more as it takes until everything has happened."""
    counts: Counter[str] = Counter()
    for seed in range(2 if QUICK else GAMES_MAX):
        counts += game.play_brief(seed)
        missing = [what for what in (*HAPPENS, "became resident", "became partial") if not counts[what]]
        if seed >= 3 and not missing:
            break
    assert not missing or QUICK, (missing, counts)


@of_kinds("files+sqlite", "s3+postgres")
@pytest.mark.several_shards
async def test_a_game_on_each_store(location: StoreUrls) -> None:
    """Goal: the same on every store, without faults."""
    counts = await game.play(1, urls=location, calm=True, size=game.Size(moves=5))
    assert counts["transact"]


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_games() -> None:
    """`AIOPERSIST_TEST_TABLE_GAMES` says how many."""
    for seed in range(1000, 1000 + LONG_GAMES):
        await game.play(seed)
