"""Programs that tag shards and tables, and read the tags of all others: a tag has the contents of its time,
until somebody drops it or it expires, whatever was given up, compacted and collected since."""

import asyncio
from datetime import timedelta
from typing import Any

import aiopersist as ap
from tests.table import moves
from tests.worlds.ledger import Tagged
from tests.worlds.scene import LEASE_S, Scene

TAGGED = (
    *("events", "twin", "copies", "ticks", "race", "counts", "money", "rows", "duty", "bills", "persons"),
    *(*moves.TABLES, moves.JOURNAL),
)
TAGS_MAX = 12  # of one machine
CUT_S = (0.001, 0.003, 0.01, 0.05, 0.3)
EXPIRES_S = (20.0, 100.0)
LEASED_S = 3 * LEASE_S / 4  # what was open for less has no reason to be lost
DOUBTS = (ap.StorageUnavailable, ap.Indeterminate)


async def tagger(scene: Scene, name: str, client: ap.Client) -> None:
    while not scene.is_over:
        act = scene.dice.choice([add, add, read, read, read, drop])
        try:
            await act(scene, name, client)
        except DOUBTS as error:
            scene.counts[f"tags: {type(error).__name__}"] += 1
        await (scene.slowly() if scene.rolled(0.3) else scene.pause())


# --- add ----------------------------------------------------------------------------------------------


async def add(scene: Scene, name: str, client: ap.Client) -> None:
    """A tag of the newest contents, or of `events` at any time; its call may be cancelled."""
    shards = sorted({*await client.list_shards()} & {*TAGGED})
    if not shards or (number := scene.ledger.done[name]) >= TAGS_MAX:
        return
    scene.ledger.done[name] += 1
    shard = scene.dice.choice(shards)
    tag = Tagged(shard, f"{name}-{number}", scene.dice.choice([None, None, *EXPIRES_S]))
    began = scene.world.now_s
    try:
        async with client.reader(shard) as reader:
            if shard == "events" and scene.rolled(0.7):
                since, upper = reader.since.time, (await reader.fetch_recent_upper()).time
                tag.as_of = scene.dice.randrange(since, upper) if since < upper else None
                await begun(scene, client, tag)
            else:
                async with reader.snapshot() as snapshot:
                    tag.as_of, tag.rows = snapshot.as_of, plain(await snapshot.rows())
                    await begun(scene, client, tag)
    except ap.NotReadable:  # nothing was written yet
        scene.promise(tag.view is None and tag.as_of is None, tag)
    except ap.LeaseExpired:
        scene.promise(scene.world.now_s - began > LEASED_S, "a snapshot was lost while its lease ran")
    except ap.SinceViolation:  # a snapshot keeps its version, not the history
        scene.promise(tag.view is None and tag.as_of is not None, tag)


async def begun(scene: Scene, client: ap.Client, tag: Tagged) -> None:
    scene.ledger.tags[tag.shard, tag.name] = tag
    expires = None if tag.expires_s is None else timedelta(seconds=tag.expires_s)
    for _ in range(3):
        call = asyncio.create_task(client.tag(tag.shard, tag.name, tag.as_of, expires=expires))
        if scene.rolled(0.3):
            await scene.world.sleep(scene.dice.choice(CUT_S))
            call.cancel()
        try:
            tag.view = await call
            scene.counts["tags added"] += 1
            return
        except asyncio.CancelledError:
            scene.counts["tags cut off"] += 1
        except ap.TagExists:  # an earlier call of ours was answered late, or never
            scene.promise(tag.calls > 0, tag)
            tag.view = (await client.tags(tag.shard)).get(tag.name)
            scene.promise(tag.view is not None or tag.expires_s is not None, tag)
            scene.counts["tags there after all"] += 1
            return
        except DOUBTS:
            scene.counts["tags in doubt"] += 1
        tag.calls += 1
        if scene.rolled(0.3):
            return
        await scene.pause()


def plain(rows: list[Any]) -> list[Any]:
    """Without what an evolved schema adds to old rows."""
    return sorted(((key, _known(val), diff) for key, val, diff in rows), key=repr)


def _known(val: Any) -> Any:
    return {name: v for name, v in val.items() if v is not None} if isinstance(val, dict) else val


# --- read ---------------------------------------------------------------------------------------------


