"""A process that may not write the location that it reads: it prints the contents as JSON, then waits for
a line and prints them again. `python readonly_process.py DIRECTORY`."""

import asyncio
import json
import sys

import aiopersist as ap


async def look(client: ap.Client) -> None:
    async with client.reader("t") as r, r.snapshot() as s:
        print(json.dumps({"as_of": s.as_of, "rows": await s.rows()}), flush=True)


async def main() -> None:
    async with ap.open(sys.argv[1], readonly=True) as client:
        await look(client)
        while await asyncio.to_thread(sys.stdin.readline):
            await look(client)


if __name__ == "__main__":
    asyncio.run(main())
