"""Programs that publish shards, and read what all others have published: each kept version shows the contents
of its time, whatever was given up, compacted and collected since, and whoever was cut off meanwhile."""

import asyncio
from typing import Any

import aiopersist as ap
from aiopersist.iceberg.metadata import file_of
from aiopersist.iceberg.table_folder import FOLDER, version_in
from tests.support.published import Rows, counted, shown_by
from tests.worlds.ledger import Publication
from tests.worlds.programs.tags import CUT_S, DOUBTS, LEASED_S
from tests.worlds.scene import Scene

PUBLISHED = ("events", "twin", "copies", "ticks", "race", "counts", "money", "rows", "duty", "bills")
CALLS_MAX = 8  # of one machine
KEEP = 2


async def publisher(scene: Scene, name: str, client: ap.Client) -> None:
    while not scene.is_over:
        act = scene.dice.choice([publish, publish, publish, look_at_one, look_at_one, unpublish])
        try:
            await act(scene, name, client)
        except DOUBTS as error:
            scene.counts[f"publications: {type(error).__name__}"] += 1
        await (scene.slowly() if scene.rolled(0.3) else scene.pause())


async def publish(scene: Scene, name: str, client: ap.Client) -> None:
    """The newest contents, or those of `events` at any time."""
    shards = sorted({*await client.list_shards()} & {*PUBLISHED} - ended(scene))
    if not shards or scene.ledger.done[name] >= CALLS_MAX:
        return
    scene.ledger.done[name] += 1
    shard = scene.dice.choice(shards)
    as_of, began = None, scene.world.now_s
    try:
        async with client.reader(shard) as reader:
            if shard == "events" and scene.rolled(0.5):
                since, upper = reader.since.time, (await reader.fetch_recent_upper()).time
                as_of = scene.dice.randrange(since, upper) if since < upper else None  # type: ignore[operator, arg-type]
            async with reader.snapshot(as_of) as snapshot:
                publication = scene.ledger.publications.setdefault(shard, Publication())
                publication.contents[snapshot.as_of] = counted(await snapshot.rows())
                await begun(scene, client, shard, snapshot.as_of)
    except ap.NotReadable:
        scene.promise(as_of is None, f"{shard} is not readable at {as_of}")
    except ap.LeaseExpired:
        scene.promise(scene.world.now_s - began > LEASED_S, "a snapshot was lost while its lease ran")
    except ap.SinceViolation:  # a snapshot keeps its version, not the history
        scene.counts["publications too late"] += 1


async def begun(scene: Scene, client: ap.Client, shard: str, as_of: Any) -> None:
    """Publish; the call may be cancelled, and is made again if it had no answer."""
    for _ in range(3):
        call = asyncio.create_task(client.publish(shard, as_of=as_of, keep=KEEP))
        if scene.rolled(0.3):
            await scene.world.sleep(scene.dice.choice(CUT_S))
            call.cancel()
        try:
            published = await call
        except asyncio.CancelledError:
            scene.counts["publications cut off"] += 1
        except DOUBTS:
            scene.counts["publications in doubt"] += 1
        except ap.Conflict:
            scene.counts["publications lost to others"] += 1
            return
        else:
            scene.counts["published"] += 1
            publication = scene.ledger.publications[shard]
            scene.promise(published.as_of == as_of, published)
            publication.version = max(publication.version, published.version)
            look(scene, shard)
            return
        look(scene, shard)
        await scene.pause()


async def unpublish(scene: Scene, name: str, client: ap.Client) -> None:
    """For good: calls of a publisher that was cut off may land later, and the end removes what they leave."""
    shards = sorted(scene.ledger.publications)
    if shards and scene.rolled(0.2):
        shard = scene.dice.choice(shards)
        scene.ledger.publications[shard].is_ended = True
        await client.unpublish(shard)
        scene.counts["unpublished"] += 1


def ended(scene: Scene) -> set[str]:
    """The shards whose publication somebody has begun to end."""
    return {shard for shard, publication in scene.ledger.publications.items() if publication.is_ended}


# --- read ---------------------------------------------------------------------------------------------


async def look_at_one(scene: Scene, name: str, client: ap.Client) -> None:
    if shards := sorted(scene.ledger.publications):
        look(scene, scene.dice.choice(shards))


def look(scene: Scene, shard: str) -> None:
    """What pyiceberg reads at this moment of each kept version. No time passes."""
    publication = scene.ledger.publications[shard]
    if publication.is_ended:
        return
    blob, folder = scene.world.blob, f"{FOLDER}/{shard}/"
    files = {f"{blob.uri}/{key}": data for key, data in blob._shared.blobs.items()}
    keys = [key.removeprefix(folder) for key in blob._shared.blobs if key.startswith(folder)]
    versions = sorted(version for key in keys if (version := version_in(key)) is not None)
    told = publication.version
    scene.promise(max(versions, default=0) >= told, f"{shard}: version {told} is lost, {versions} are there")
    for version in versions[-KEEP:]:
        shown = shown_by(files, f"{blob.uri}/{folder}metadata/{file_of(version)}")
        expected: Rows | None = publication.contents.get(shown.as_of)
        scene.promise(shown.rows == expected, f"{shard}: version {version} has {shown}, not {expected}")
        scene.counts["versions read"] += 1


# --- the end ------------------------------------------------------------------------------------------


def check(scene: Scene) -> None:
    """Each kept version shows the contents of its time."""
    for shard in scene.ledger.publications:
        look(scene, shard)
        scene.counts["publications at the end"] += 1


async def check_ended(scene: Scene, honest: ap.Client) -> None:
    """After all publications have ended, nothing is left of them."""
    for shard in scene.ledger.publications:
        await honest.unpublish(shard)
        pins = [name for name in await honest.tags(shard) if name.startswith("iceberg-")]
        assert not pins, f"{shard}: {pins} are left"
        await honest.force_gc(shard)
    left = [key for key in scene.world.blob._shared.blobs if key.startswith(f"{FOLDER}/")]
    assert not left, f"left of publications: {left}"
