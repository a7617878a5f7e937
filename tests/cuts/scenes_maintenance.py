"""The life cycle of shards, and their maintenance, with one fault."""

from typing import Any

import aiopersist as ap
from tests.cuts.scenes import SCENES, Call, scene
from tests.cuts.stage import NAME, OTHER, SCHEMA, Stage, at, few, many


@scene
async def evolve(s: Stage) -> Call:
    import pyarrow as pa

    fields = [pa.field("a", pa.int64(), nullable=False)]
    before = ap.Schema(key=str, val=pa.struct(fields))
    after = ap.Schema(key=str, val=pa.struct([*fields, pa.field("b", pa.string())]))
    async with s.client.writer("v", before) as w:
        await w.compare_and_append([("k", {"a": 1}, 0, 1)], 0, 1)

    async def call() -> None:
        await s.client.compare_and_evolve_schema("v", 0, after)

    async def evolved(client: Any) -> None:
        number, _ = await client.schema("v")
        if number == 0:
            assert await client.compare_and_evolve_schema("v", 0, after) == 1
        async with client.writer("v", after) as w:
            lower = (await w.fetch_recent_upper()).time
            await w.compare_and_append([(f"l{lower}", {"a": 1, "b": "x"}, lower, 1)], lower, lower + 1)
        async with client.reader("v", before) as r, r.snapshot() as snapshot:
            assert len(await snapshot.rows()) == lower + 1

    s.after.append(lambda: evolved(s.client))
    s.afresh.append(evolved)
    return call


async def _compact(s: Stage) -> Call:
    await s.filled()
    return lambda: s.client.admin.force_compaction(NAME)


async def _collect(s: Stage) -> Call:
    await s.filled(compact=True)
    return lambda: s.client.admin.force_gc(NAME)


async def _maintain(s: Stage) -> Call:
    await s.filled()
    await s.filled(OTHER)
    await s.client.admin.retain(NAME, 1)
    return lambda: s.client.admin.maintain()


async def _retain(s: Stage) -> Call:
    await s.filled()
    return lambda: s.client.admin.retain(NAME, 1)


async def _sweep(s: Stage) -> Call:
    """What a process that died had left, beside a batch that is staged."""
    w = await s.filled()
    await (await w.batch(at(3, many("x")), 3, 4)).flush_to_blob()
    async with s.open() as other, other.writer(NAME, SCHEMA) as dead:
        batch = await dead.batch(at(3, many("y")), 3, 4)
        batch.to_transmittable()
    return lambda: s.client.admin.sweep_leaked_blobs(dry_run=False)


SCENES |= {
    "compact": _compact,
    "collect": _collect,
    "maintain": _maintain,
    "retain": _retain,
    "sweep": _sweep,
}


@scene
async def compact_shared(s: Stage) -> Call:
    await s.filled()
    s.claim_s = 3601.0

    async def call() -> None:
        async with s.client.workers.shared_compaction(NAME) as shared:
            results = [await s.client.workers.compact_piece(piece) for piece in await shared.pieces(2)]
            await shared.apply(results)

    return call


@scene
async def drop(s: Stage) -> Call:
    """Repeated it ends its work, and the name is free."""
    w = await s.filled(OTHER)
    s.gone.add(OTHER)
    await s.filled()

    async def dropped(client: Any) -> None:
        try:
            await client.admin.drop(OTHER)
        except (ap.UnknownShard, ap.ShardFinalized):
            pass
        assert OTHER not in await client.list_shards()

    async def fenced() -> None:
        try:
            await w.compare_and_append(at(3, few("x")), 3, 4)
        except (ap.ShardFinalized, ap.UpperMismatch):
            pass

    s.after += [lambda: dropped(s.client), fenced]
    s.afresh.append(dropped)
    return lambda: s.client.admin.drop(OTHER)


@scene
async def finalize(s: Stage) -> Call:
    w = await s.filled(OTHER)
    s.gone.add(OTHER)
    await w.compare_and_append([], 3, ap.Antichain())
    async with s.client.critical_since(OTHER, "mover") as c:
        await c.compare_and_downgrade_since(0, 0, ap.Antichain())

    async def finalized(client: Any) -> None:
        try:
            await client.admin.finalize(OTHER)
        except ap.ShardFinalized:
            pass

    s.after.append(lambda: finalized(s.client))
    s.afresh.append(finalized)
    return lambda: s.client.admin.finalize(OTHER)
