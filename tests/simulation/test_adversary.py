"""Goal: with everything happening at once, every snapshot and every listener agrees exactly with the list of
all updates (`adversary.py`), also under maintenance in the background of every client, crashes, and leases
that run out; at the end the shard is sound, and the blob store has no blob without a name.

A failure names its seed; tasks and threads make of it a likely, not a certain repetition, so play it a
few times."""

import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation import adversary
from tests.support.location import of_kinds

LONG_SEEDS = int(os.environ.get("AIOPERSIST_TEST_GAMES", "3000"))

GAMES_MAX = 60

LIVELY = ("cut off", "UpperMismatch", "resumed", "snapshots", "followed", "lease expired")
LIVELY_IF_LONG = (
    *("and committed", "BatchExpired", "history given up", "fenced", "killed"),
    *("compacted", "compact", "gc", "parts collected", "sweep", "blobs swept", "maintain", "fsck"),
    *("shared reads", "compacted together"),
)


def check_lively(counts: Counter[str], whats: Sequence[str] = LIVELY) -> None:
    """The games were worth playing: everything they are about has happened."""
    missing = [what for what in whats if not counts[what]]
    assert not missing, (missing, counts)


async def test_short_games() -> None:
    """One, and as many more as it takes until everything has happened."""
    counts: Counter[str] = Counter()
    for seed in range(GAMES_MAX):
        counts += await adversary.play(seed)
        if all(counts[what] for what in LIVELY):
            return
    check_lively(counts)


@of_kinds("files+sqlite", "s3+postgres")
async def test_games_on_every_location(location: Any) -> None:
    await adversary.play(1000, location.blob, location.consensus)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_games() -> None:
    """`tox -e long`; `AIOPERSIST_TEST_GAMES` says how many."""
    counts: Counter[str] = Counter()
    for seed in range(LONG_SEEDS):
        counts += await adversary.play(seed)
        await asyncio.sleep(0)
    check_lively(counts, LIVELY + LIVELY_IF_LONG)
