"""Goal: whatever happens at once, every snapshot and every listener sees exactly what the list of all
updates says (`adversary.py`). A failure names its seed; tasks and threads make of it a likely, not a
certain repetition, so play it a few times."""

import asyncio
import importlib.util
import os
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

LONG_SEEDS = int(os.environ.get("AIOPERSIST_TEST_GAMES", "3000"))


def _adversary() -> ModuleType:
    """The module beside this file: tests are no package."""
    spec = importlib.util.spec_from_file_location("adversary", Path(__file__).with_name("adversary.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["adversary"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


adversary = _adversary()


def check_lively(counts: Counter[str]) -> None:
    """The games were worth playing: everything they are about has happened."""
    for what in (
        "cut off",
        "and committed",
        "UpperMismatch",
        "compacted",
        "resumed",
        "snapshots",
        "followed",
    ):
        assert counts[what], counts


async def test_short_games() -> None:
    counts: Counter[str] = Counter()
    began, seed = time.monotonic(), 0
    while time.monotonic() - began < 12 or seed < 8:
        counts += await adversary.play(seed)
        seed += 1
    check_lively(counts)


async def test_games_on_every_location(location: Any) -> None:
    for seed in range(1000, 1002):
        await adversary.play(seed, location.blob, location.consensus)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_games() -> None:
    """`tox -e long`; `AIOPERSIST_TEST_GAMES` says how many."""
    counts: Counter[str] = Counter()
    for seed in range(LONG_SEEDS):
        counts += await adversary.play(seed)
        await asyncio.sleep(0)
    check_lively(counts)
