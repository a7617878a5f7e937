"""Processes that use a shard at the same time: `python -m tests.spark.other_processes append|tend ...`.
They go on until the folder has a file `stop`, and write the number of their rounds to a file of their own."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiopersist as ap
from aiopersist.base.errors import UpperMismatch
from tests.spark.faults import with_its_parent

ROOT = Path(__file__).parents[2]
SCHEMA = ap.Schema(key=int, val=int)
KEYS = 40
BEHIND = 10  # how far since is behind the upper
TINY: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 400,
    "row_group_bytes": 200,
    "rollup_every": 8,
}


def model(as_of: int) -> list[tuple[int, int]]:
    """The contents at a time: at each, one key gets a new value."""
    return sorted((time % KEYS, time) for time in range(max(as_of + 1 - KEYS, 0), as_of + 1))


def changes_at(time: int) -> list[tuple[int, int, int, int]]:
    gone = [(time % KEYS, time - KEYS, time, -1)] if time >= KEYS else []
    return [*gone, (time % KEYS, time, time, 1)]


# --- for their parent ------------------------------------------------------------------------------


class Others:
    """They run."""

    def __init__(self, folder: Path, running: list[subprocess.Popen[bytes]]) -> None:
        self._folder = folder
        self._running = running

    def rounds(self) -> dict[str, int]:
        """How often each has come round."""
        assert all(process.poll() is None for process in self._running)
        paths = {work: self._folder / work for work in WORKS}
        return {work: path.stat().st_size if path.exists() else 0 for work, path in paths.items()}


@contextmanager
def running(place: str, shard: str, folder: Path) -> Iterator[Others]:
    command = [sys.executable, "-m", "tests.spark.other_processes"]
    there = [
        subprocess.Popen([*command, work, place, shard, str(folder)], cwd=ROOT, preexec_fn=with_its_parent)
        for work in WORKS
    ]
    try:
        yield Others(folder, there)
        (folder / "stop").touch()
        assert [process.wait(60) for process in there] == [0] * len(there)
    finally:
        for process in there:
            process.kill()
            process.wait()


# --- the processes ------------------------------------------------------------------------------------


async def append(client: ap.Client, shard: str) -> None:
    """One time."""
    async with client.writer(shard, SCHEMA) as writer:
        time = writer.upper.time
        with suppress(UpperMismatch):
            await writer.compare_and_append(changes_at(time), time, time + 1)


async def tend(client: ap.Client, shard: str) -> None:
    """Forget history, compact, and collect the garbage."""
    upper = (await client.upper(shard)).time
    async with client.critical_since(shard, "others") as since:
        await since.compare_and_downgrade_since(0, 0, max(upper - BEHIND, since.since.time))
    await client.admin.force_compaction(shard)
    await client.admin.force_gc(shard)


WORKS = {"append": append, "tend": tend}


async def main(work: str, place: str, shard: str, folder: str) -> None:
    async with ap.open(place, settings=ap.Settings(**TINY), maintenance=False) as client:
        while not os.path.exists(f"{folder}/stop"):
            await WORKS[work](client, shard)
            with open(f"{folder}/{work}", "a") as told:
                told.write(".")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
