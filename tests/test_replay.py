"""Goal: a game that failed can be played again by the command that CONTRIBUTING.md names."""

import re
from pathlib import Path

import pytest

from tests import replay


@pytest.mark.blocks_loop  # it imports what it plays
async def test_a_game_is_played_again() -> None:
    await replay.GAMES["round-trips"](0)
    assert (await replay.cuts("write", "lost", 1)).reached


def test_every_game_is_documented() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert {*replay.GAMES, "cuts"} <= set(re.findall(r"tests\.replay ([\w-]+)", text))
