"""`aiopersist maintain`: a process that only maintains a location.

Applications may open their clients with `maintenance=False` or not: claims in the states of shards divide the
work among all processes and clients.
"""

import asyncio
import signal
from typing import Annotated

import typer

from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import Interrupted, Invocation, Problems
from aiopersist.cli.publish import RepeatedPublications
from aiopersist.cli.shown import counted, shown_bytes
from aiopersist.client.client import Client
from aiopersist.maintenance.rounds import MaintenanceRound


async def maintain(
    run: Invocation,
    once: Annotated[bool, typer.Option("--once", help="Run one round and one sweep, then exit.")] = False,
    every_s: Annotated[float, typer.Option(min=0.01, help="Seconds between two rounds.")] = 10.0,
    sweep_every_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between two sweeps of leaked blobs.")
    ] = 3600.0,
    publish: Annotated[
        list[str] | None,
        typer.Option(metavar="SHARD=EVERY", help="Publish a shard as an Iceberg table: stock=10min."),
    ] = None,
) -> None:
    """Maintain all shards of a location: compact, collect garbage, apply retention, sweep leaked blobs."""
    publications = RepeatedPublications.of(publish)
    async with run.writing() as client:
        work = asyncio.create_task(
            _once(client, run, publications)
            if once
            else _rounds(client, run, every_s, sweep_every_s, publications)
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        await asyncio.wait([work])
        if work.cancelled():
            run.tell_one({"done": "ended"}, "ended")
            if once:
                raise Interrupted
        else:
            work.result()


async def _once(client: Client, run: Invocation, publications: RepeatedPublications) -> None:
    done = await _round(client, run)
    await _sweep(client, run)
    failed = await publications.publish_due(client, run)
    if done.failures:
        raise Problems(f"{len(done.failures)} of {done.shards} shards could not be maintained")
    if failed:
        raise Problems(f"not published: {', '.join(map(repr, failed))}")


async def _rounds(
    client: Client, run: Invocation, every_s: float, sweep_every_s: float, publications: RepeatedPublications
) -> None:
    loop = asyncio.get_running_loop()
    next_sweep = loop.time()
    while True:
        try:
            await _round(client, run)
            if loop.time() >= next_sweep:
                next_sweep = loop.time() + sweep_every_s
                await _sweep(client, run)
            await publications.publish_due(client, run)
        except Exception as error:  # the next round maintains the rest
            reason = f"{type(error).__name__}: {error}"
            run.tell_one({"done": "cut off", "error": reason}, f"a round failed: {reason}")
        await SYSTEM.sleep(every_s)


async def _round(client: Client, run: Invocation) -> MaintenanceRound:
    done = await client.admin.maintain()
    if done.did_something:
        text = (
            f"{done.looked_at} of {done.shards} shards changed: {done.compactions} compactions, "
            f"{done.collections} collections of {done.parts} parts and {done.versions} versions"
        )
        failed = (f"{name} could not be maintained: {failure}" for name, failure in done.failures.items())
        run.tell_one({"done": "round", **done.model_dump()}, "\n".join([text, *failed]))
    return done


async def _sweep(client: Client, run: Invocation) -> None:
    swept = await client.admin.sweep_leaked_blobs(dry_run=False)
    if swept.keys:
        count, size = len(swept.keys), swept.bytes
        text = f"swept {counted(count, 'leaked blob')} of {shown_bytes(size)}"
        run.tell_one({"done": "sweep", "blobs": count, "bytes": size}, text)