async def read(scene: Scene, name: str, client: ap.Client) -> None:
    """Any tag that somebody was told of; it may be dropped meanwhile, before it is opened or after."""
    tags = [tag for tag in scene.ledger.tags.values() if tag.view is not None and not tag.is_dropped]
    if not tags:
        return
    tag = scene.dice.choice(tags)
    began = scene.world.now_s
    try:
        if scene.rolled(0.2):
            await read_together(scene, client, tag)
            return
        async with client.reader(tag.shard) as reader, reader.snapshot(tag=tag.name) as snapshot:
            began = scene.world.now_s
            await scene.slowly()
            note(scene, tag, snapshot.as_of, await snapshot.rows())
    except ap.UnknownTag as error:
        scene.promise(may_be_gone(scene, tag), f"{tag}: {error}")
    except ap.LeaseExpired:
        scene.promise(scene.world.now_s - began > LEASED_S, "a tag was lost while its lease ran")


async def read_together(scene: Scene, client: ap.Client, tag: Tagged) -> None:
    """In pieces, as processes do that share a read."""
    async with client.workers.shared_read(tag.shard, tag=tag.name) as shared:
        pieces = await shared.pieces(2)
        rows: list[Any] = []
        for piece in pieces:
            await scene.pause()
            async for batch in client.workers.read_piece(piece):
                rows += zip(*batch.to_pydict().values(), strict=True)
    assert tag.view is not None
    note(scene, tag, tag.view.as_of, rows)
    scene.counts["tags read together"] += 1


def note(scene: Scene, tag: Tagged, as_of: Any, rows: list[Any]) -> None:
    """Compare what a tag had; the end compares it with all updates of `events`."""
    assert tag.view is not None and as_of == tag.view.as_of, (tag, as_of)
    if tag.shard == "events":
        scene.ledger.snapshots.append((as_of, sorted(rows)))
    scene.promise(tag.rows is None or plain(rows) == tag.rows, f"{tag} has {rows}")
    scene.counts["tags read"] += 1


def may_be_gone(scene: Scene, tag: Tagged) -> bool:
    """Whether somebody began to drop it, or it has expired."""
    ends = None if tag.view is None else tag.view.expires_at
    return tag.is_dropped or (ends is not None and ends <= scene.world.runtime.wall())


# --- drop ---------------------------------------------------------------------------------------------


async def drop(scene: Scene, name: str, client: ap.Client) -> None:
    """Any tag, perhaps once more: what was not answered is repeated."""
    tags = [tag for tag in scene.ledger.tags.values() if tag.view is not None and not tag.is_gone]
    if len(tags) < 3:
        return
    tag = scene.dice.choice(tags)
    repeated, tag.is_dropped = tag.is_dropped, True
    try:
        await client.untag(tag.shard, tag.name)
    except ap.UnknownTag:
        scene.promise(repeated or may_expire(tag), tag)
    tag.is_gone = True
    scene.counts["tags dropped"] += 1


def may_expire(tag: Tagged) -> bool:
    return tag.expires_s is not None


# --- the end ------------------------------------------------------------------------------------------


async def check(scene: Scene, honest: ap.Client) -> None:
    """The tags that are there are those that were told, with the contents of their times."""
    shards = {*await honest.list_shards()} & {*TAGGED}
    present = {(s, name): view for s in sorted(shards) for name, view in (await honest.tags(s)).items()}
    present = {at: view for at, view in present.items() if not at[1].startswith("iceberg-")}
    tags = scene.ledger.tags
    assert present.keys() <= tags.keys(), f"nobody added {present.keys() - tags.keys()}"
    for at, tag in tags.items():
        if at in present:
            await check_contents(scene, honest, tag, present[at])
        else:
            assert tag.view is None or may_be_gone(scene, tag), f"{tag} is lost"
            scene.counts["tags expired"] += tag.view is not None and not tag.is_dropped


async def check_contents(scene: Scene, honest: ap.Client, tag: Tagged, view: ap.TagView) -> None:
    assert not tag.is_gone, f"{tag} was dropped, and is there"
    assert tag.view in (None, view) and tag.as_of in (None, view.as_of), (tag, view)
    tag.view = view
    try:
        async with honest.reader(tag.shard) as reader, reader.snapshot(tag=tag.name) as snapshot:
            assert snapshot.as_of == view.as_of
            rows = await snapshot.rows()
    except ap.UnknownTag:  # the commit for the reader dropped it
        assert may_be_gone(scene, tag), tag
        return
    if tag.shard == "events":
        contents = scene.ledger.contents(view.as_of + 1)  # type: ignore[operator]
        assert sorted(rows) == contents, f"{tag} has {rows}"
    assert tag.rows is None or plain(rows) == tag.rows, f"{tag} has {rows}"
    scene.counts["tags at the end"] += 1
