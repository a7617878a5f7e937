"""Goal: whatever crashes, fails and comes late, in whatever order, what programs were told is true at the
end (`everything.py`), and a seed gives the same world again, step by step.

A failure names its seed: `python -m tests.replay worlds SEED`."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from aiopersist.testing.simulation import CALM, search
from tests.conftest import QUICK
from tests.worlds.covered import watched
from tests.worlds.everything import (
    BESIDE,
    FAR_FROM,
    MORE_FROM,
    MORTALS,
    PLAYERS,
    PUBLISHED_FROM,
    ROLES,
    TAGS_FROM,
    everything,
    play,
)
from tests.worlds.planted.search import roles_of
from tests.worlds.programs.upkeep import ACTS

WORLDS = int(os.environ.get("AIOPERSIST_TEST_WORLDS", "10000"))
ROOT = Path(__file__).parents[2]
SOME = range(110)
"""The worlds of each run, in three tests."""
HOLDERS = [seed for seed in SOME[40:] if "holder" in roles_of(seed)]
FIRST = [*SOME[:15]] if QUICK else [*SOME[:40], *HOLDERS]
"""Enough to show what happens in them. A hold is seldom read while there is something to keep."""
RACES = [seed for seed in SOME[40:] if BESIDE in roles_of(seed) and seed not in FIRST][: 10 if QUICK else 12]
OTHERS = [seed for seed in SOME[40:80] if seed not in RACES and seed not in FIRST]
MORE = {seed: roles_of(seed) for seed in range(MORE_FROM, 2 * MORE_FROM)}
ENDS = [seed for seed, roles in MORE.items() if {*MORTALS} <= roles]
PLAYED = [seed for seed, roles in MORE.items() if {*PLAYERS} <= roles]
STRANGERS = range(MORE_FROM, MORE_FROM + (5 if QUICK else 8))
DISTANT = range(FAR_FROM, FAR_FROM + (5 if QUICK else 6))
TAGGED = [seed for seed in range(TAGS_FROM, TAGS_FROM + (15 if QUICK else 40)) if "tagger" in roles_of(seed)]
PUBLISHED_TO = PUBLISHED_FROM + (10 if QUICK else 24)
PUBLISHED = [seed for seed in range(PUBLISHED_FROM, PUBLISHED_TO) if "publisher" in roles_of(seed)]
PARTS = [OTHERS[at : at + 10] for at in range(0, len(OTHERS), 10)]
FAULTS = ("crashed", "lost", "dropped", "refused", "late", "duplicated", "slow", "cut off")
STRANGE = ("foreign", "foreign dates")
DONE = ("snapshots", "held", "heard", "critical", "handed over", "billed", "relayed", "stashed")
APPENDS = (
    "won",
    "lost",
    "no answer, then it is there",
    "no answer, then it is vacant",
    "CancelledError",
    "settled: happened",
    "no room",
)
"""How appends end."""
APPENDS_IF_LONG = ("no answer, then it is not", "settled: did not happen")
DONE_AT_THE_END = (
    "dropped shards",
    "shards ended",
    "mortal settled: Committed",
    "mortal settled: NotCommitted",
)
TAGS = ("tags added", "tags cut off", "tags read", "tags read together", "tags expired", "tags at the end")
PUBLICATIONS = ("published", "publications cut off", "versions read", "publications at the end")
DONE_IF_LONG = (
    *DONE_AT_THE_END,
    *TAGS,
    *PUBLICATIONS,
    "unpublished",
    "tags dropped",
    "tags there after all",
    "mortal settled: unknowable",
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


def played(seeds: Iterable[int]) -> Counter[str]:
    """What happened in them. One that fails is made smaller, and told so that it can be played again."""
    return search(everything, seeds)


def test_some_worlds_and_what_happens_in_them() -> None:
    """Goal: they are worth their name: each fault happens, and each program does what it is for."""
    counts = played(FIRST)
    missing = [what for what in FAULTS + DONE if not counts[what]]
    assert not missing or QUICK, (missing, counts)


def test_worlds_in_which_appends_end_in_each_way() -> None:
    with watched() as covered:
        played(RACES)
    missing = [how for how in APPENDS if not covered.appends[how]]
    assert not missing or QUICK, (missing, covered.appends)


def test_worlds_in_which_shards_end() -> None:
    """Goal: what was acknowledged is in its shard when that is dropped, though its tombstone goes, too."""
    counts = played(ENDS[: 3 if QUICK else 7])
    missing = [what for what in DONE_AT_THE_END if not counts[what]]
    assert not missing or QUICK, (missing, counts)


def test_worlds_in_which_calls_on_tables_are_strictly_serializable() -> None:
    counts = played(PLAYED[: 3 if QUICK else 6])
    assert counts["checked calls"] > 50 or QUICK, counts
    assert counts["move transact"] or QUICK, counts


def test_worlds_in_which_something_between_answers() -> None:
    """Goal: after the fact, with an error of its own, or with a date of its own."""
    counts = played(STRANGERS)
    assert (counts["foreign"] and counts["foreign dates"]) or QUICK, counts


def test_worlds_in_which_some_are_far() -> None:
    """Goal: 25 times as far from the stores as the others."""
    counts = played(DISTANT)
    assert counts["far"] or QUICK, counts


def test_worlds_in_which_contents_are_tagged() -> None:
    """Goal: a tag that was acknowledged has the contents of its time, until it is dropped or expires."""
    counts = played(TAGGED)
    missing = [what for what in TAGS if not counts[what]]
    assert not missing or QUICK, (missing, counts)


def test_worlds_in_which_shards_are_published() -> None:
    """Goal: a kept version of a published table has the contents of its time, and its end leaves nothing."""
    counts = played(PUBLISHED)
    missing = [what for what in PUBLICATIONS if not counts[what]]
    assert not missing or QUICK, (missing, counts)


@pytest.mark.long
@pytest.mark.parametrize("seeds", PARTS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_more_worlds(seeds: list[int]) -> None:
    counts = played(seeds)
    assert counts["requests"] and counts["crashed"], counts


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_worlds() -> None:
    """`AIOPERSIST_TEST_WORLDS` says how many."""
    with watched() as covered:
        counts = played(range(1000, 1000 + WORLDS))
    print(dict(sorted(counts.items())), covered.appends)
    missing = [what for what in FAULTS + STRANGE + DONE + DONE_IF_LONG if not counts[what]]
    missing += [name for name in ROLES if not counts[f"role {name}"]]
    missing += [how for how in APPENDS + APPENDS_IF_LONG if not covered.appends[how]]
    assert not missing, (missing, counts, covered.appends)


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
    seeds = range(3, 6)
    assert [play(seed).digest for seed in seeds] == digests(seeds, "1")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_seeds_give_the_same_world_in_any_process() -> None:
    seeds = range(20, 120)
    assert [play(seed).digest for seed in seeds] == digests(seeds, "1") == digests(seeds, "2")
