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
from tests.worlds.everything import play

WORLDS = int(os.environ.get("AIOPERSIST_TEST_WORLDS", "300"))
ROOT = Path(__file__).parents[2]
HAPPENS = ("crashed", "lost", "dropped", "refused", "late", "duplicated", "slow", "snapshots", "billed")
KEPT = ("force_compaction", "force_gc", "sweep_leaked_blobs", "maintain")
HAPPENS_IF_LONG = ("taken over", "cut off", "full", "mismatches", *KEPT)


def test_some_worlds() -> None:
    counts: Counter[str] = Counter()
    for seed in range(2 if QUICK else 4):
        counts += play(seed).counts
    missing = [what for what in HAPPENS if not counts[what]]
    assert not missing or QUICK, (missing, counts)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_worlds() -> None:
    """`AIOPERSIST_TEST_WORLDS` says how many."""
    counts: Counter[str] = Counter()
    for seed in range(1000, 1000 + WORLDS):
        counts += play(seed).counts
    missing = [what for what in HAPPENS + HAPPENS_IF_LONG if not counts[what]]
    assert not missing, (missing, counts)


def test_nothing_fails_in_calm_weather() -> None:
    counts = play(1, CALM).counts
    kinds = ("crashed", "lost", "refused", "cut off")
    assert counts["requests"] and not any(counts[kind] for kind in kinds)


def digest(seed: int, hash_seed: str) -> str:
    """Of that world in a new process."""
    code = f"from tests.worlds.everything import play; print(play({seed}).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    ran = [sys.executable, "-c", code]
    ended = subprocess.run(ran, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return ended.stdout.strip()


def test_a_seed_gives_the_same_world_in_any_process() -> None:
    """Goal: neither addresses nor hashes of texts have a part in it."""
    assert play(3).digest == digest(3, "1")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_seeds_give_the_same_world_in_any_process() -> None:
    for seed in range(20, 40):
        assert play(seed).digest == digest(seed, "1") == digest(seed, "2")
