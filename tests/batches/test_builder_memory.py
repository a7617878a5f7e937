"""Goal: the memory of a builder depends on its settings, and not on the amount of its input."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shards import MIB

TARGET = 16 * MIB
OUTSTANDING = 2

PROGRAM = """
import asyncio, json, resource, sys
import numpy as np
import pyarrow as pa
import aiopersist as ap

place, target, outstanding, times = sys.argv[1], *map(int, sys.argv[2:])
ROWS, random = 10_000, np.random.default_rng(1)

def column(width):  # of bytes that nothing compresses
    data = random.integers(0, 256, ROWS * width, dtype=np.uint8).tobytes()
    offsets = np.arange(ROWS + 1, dtype=np.int32) * width
    return pa.Array.from_buffers(pa.binary(), ROWS, [None, pa.py_buffer(offsets), pa.py_buffer(data)])

def piece():
    numbers = [pa.repeat(pa.scalar(n, pa.int64()), ROWS) for n in (0, 1)]
    return pa.record_batch([column(16), column(64), *numbers], ["key", "val", "time", "diff"])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

async def main():
    settings = ap.Settings(blob_target_size=target, batch_builder_max_outstanding_parts=outstanding)
    async with ap.open(place, settings=settings) as client:
        writer = await client.writer("shard", ap.Schema(key=bytes, val=bytes))
        await (await writer.batch(piece(), 0, 1)).delete()  # everything is imported and warm
        before = peak()
        async with writer.builder(0) as builder:
            for _ in range(times * target // (ROWS * 96)):
                await builder.extend(piece())
            batch = await builder.finish(1)
        print(json.dumps({"grown": peak() - before, "parts": len(batch.parts), "len": batch.len}))
        await batch.delete()

asyncio.run(main())
"""


def built(place: Path, times: int) -> dict[str, int]:
    """What a process of its own tells of a batch of `times` the target."""
    command = [sys.executable, "-c", PROGRAM, str(place), str(TARGET), str(OUTSTANDING), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_memory_does_not_grow_with_the_batch(tmp_path: Path) -> None:
    """Live data is some (outstanding + 2) times the target; the allocators of Arrow, polars and Python
    keep half as much again after it was freed, and some 120 MiB for any target."""
    small, large = built(tmp_path / "small", 10), built(tmp_path / "large", 30)
    assert large["parts"] > 2.5 * small["parts"] > 24
    assert small["grown"] < 160 * MIB + 2 * (OUTSTANDING + 2) * TARGET, small
    assert large["grown"] < small["grown"] + 3 * TARGET, (small, large)
