"""The time from an append's answer to a listener, and the cost of 10,000 appends in a row."""

import asyncio
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import pytest

import aiopersist as ap
from benches import byhand
from benches.conftest import report

SCHEMA = ap.Schema(key=bytes, val=bytes)


@pytest.mark.parametrize("place", ["mem", "files+sqlite", "files+postgres", "s3+postgres"], indirect=True)
@pytest.mark.parametrize("clients", [1, 2])
def test_write_to_listen(place: Any, clients: int, run: Any, rounds: Any) -> None:
    """One client that writes and listens; or a second one that listens, as another process would."""

    async def prepare() -> Any:
        writing = await ap.open(blob=place.blob, consensus=place.consensus)
        listening = writing if clients == 1 else await ap.open(blob=place.blob, consensus=place.consensus)
        writer = await writing.writer("shard", SCHEMA)
        reader = await listening.reader("shard", SCHEMA)
        return writing, listening, writer, (await reader.listen()).steps()

    writing, listening, writer, steps = run(prepare())
    waits: list[float] = []
    position = 0

    async def append_and_hear() -> None:
        nonlocal position
        heard = asyncio.create_task(anext(steps))
        await asyncio.sleep(0.002)  # the listener is waiting
        await writer.compare_and_append(byhand.rows(10, position), position, position + 1)
        position += 1
        acknowledged = time.perf_counter()
        await heard
        waits.append(time.perf_counter() - acknowledged)

    rounds({"append and hear of it": append_and_hear}, 100)
    assert waits
    print(f"  {'after the answer':<32} {statistics.median(waits) * 1e3:9.3f} ms")
    run(writing.aclose())
    run(listening.aclose())


HEARS = """
import asyncio, sys, time
import aiopersist as ap

async def main():
    schema = ap.Schema(key=bytes, val=bytes)
    blob, consensus = sys.argv[1:]
    async with ap.open(blob=blob, consensus=consensus) as client, client.reader("shard", schema) as r:
        steps = (await r.listen()).steps()
        print("ready", flush=True)
        async for _ in steps:
            print(time.perf_counter(), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("place", ["files+sqlite", "files+postgres"], indirect=True)
def test_another_process_hears(place: Any, run: Any, enabled: bool, capsys: Any) -> None:
    """From the answer to the writer until a listener in another process has the step: both read the clock of
    the machine."""
    appends = 200 if enabled else 2

    async def waits() -> list[float]:
        found = []
        async with (
            ap.open(blob=place.blob, consensus=place.consensus) as client,
            client.writer("shard", SCHEMA) as writer,
        ):
            await writer.compare_and_append(byhand.rows(10, 0), 0, 1)
            command = [sys.executable, "-c", HEARS, *place]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
                assert listener.stdout is not None
                said = partial(asyncio.to_thread, listener.stdout.readline)
                assert await said() == "ready\n"
                for at in range(1, appends + 1):
                    await asyncio.sleep(0.005)  # it waits
                    await writer.compare_and_append(byhand.rows(10, at), at, at + 1)
                    answered = time.perf_counter()
                    found.append(float(await said()) - answered)
                listener.kill()
        return found

    found = sorted(run(waits()))
    figures = {"median": found[len(found) // 2], "nine of ten within": found[len(found) * 9 // 10]}
    report(
        capsys,
        f"another process hears, {place.consensus[:8]}",
        **{name: f"{seconds * 1e3:.2f} ms" for name, seconds in figures.items()},
    )
    assert found[-1] < 60


@pytest.mark.parametrize("place", ["files+sqlite"], indirect=True)
def test_drift(place: Any, run: Any, benchmark: Any, capsys: Any) -> None:
    """10,000 appends of 10 rows in a row: the last tenth beside the first."""
    n = 10_000 if benchmark.enabled else 300

    async def appends() -> list[float]:
        seconds = []
        async with ap.open(blob=place.blob, consensus=place.consensus) as client:
            writer = await client.writer("shard", SCHEMA)
            for t in range(n):
                rows = byhand.rows(10, t)
                began = time.perf_counter()
                await writer.compare_and_append(rows, t, t + 1)
                seconds.append(time.perf_counter() - began)
        return seconds

    seconds = benchmark.pedantic(lambda: run(appends()), rounds=1)
    first, last = (statistics.median(s) for s in (seconds[: n // 10], seconds[-n // 10 :]))
    report(
        capsys,
        f"{n} appends in a row",
        first_tenth_ms=round(first * 1e3, 3),
        last_tenth_ms=round(last * 1e3, 3),
        ratio=round(last / first, 2),
        slowest_ms=round(max(seconds) * 1e3, 1),
    )
    assert len(seconds) == n
