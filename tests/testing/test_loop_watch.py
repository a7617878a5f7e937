"""A test that blocks the event loop fails; a test that waits, or works on a thread, does not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = """
import asyncio, time
import pytest

async def test_sleeps_in_the_loop():
    for _ in range(80):  # each is ready, and waits for a core, once more
        time.sleep(0.05)

async def test_computes_in_the_loop():
    before = time.thread_time()
    while time.thread_time() - before < 1.6:
        sum(range(1000))

@pytest.mark.blocks_loop
async def test_says_so():
    time.sleep(0.9)

async def test_waits():
    await asyncio.sleep(0.9)

async def test_works_on_a_thread():
    await asyncio.to_thread(time.sleep, 0.9)

def test_has_no_loop():
    time.sleep(0.9)

@pytest.fixture
def slow_to_start():
    time.sleep(0.9)

async def test_after_a_fixture_that_is_slow(slow_to_start):
    pass
"""


@pytest.mark.slow
def test_what_blocks_the_loop_fails_and_says_where(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "conftest.py").write_text((root / "tests/conftest.py").read_text())
    options = ["-q", "-c", str(root / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert "7 passed, 2 errors" in run.stdout, run.stdout + run.stderr
    for case in ("test_sleeps_in_the_loop", "test_computes_in_the_loop"):
        assert f"in {case}" in run.stdout
    assert "in test_waits" not in run.stdout
