"""Programs that keep shards small: they compact, alone and together, collect, sweep, and give up history."""

from datetime import timedelta
from typing import Any

import aiopersist as ap
from tests.worlds.scene import HONEST, Scene

ACTS = (
    "force_compaction",
    "force_gc",
    "shrink",
    "sweep_leaked_blobs",
    "maintain",
    "retain",
    "shared_compaction",
)
GONE = (ap.UnknownShard, ap.ShardFinalized)


async def keeper(scene: Scene, name: str, client: ap.Client) -> None:
    while not scene.is_quiet:
        shards = sorted(await client.list_shards()) or ["events"]
        shard = "events" if "events" in shards and scene.rolled(0.5) else scene.dice.choice(shards)
        act = scene.dice.choice(ACTS)
        try:
            await kept_up(scene, client, shard, act)
            scene.counts[act] += 1
        except (*HONEST, *GONE) as error:
            scene.counts[f"not kept: {type(error).__name__}"] += 1
        except ap.InvalidUsage as error:  # a table has a policy of its own
            scene.promise(act == "retain", error)
        if scene.rolled(0.05):
            await scene.world.sleep(100.0)  # leases of who is cut off run out
        await (scene.slowly() if scene.is_over else scene.pause())


async def kept_up(scene: Scene, client: ap.Client, shard: str, act: str) -> None:
    if act == "sweep_leaked_blobs":
        scene.counts["swept"] += len((await client.admin.sweep_leaked_blobs(dry_run=False)).keys)
    elif act == "maintain":
        await client.admin.maintain()
    elif act == "retain":
        if shard in ("events", "twin", "copies", "ticks", "race"):
            await client.admin.retain(shard, scene.dice.choice([None, 0, 1, 3, timedelta(seconds=1)]))
    elif act == "shared_compaction":
        await compact_together(scene, client, shard)
    elif act == "force_gc":
        scene.counts["collected"] += (await client.admin.force_gc(shard)).parts
    else:
        await client.admin.force_compaction(shard)
        if act == "shrink":
            scene.counts["collected"] += (await client.admin.force_gc(shard)).parts


async def compact_together(scene: Scene, client: ap.Client, shard: str) -> None:
    """Pieces lie in the ledger; whoever takes one first does it."""
    async with client.workers.shared_compaction(shard) as compaction:
        pieces = await compaction.pieces(scene.dice.choice([1, 3]))
        scene.ledger.pieces.update(dict.fromkeys(pieces))
        for _ in range(3):
            await scene.pause()
            await do_a_piece(scene, client)
        results: list[bytes] = []
        for piece in pieces:
            done = scene.ledger.pieces.pop(piece, None)
            results.append(await client.workers.compact_piece(piece) if done is None else done)
        if compaction.is_needed:
            scene.counts["compacted together"] += await compaction.apply(results)


async def do_a_piece(scene: Scene, client: ap.Client) -> None:
    waiting = [piece for piece, result in scene.ledger.pieces.items() if result is None]
    if not waiting:
        return
    piece: Any = scene.dice.choice(waiting)
    try:
        result = await client.workers.compact_piece(piece)
    except (*HONEST, *GONE):
        scene.ledger.pieces.pop(piece, None)
        return
    if piece in scene.ledger.pieces:
        scene.ledger.pieces[piece] = result


async def partner(scene: Scene, name: str, client: ap.Client) -> None:
    """Does pieces of the compactions of others."""
    while not scene.is_quiet:
        await do_a_piece(scene, client)
        await (scene.slowly() if scene.is_over else scene.pause())
