"""`aiopersist maintain`: a process that only maintains a location.

Applications beside it may open their clients with `maintenance=False`, or leave it on: claims in the states
of the shards divide the work between any number of such processes and clients.
"""

import asyncio
import signal
from typing import NamedTuple

from rich.console import Console

from aiopersist.cli.location import LocationOptions
from aiopersist.client import Client
from aiopersist.maintenance.rounds import MaintenanceRound
from aiopersist.opening import open as open_client
from aiopersist.runtime import SYSTEM


class RoundFailed(Exception):
    """The one round of `--once` could not maintain every shard."""


class Pace(NamedTuple):
    """How often rounds and sweeps run."""

    every_s: float
    sweep_every_s: float
    once: bool


async def run(options: LocationOptions, pace: Pace, console: Console) -> None:
    """Run rounds until SIGTERM or SIGINT ends the process; claims on unfinished work are given back.
    `InvalidLocation` if the location is not there: this creates none, since a path may be mistyped."""
    location, blob, consensus = options
    async with open_client(location, blob=blob, consensus=consensus, readonly=True):
        pass  # the location is there
    async with open_client(location, blob=blob, consensus=consensus, maintenance=False) as client:
        work = asyncio.create_task((_once if pace.once else _rounds)(client, pace, console))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        await asyncio.wait([work])
        if work.cancelled():
            _say(console, "ended")
        else:
            work.result()


async def _once(client: Client, pace: Pace, console: Console) -> None:
    done = await _round(client, console)
    await _sweep(client, console)
    if done.failures:
        raise RoundFailed(f"{len(done.failures)} of {done.shards} shards could not be maintained")


async def _rounds(client: Client, pace: Pace, console: Console) -> None:
    loop = asyncio.get_running_loop()
    next_sweep = loop.time()
    while True:
        try:
            await _round(client, console)
            if loop.time() >= next_sweep:
                next_sweep = loop.time() + pace.sweep_every_s
                await _sweep(client, console)
        except Exception as error:  # the next round maintains the shards that this one did not
            _say(console, f"a round was cut off: {type(error).__name__}: {error}")
        await SYSTEM.sleep(pace.every_s)


async def _round(client: Client, console: Console) -> MaintenanceRound:
    done = await client.maintain()
    if done.did_something:
        _say(
            console,
            f"{done.looked_at} of {done.shards} shards had changed: {done.compactions} compactions, "
            f"{done.collections} collections of {done.parts} parts and {done.versions} versions",
        )
    for shard, failure in done.failures.items():
        _say(console, f"{shard} could not be maintained: {failure}")
    return done


async def _sweep(client: Client, console: Console) -> None:
    swept = await client.sweep_leaked_blobs(dry_run=False)
    if swept.keys:
        _say(console, f"swept {len(swept.keys)} leaked blobs of {swept.bytes:,} bytes")


def _say(console: Console, text: str) -> None:
    """Print a log line as it is, without wrapping it."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
