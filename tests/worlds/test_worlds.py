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
from tests.worlds.everything import ROLES, play
from tests.worlds.programs.upkeep import ACTS

WORLDS = int(os.environ.get("AIOPERSIST_TEST_WORLDS", "10000"))
ROOT = Path(__file__).parents[2]
SOME = 15 if QUICK else 60
HAPPENS = ("crashed", "lost", "dropped", "refused", "late", "duplicated", "slow", "cut off", "restored")
DONE = ("snapshots", "held", "heard", "critical", "handed over", "billed", "relayed", "stashed")
HAPPENS_IF_LONG = (
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


def test_some_worlds() -> None:
    counts = played(range(SOME))
    missing = [what for what in HAPPENS + DONE if not counts[what]]
    assert not missing or QUICK, (missing, counts)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_worlds() -> None:
    """`AIOPERSIST_TEST_WORLDS` says how many."""
    counts = played(range(1000, 1000 + WORLDS))
    print(dict(sorted(counts.items())))
    missing = [what for what in HAPPENS + DONE + HAPPENS_IF_LONG if not counts[what]]
    missing += [name for name in ROLES if not counts[f"role {name}"]]
    assert not missing, (missing, counts)


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
