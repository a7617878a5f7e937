"""Goal: worlds find the bugs that are planted in the library (`planted/shown.py`); without a bug they find
nothing (`test_worlds.py`).

`python -m tests.worlds.test_planted` searches for all, or for those that it is told, and prints how many
worlds each took."""

import logging
import sys

import pytest

from tests.worlds.planted.search import BUGS, SEEDS_MAX, search
from tests.worlds.planted.shown import SHOWN

QUICKLY = (
    "a_lost_answer_is_a_success",
    "a_batch_that_is_never_spent",
    "collection_of_what_is_named",
    "truncation_to_any_version",
    "rollups_go_before_their_versions",
    "a_status_that_decides",
    "a_collection_that_ignores_tags",
)
"""Bugs that are looked for in each run."""


def seeds_of(name: str) -> range:
    """Of the worlds that may show a bug."""
    return range(BUGS[name].first, BUGS[name].first + SEEDS_MAX)


@pytest.mark.parametrize("name", QUICKLY)
def test_it_is_found_quickly(name: str) -> None:
    seed = SHOWN[name].seed
    found = search(BUGS[name], range(seed, seed + 5))
    assert found is not None, f"{name} is not found in 5 worlds"
    print(found.seed, repr(found.error)[:300])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SHOWN)
def test_it_is_found(name: str) -> None:
    found = search(BUGS[name], seeds_of(name))
    assert found is not None, f"{name} is not found in {SEEDS_MAX} worlds"
    print(found.seed, found.played, repr(found.error)[:300])


def main(names: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    for name in names or BUGS:
        found = search(BUGS[name], seeds_of(name))
        seeds = 0 if found is None else found.seed + 1 - BUGS[name].first
        told = "not found" if found is None else f"{seeds} seeds, {found.played} of them played"
        print(f"| {BUGS[name].area} | {BUGS[name].name} | {told} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
