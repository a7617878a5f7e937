"""Goal: every value that a schema takes, by every call and under any limits, is read again as it was
given: before and after compactions, by every call that reads, by readers of every version of the schema."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.read.round_trip_game import Game

HERE = Path(__file__).parents[2]
PROCESS = """
import asyncio, faulthandler, sys
from tests.read.round_trip_game import Game
faulthandler.enable()
for seed in range(*map(int, sys.argv[1:])):
    print(f"seed {seed}", flush=True)
    asyncio.run(Game(seed).play(setattr))
"""


@pytest.mark.parametrize("seed", [0, 137, *range(1, 6)])  # 0 and 137 have product times
async def test_what_goes_in_comes_out(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    await Game(seed).play(monkeypatch.setattr)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(1000, 5000, 100))
def test_what_goes_in_comes_out_of_many_games(first: int) -> None:
    """In a process of its own: where the interpreter itself dies, the last seed that it told is to blame."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    arguments = [sys.executable, "-W", "error", "-c", PROCESS, str(first), str(first + 100)]
    done = subprocess.run(
        arguments, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]}: {done.returncode}, {done.stderr}"
