"""Goal: a process ends quietly, whatever its user has left open, and a loop that outlives the main thread
goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

LEFT_OPEN = """
import asyncio, sys
import aiopersist as ap

async def main(url):
    client = await ap.open(url, settings=ap.Settings(compaction_inputs_min=2, watch_timeout_s=0.01))
    table = client.table("t", str, int)
    sub = await table.subscription("sub")
    left = [asyncio.create_task(anext(sub)), asyncio.create_task(client.upper("t"))]

    async def puts():
        for number in range(10**9):
            await table.put("a", number)

    left += [asyncio.create_task(puts()) for _ in range(3)]
    for number in range(30):
        await table.put("b", number)
    globals().update(locals())  # nothing of it is dropped before the end

asyncio.run(main(sys.argv[1]))
"""

OUTLIVING = """
import asyncio, sys, threading
import aiopersist as ap

async def main(url):
    async with ap.open(url) as client:
        table = client.table("t", str, str)
        await table.put("a", "before")
        while threading.main_thread().is_alive():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        for number in range(5):
            await table.put("a", f"{number}" * 20_000)
        await client.admin.force_compaction("t")
        assert await table.count() == 1
    print("all is done")

threading.Thread(target=asyncio.run, args=(main(sys.argv[1]),)).start()
"""


def run(program: str, url: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", program, url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_what_is_left_open_makes_no_noise(tmp_path: Path, kind: str) -> None:
    """No task is destroyed half done, in the middle of puts, of maintenance, and of a subscription."""
    done = run(LEFT_OPEN, "mem://" if kind == "memory" else str(tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_loop_outlives_the_main_thread(tmp_path: Path) -> None:
    """All executors of Python end with the main thread; stores on files go on."""
    done = run(OUTLIVING, str(tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("all is done\n", "", 0)
