"""Objects in a bucket: processes that race for one shard beside bare conditional puts."""

import uuid
from typing import Any

from benches.conftest import report
from benches.processes import together

BARE = """
import asyncio, sys
from aiopersist.storage.address import Address
from aiopersist.storage.s3.client import OPTIONS, S3Client

async def main():
    client = S3Client.at(Address.parse(sys.argv[1], OPTIONS), "bench")
    await client.get("warm")
    print("ready", flush=True); sys.stdin.readline()
    number = mine = 0
    while mine < int(sys.argv[2]):
        mine += await client.create(f"{number:016x}", b"x" * 300) is not None
        number += 1
    print("done", flush=True)
    await client.aclose()

asyncio.run(main())
"""

COMMITS = """
import asyncio, sys
import aiopersist as ap

async def main():
    schema = ap.Schema(key=str, val=int)
    async with ap.open(sys.argv[1]) as client, client.writer("t", schema) as w:
        print("ready", flush=True); sys.stdin.readline()
        for number in range(int(sys.argv[2])):
            await w.write([("k", number)])
        print("done", flush=True)

asyncio.run(main())
"""


def test_four_processes_race_for_one_shard(
    s3_server: Any, enabled: bool, benchmark: Any, capsys: Any
) -> None:
    """Commits a second of four processes on one shard of a bucket alone, beside bare conditional puts of the
    next number in a loop, in turns. All commits are there."""
    count, turns, processes = (1000, 2, 4) if enabled else (3, 1, 2)
    bare, commits = list[float](), list[float]()

    def turn() -> None:
        url = s3_server.url(f"b-{uuid.uuid4().hex[:12]}")
        bare.append(processes * count / together(BARE, [url, str(count)], processes))
        place = s3_server.url(f"b-{uuid.uuid4().hex[:12]}")
        commits.append(processes * count / together(COMMITS, [place, str(count)], processes))

    benchmark.pedantic(turn, rounds=turns)
    shares = [f"{c / b:.0%}" for c, b in zip(commits, bare, strict=True)]
    report(
        capsys,
        "four processes on one shard",
        **{
            "bare puts a second": [round(n) for n in bare],
            "commits a second": [round(n) for n in commits],
            "share": shares,
        },
    )
