"""Goal: whatever crashes, fails and comes late, in whatever order, what programs were told is true at the
end (`everything.py`), and a seed gives the same world again, step by step.

A failure names its seed: `python -m tests.replay worlds SEED`."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from aiopersist.testing.simulation import CALM
from tests.conftest import QUICK
from tests.worlds.covered import watched
from tests.worlds.everything import ROLES, play
from tests.worlds.programs.upkeep import ACTS

WORLDS = int(os.environ.get("AIOPERSIST_TEST_WORLDS", "10000"))
ROOT = Path(__file__).parents[2]
FIRST = range(15 if QUICK else 40)
"""Enough worlds to show what happens in them."""
REST = [range(first, first + 10) for first in range(40, 200, 10)]
"""With the first ones, 200 worlds in each run."""
FAULTS = ("crashed", "lost", "dropped", "refused", "late", "duplicated", "slow", "cut off")
DONE = ("snapshots", "held", "heard", "critical", "handed over", "billed", "relayed", "stashed")
SHORT = (
    "won",
    "lost",
    "no answer, then it is there",
    "no answer, then it is vacant",
    "CancelledError",
    "settled: happened",
    "left: another upper",
    "left: another rule",
    "left: no room",
)
"""Branches of the short way of small appends."""
DONE_IF_LONG = (
    "restored",
    "races lost",
    "race settled: Committed",
    "race settled: NotCommitted",
    "evolved",
    "taken over",
    "full",
    "mismatches",
    "settled: Committed",
    "stream fenced",
    "swept",
    *ACTS,
)


def played(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += play(seed).counts
    return counts


def test_some_worlds_and_what_happens_in_them() -> None:
    """Goal: they are worth their name: each fault happens, each program does what it is for, and a small
    append ends in each way."""
    with watched() as covered:
        counts = played(FIRST)
    missing = [what for what in FAULTS + DONE if not counts[what]]
    missing += [how for how in SHORT if not covered.short[how]]
    assert not missing or QUICK, (missing, counts, covered.short)


@pytest.mark.parametrize("seeds", REST, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_more_worlds(seeds: range) -> None:
    counts = played(seeds)
    assert counts["requests"] and counts["crashed"], counts


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_worlds() -> None:
    """`AIOPERSIST_TEST_WORLDS` says how many."""
    with watched() as covered:
        counts = played(range(1000, 1000 + WORLDS))
    print(dict(sorted(counts.items())), covered.short)
    missing = [what for what in FAULTS + DONE + DONE_IF_LONG if not counts[what]]
    missing += [name for name in ROLES if not counts[f"role {name}"]]
    missing += [how for how in SHORT if not covered.short[how]]
    assert not missing, (missing, counts, covered.short)


def test_nothing_fails_in_calm_weather() -> None:
    counts = play(1, CALM).counts
    kinds = ("crashed", "lost", "refused", "cut off")
    assert counts["requests"] and not any(counts[kind] for kind in kinds)


def digests(seeds: range, hash_seed: str) -> list[str]:
    """Of these worlds in a new process."""
    code = (
        "from tests.worlds.everything import play\n"
        f"for seed in range({seeds.start}, {seeds.stop}): print(play(seed).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    ran = [sys.executable, "-c", code]
    ended = subprocess.run(ran, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return ended.stdout.split()


def test_a_seed_gives_the_same_world_in_any_process() -> None:
    """Goal: neither addresses nor hashes of texts have a part in it, nor what was played before."""
    seeds = range(3, 9)
    assert [play(seed).digest for seed in seeds] == digests(seeds, "1")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_seeds_give_the_same_world_in_any_process() -> None:
    seeds = range(20, 120)
    assert [play(seed).digest for seed in seeds] == digests(seeds, "1") == digests(seeds, "2")
