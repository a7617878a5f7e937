"""Actors: they give up history, compact and collect it, and let leases run out."""

import asyncio
import random
from datetime import timedelta
from functools import reduce
from typing import Any

import aiopersist as ap
from aiopersist.data.updates.consolidate import diff_sum
from aiopersist.data.updates.times import advance
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.upload import Upload
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.compaction import Replace, Total
from tests.simulation.game import Game, give_up, pause
from tests.simulation.world import HONEST
from tests.support.internals import shard_of


async def mover(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    """Gives up history by a hold of its own, and forgets it by compactions of its own."""
    reader: ap.ReadHandle[str, int] = await client.reader(game.name, game.schema, create=True)
    writer: ap.WriteHandle[str, int] = await client.writer(game.name, game.schema)
    for _ in range(moves):
        await pause(rng)
        try:
            await (give_up(game, rng, reader) if rng.random() < 0.3 else compact_anything(game, rng, writer))
        except (ap.LeaseExpired, ap.BatchExpired):
            game.counts["lease expired"] += 1
            await reader.aclose()
            reader = await client.reader(game.name, game.schema)
    await writer.aclose()
    await reader.aclose()


async def owner(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    """Takes a critical since over from another owner, moves it, and is fenced in its turn."""
    async with client.critical_since(game.name, "owned", opaque=1) as critical:
        opaque = critical.opaque
        for _ in range(moves):
            await pause(rng)
            if rng.random() < 0.3:
                opaque = critical.opaque
            times = game.within(critical.since, (await upper(game, client)))
            since = ap.Antichain(rng.choice(times)) if times else critical.since
            try:
                mine = rng.randrange(1, 2**30)
                moved = await critical.compare_and_downgrade_since(opaque, mine, since)
                opaque = mine
                game.seen.promise(since <= moved, f"asked for {since} and got {moved}")
            except ap.OpaqueMismatch as error:
                game.counts["fenced"] += 1
                game.seen.promise(error.actual != opaque, error)
            except ap.Indeterminate:
                game.counts["unknowable"] += 1


async def upper(game: Game, client: ap.Client) -> ap.Antichain:
    return (await client.inspect(game.name)).upper


async def keeper(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    """Asks for every kind of maintenance; that it is asked for at a bad moment is told honestly."""
    for _ in range(moves):
        await pause(rng)
        what = rng.choice(["compact", "compact", "share", "gc", "gc", "sweep", "maintain", "retain", "fsck"])
        try:
            await maintenance(game, rng, client, what)
            game.counts[what] += 1
        except HONEST as error:
            game.counts[f"{what}: {type(error).__name__}"] += 1


async def maintenance(game: Game, rng: random.Random, client: ap.Client, what: str) -> None:
    if what == "compact":
        await client.force_compaction(game.name)
    elif what == "share":
        await share_compaction(game, rng, client)
    elif what == "gc":
        collected = await client.force_gc(game.name)
        game.counts["parts collected"] += collected.parts
    elif what == "sweep":
        found = await client.sweep_leaked_blobs(dry_run=False)
        game.counts["blobs swept"] += len(found.keys)
    elif what == "maintain":
        done = await client.maintain()
        honest = all(text.startswith(tuple(e.__name__ for e in HONEST)) for text in done.failures.values())
        game.seen.promise(honest, done.failures)
    elif what == "retain":
        times = [timedelta(seconds=rng.choice([0, 600]))] if game.product else [1, 3, 8]
        await client.retain(game.name, rng.choice([None, timedelta(seconds=300), *times]))
    else:
        report = await client.fsck(game.name)
        game.seen.promise(report.ok, report.problems)


async def share_compaction(game: Game, rng: random.Random, client: ap.Client) -> None:
    """Some rounds, whose pieces another process does in part."""
    goal = None
    async with game.client(rng) as other:
        for _ in range(rng.choice([1, 5])):
            async with client.shared_compaction(game.name, goal) as compaction:
                goal, results = compaction.goal, []
                for piece in await compaction.pieces(rng.choice([1, 3])):
                    await pause(rng)
                    results.append(await rng.choice([client, other]).compact_piece(piece))
                if compaction.is_needed:
                    game.counts["compacted together"] += await compaction.apply(results)


async def compact_anything(game: Game, rng: random.Random, writer: Any) -> None:
    """Replace some neighbouring batches by one, with times advanced to since."""
    shard = shard_of(writer)
    state = shard.state
    ordinals = list(state.batches)
    if not ordinals or writer.writer_id not in state.writers:
        return
    first = rng.randrange(len(ordinals))
    chosen = ordinals[first : first + rng.choice([1, 2, 5])]
    batches = [state.batches[o] for o in chosen]
    since = reduce(ap.Antichain.join, (b.since for b in batches), state.since)
    upload = Upload(shard, game.schema, 0, writer.writer_id, batches[0].lower, one_blob=True, since=since)
    named = [(batch, part) for batch in batches for part in batch.parts]
    table = await Fetch(shard, game.schema).table(named, Selection(), "")
    await upload.add(advance(table, since))
    batch = await upload.finish(batches[-1].upper)
    inputs = dict(zip(chosen, batches, strict=True))
    read = Total(table.num_rows, diff_sum(table))
    flush = Replace(writer.writer_id, inputs, batch, read, upload.wrote)
    slot = Slot()
    try:
        game.counts["compacted"] += bool(await commit(shard.register, flush, slot))
    except ap.BatchExpired:
        pass


async def clock_jumper(game: Game, rng: random.Random, client: ap.Client, moves: int) -> None:
    """Jumps: a reader has a lease of 900 s, a writer one of 3600 s."""
    for _ in range(moves):
        await asyncio.sleep(rng.choice([0.001, 0.01, 0.05]))
        game.world.clock.jump(rng.choice([-30, 100, 500, 1000, 4000]))
