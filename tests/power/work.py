"""What a process does in a location while its system calls are recorded. `python -m tests.power.work FOLDER`.

It says by a line on its output what it begins, and what it was told: `began log KEY`, `told log KEY`.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import Any

import aiopersist as ap

SCHEMA = ap.Schema(key=str, val=int)
SETTINGS = ap.Settings(inline_writes_single_max_bytes=300, rollup_every=16, row_group_bytes=4096)
APPENDS = 40


async def said(what: str, call: Awaitable[Any]) -> None:
    os.write(1, f"began {what}\n".encode())
    await call
    os.write(1, f"told {what}\n".encode())


async def main(folder: str) -> None:
    async with ap.open(folder, settings=SETTINGS, maintenance=False) as client:
        os.write(1, b"told open\n")
        table = client.table("stock", str, int)
        async with client.writer("log", SCHEMA) as writer:
            for time in range(APPENDS):
                key = f"{time}-" + "x" * (time % 3 * 200)  # two of three are blobs
                append = writer.compare_and_append([(key, time, time, 1)], time, time + 1)
                other = said(f"stock item{time % 4} {time}", table.put(f"item{time % 4}", time))
                await asyncio.gather(said(f"log {key}", append), other)
                if time % 10 == 9:
                    await client.admin.retain("log", 5)
                    await client.admin.force_compaction("log")
                    await client.admin.force_gc("log")
                    await client.admin.force_gc("stock")
        await client.admin.maintain()
    os.write(1, b"told close\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
