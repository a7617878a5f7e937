"""`aiopersist maintain`: a process that only maintains a location.

Applications beside it open their clients with `maintenance=False`, or leave it on: claims in the states
of the shards share the work out, between any number of such processes and clients.
"""

import asyncio
import signal
from typing import NamedTuple

from rich.console import Console

from aiopersist.client import Client
from aiopersist.maintenance.rounds import MaintenanceRound
from aiopersist.opening import open as open_client
from aiopersist.runtime import SYSTEM


class RoundFailed(Exception):
    """A round that was asked for alone could not maintain every shard."""


class LocationOptions(NamedTuple):
    """Where; nothing given: where the environment says."""

    location: str | None
    blob: str | None
    consensus: str | None


class Pace(NamedTuple):
    """How often."""

    every_s: float
    sweep_every_s: float
    once: bool


async def run(place: LocationOptions, pace: Pace, console: Console) -> None:
    """Rounds until the process is told to end by SIGTERM or SIGINT; what is under way is given back.
    `InvalidLocation` where there is no location: it makes none, since a path may be mistyped."""
    location, blob, consensus = place
    async with open_client(location, blob=blob, consensus=consensus, readonly=True):
        pass  # it is there
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
        except Exception as error:  # whatever it is, the next round maintains what this one did not come to
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
    """A line of a log: never broken, and as it is."""
    console.print(text, soft_wrap=True, markup=False, highlight=False)
