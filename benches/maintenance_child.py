"""The costs of a fresh process: run as `python -m benches.maintenance_child`, it prints one line of JSON."""

import asyncio
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiopersist as ap


async def compact(location: str, memory: int) -> dict[str, Any]:
    """Compact the shard to one batch: seconds, and what the process grew by at its peak."""
    settings = ap.Settings(compaction_memory_bytes=memory)
    async with ap.open(location, settings=settings, maintenance=False) as client:
        before = _peak_bytes()
        began = time.perf_counter()
        await client.admin.force_compaction("shard")
        seconds = time.perf_counter() - began
        view = await client.admin.inspect("shard")
        return {
            "seconds": seconds,
            "grew_by": _peak_bytes() - before,
            "batches": len(view.batches),
            "runs": view.batches[0].runs,
            "rows": view.batches[0].len,
            "bytes": view.blob_bytes,
        }


async def read(location: str) -> dict[str, Any]:
    """Open the location, read the shard's contents, and close."""
    began = time.perf_counter()
    async with ap.open(location, maintenance=False) as client, client.reader("shard") as r:
        async with r.snapshot() as snapshot:
            rows = (await snapshot.to_arrow()).num_rows
        return {"seconds": time.perf_counter() - began, "rows": rows}


async def warm_up() -> None:
    """Whatever is imported when it is first needed is there before anything is measured."""
    schema = ap.Schema(key=bytes, val=bytes)
    async with ap.open("mem://") as client, client.writer("shard", schema) as w:
        await w.compare_and_append([(b"%d" % n, b"", 0, 1) for n in range(50_000)], 0, 1)
        await w.compare_and_append([(b"0", b"", 1, -1)], 1, 2)
        await client.admin.force_compaction("shard")
        async with client.reader("shard") as r, r.snapshot() as snapshot:
            await snapshot.to_arrow()
    with TemporaryDirectory() as folder:  # files and SQLite have modules of their own; so has a rollup
        settings = ap.Settings(rollup_every=2)
        async with ap.open(folder, settings=settings) as client, client.writer("shard", schema) as w:
            for at in range(9):
                await w.compare_and_append([(b"%d" % at, b"", at, 1)], at, at + 1)
            await client.admin.force_gc("shard")
        await read(folder)


def _peak_bytes() -> int:
    """The most that this process had resident; `ru_maxrss` counts its parent's, too."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    asyncio.run(warm_up())
    what, where, *rest = sys.argv[1:]
    work = compact(where, int(rest[0])) if what == "compact" else read(where)
    print(json.dumps(asyncio.run(work)))
