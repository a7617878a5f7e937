"""Finds planted bugs: plays the worlds of one seed after the other until one fails."""

import os
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from aiopersist.testing.simulation import loop
from tests.worlds.everything import Everything, play
from tests.worlds.planted import Bug, above, answers, commits, keeping, publishing, tagging

SEEDS_MAX = 1000
TURNS_MAX = 400_000  # a world that is not over by then never ends: that is found, too
MODULES = (commits, keeping, above, answers, tagging, publishing)
BUGS = {bug.plant.__name__: bug for module in MODULES for bug in module.BUGS}


class Found(NamedTuple):
    """A world that shows a bug."""

    seed: int
    played: int
    """Worlds until then; others have no program that could show it."""
    error: BaseException


def plant_asked_for() -> None:
    """The bug that `AIOPERSIST_TEST_PLANTED` names, in this process, for good."""
    if name := os.environ.get("AIOPERSIST_TEST_PLANTED"):
        BUGS[name].plant(pytest.MonkeyPatch())


def roles_of(seed: int) -> set[str]:
    """The programs of that world."""
    dice = random.Random(f"scenario {seed}")
    world: Any = SimpleNamespace(
        seed=seed, dice=dice, counts=Counter(), size=lambda name, low, high: dice.randint(low, high)
    )
    return Everything(world).roles


def search(bug: Bug, seeds: range) -> Found | None:
    """The first of these worlds that fails with the bug."""
    wanted, number = set(bug.roles.split()), 0
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        patch.setattr(loop, "TURNS_MAX", TURNS_MAX)
        for seed in seeds:
            if wanted and not wanted & roles_of(seed):
                continue
            number += 1
            try:
                play(seed)
            except Exception as error:
                return Found(seed, number, error)
    return None
