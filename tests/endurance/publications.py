"""Published tables in the long run. The processes of a place publish a shard of their own, one after the
other: what pyiceberg reads of a version is what the shard had at its time, as long as it is kept."""

import random
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

import aiopersist as ap
from aiopersist.iceberg.metadata import file_of
from aiopersist.iceberg.published import published_tables
from aiopersist.iceberg.table_folder import FOLDER, newest_of, version_in
from aiopersist.storage.blob import Blob
from tests.endurance.notes import Note, Notes
from tests.support.published import MissingFile, Rows, Shown, counted, shown_in

SHARDS = {"a": "log", "b": "accounts", "c": "counters", "d": "delivered"}  # by place
KEEP = 2
UNPUBLISH_CHANCE = 0.15


class Wrong(AssertionError):
    """A version with other contents, or one that cannot be read."""


class Publications:
    """See the header."""

    def __init__(self, place: str, client: ap.Client, note: Notes, dice: random.Random) -> None:
        self.shard, self.client, self.note, self.dice = SHARDS[place], client, note, dice
        self.rows: dict[int, Rows] = {}
        """By version, of those that this process was told of, since the last `unpublish`."""

    async def step(self) -> None:
        """Publish, and read all kept versions that this process made; or end the publication."""
        if self.dice.random() < UNPUBLISH_CHANCE:
            self.rows = {}
            self.note("unpublishing", "publish", self.shard)
            await self.client.unpublish(self.shard)
            return
        async with self.client.reader(self.shard) as reader, reader.snapshot() as snapshot:
            rows, as_of = counted(await snapshot.rows()), snapshot.as_of
            published = await self.client.publish(self.shard, as_of=as_of, keep=KEEP)
        text = f"{published.version} {digest(as_of, rows)}"
        self.note("told", "publish", self.shard, text)
        self.rows[published.version] = rows
        for version in range(published.version, published.version - KEEP, -1):
            if version in self.rows:
                await self._read(version, as_of if version == published.version else None)

    async def _read(self, version: int, as_of: Any) -> None:
        blob = blob_of(self.client)
        try:
            shown = await shown_version(blob, self.shard, version)
        except MissingFile as missing:
            newest = newest_of(await files_of(blob, self.shard))
            if newest - version < KEEP:
                raise Wrong(f"{self.shard}: version {version} of {newest} has no longer {missing}") from None
            self.note("failed", "publish", self.shard, "MissingFile: a call of a killed process came late")
            return
        if shown.rows != self.rows[version] or as_of not in (None, shown.as_of):
            raise Wrong(f"{self.shard}: version {version} shows {shown}, not {self.rows[version]} at {as_of}")
        self.note("told", "read", self.shard, f"{version}")


def digest(as_of: Any, rows: Rows) -> str:
    """Of the contents at a time."""
    return sha256(repr((as_of, sorted(rows.items(), key=repr))).encode()).hexdigest()


def blob_of(client: ap.Client) -> Blob:
    return client._stack.blob.uncached


async def files_of(blob: Blob, shard: str) -> list[str]:
    """All files of the publication of a shard."""
    folder = f"{FOLDER}/{shard}/"
    return [key.removeprefix(folder) async for key, _ in blob.list(folder)]


async def shown_version(blob: Blob, shard: str, version: int) -> Shown:
    return await shown_at(blob, f"{blob.uri}/{FOLDER}/{shard}/metadata/{file_of(version)}")


async def shown_at(blob: Blob, uri: str) -> Shown:
    return await shown_in(lambda one: blob.get(one.removeprefix(f"{blob.uri}/")), uri)


async def wrong_publications(client: ap.Client, notes: Sequence[Note]) -> AsyncIterator[str]:
    """The versions that do not show what they should, as their notes tell, and as their pins have it; and
    those that are lost."""
    blob = blob_of(client)
    told: dict[str, dict[int, str]] = {}
    for note in sorted(note for note in notes if note.kind == "publish"):
        if note.what == "told":
            version, _, of = note.text.partition(" ")
            told.setdefault(note.op, {})[int(version)] = of
        elif note.what == "unpublishing":
            told.pop(note.op, None)
    for shard in sorted({*told, *(await published_tables(blob))}):
        versions = sorted(v for file in await files_of(blob, shard) if (v := version_in(file)))
        if max(versions, default=0) < max(told.get(shard, {}), default=0):
            yield f"{shard}: the published version {max(told[shard])} is lost, {versions} are there"
        for version in versions[-KEEP:]:
            async for problem in _wrong(client, shard, version, told.get(shard, {}).get(version)):
                yield problem


async def _wrong(client: ap.Client, shard: str, version: int, told: str | None) -> AsyncIterator[str]:
    blob = blob_of(client)
    try:
        shown = await shown_version(blob, shard, version)
    except MissingFile as missing:
        yield f"{shard}: version {version} has no longer {missing}"
        return
    if told not in (None, digest(shown.as_of, shown.rows)):
        yield f"{shard}: version {version} shows other contents than were told, at {shown.as_of}"
    pins = {name: view for name, view in (await client.tags(shard)).items() if view.as_of == shown.as_of}
    names = [name for name in pins if name.startswith(f"iceberg-{shard}-")]
    if not names:
        yield f"{shard}: version {version} is not pinned at {shown.as_of}"
    for name in names:
        async with client.reader(shard) as reader, reader.snapshot(tag=name) as snapshot:
            if counted(await snapshot.rows()) != shown.rows:
                yield f"{shard}: version {version} shows {shown}, which its pin {name} has not"


async def left_by_publications(client: ap.Client) -> AsyncIterator[str]:
    """Unpublish all; then what is left of it: files, pins, and blobs that nobody names."""
    blob = blob_of(client)
    before = await client.admin.usage()
    for shard in SHARDS.values():
        await client.unpublish(shard)
        if shard in await client.list_shards():
            pins = [name for name in await client.tags(shard) if name.startswith("iceberg-")]
            if pins:
                yield f"{shard}: the pins {pins} are left of its publication"
            await client.admin.force_gc(shard)
    left = [key async for key, _ in blob.list(f"{FOLDER}/")]
    if left:
        yield f"{left} are left of publications"
    usage = await client.admin.usage()
    if usage.total - usage.referenced > before.total - before.referenced:
        yield f"blobs that nobody names are left of publications: {usage}, before {before}"
