"""Goal: after any failures between openers and their store, take-overs, and openers that are forgotten,
closed or cancelled at any await: each acknowledged change is there once, no refused change is, and the
rest once or not at all (`adversary.py`). A failure names its seed, which plays the same game again."""

import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.conftest import QUICK
from tests.stash import adversary

LONG_SEEDS = int(os.environ.get("AIOPERSIST_TEST_STASH_ATTACKS", "3000"))


async def _play(seeds: Sequence[int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += await adversary.play(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    return counts


async def test_short_attacks() -> None:
    counts = await _play(range(5 if QUICK else 20))
    lively = ("done", "refused", "unknown", "transferred done", "put done", "migrated unknown", "taken over")
    assert all(counts[what] for what in lively), counts


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_attacks() -> None:
    """`AIOPERSIST_TEST_STASH_ATTACKS` says how many."""
    await _play(range(1000, 1000 + LONG_SEEDS))
