"""Searches all data that the stores have of a shard for the rows to erase.

It uses no state in memory, and no cache. It reads

- every version in the consensus store, even truncated ones that are still stored: their inline parts, and the
  positions of subscriptions, which may name a key;
- every blob that is listed under the shard, named by a version or not: parts and rollups, also of tags.

It does not read the files of a published table (`iceberg/`): those of snapshots from before since may have
the rows.

A version also has the least and greatest values of its parts. These are values of rows of the part, so the
search of the part covers them. A named part that is missing cannot be read: the result says so.

In memory are a blob, and a row group of it.
"""

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from aiopersist.base.errors import Corruption
from aiopersist.base.progress import progress
from aiopersist.data.part.inline import decode_inline
from aiopersist.data.part.unnamed import iter_rows
from aiopersist.data.types.evolve import adapt
from aiopersist.data.types.schema import Schema
from aiopersist.erase.rows import MatchingUpdates, RowsToErase
from aiopersist.iceberg.published import files_before
from aiopersist.shard.log import SCAN_LIMIT, consensus_key
from aiopersist.shard.shard import Shard
from aiopersist.state.diff import added_parts
from aiopersist.state.model import Tag
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.record import HollowPart
from aiopersist.state.rollup_file import checksum_of, decode_rollup
from aiopersist.state.seal import decode_version
from aiopersist.storage.consensus import Versioned

PARQUET, ROLLUP = ".parquet", ".rollup"

_Kind = Literal["version", "leftover", "part", "rollup", "position", "publication", "unread"]


class Remnant(BaseModel, frozen=True):
    """A place in the stores that still has rows to erase."""

    kind: _Kind
    """A version; a truncated version that is still stored (`leftover`); a part or a rollup in the blob store;
    the position of a subscription, which names a key; a file of a published version from before, which may
    have rows (`publication`); or data that cannot be read (`unread`)."""
    name: str
    """The number of a version, the key of a blob, or the name of a subscription."""
    rows: int
    """How many of the rows it has."""


@dataclass
class SearchResult:
    """The result of a search."""

    remnants: list[Remnant] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    """Of the matching rows."""
    time: int = -1
    """The latest time of these rows."""
    blobs: set[str] = field(default_factory=set)
    """The keys of the blobs among the remnants: those with such rows, missing ones, and unreadable ones."""

    @property
    def has_rows(self) -> bool:
        """Whether there is more than files of publications, which may have no such rows."""
        return any(remnant.kind != "publication" for remnant in self.remnants)


class Search:
    """See the header. One search of one shard."""

    def __init__(self, shard: Shard, rows: RowsToErase) -> None:
        self._shard = shard
        self._stack = shard.stack
        self._rows = rows
        self._result = SearchResult()
        self._matches: dict[str, MatchingUpdates] = {}
        """The matches in inline parts, by checksum: rollups repeat the parts."""
        self._named: dict[str, tuple[_Kind, str]] = {}
        """By the key of a part or of a tag's rollup: the kind and name of what names it."""

    async def run(self) -> SearchResult:
        """Search everything. Requests for all versions, a listing, and a get for each blob."""
        state = await self._shard.open()
        for number in state.schemas:
            self._shard.schema(number)  # before threads need them
        async for version in self._versions():
            await self._stack.compute(self._look_at_version, "version", version)
        for version in await self._stack.consensus.leftovers(consensus_key(self._shard.id)):
            await self._stack.compute(self._look_at_version, "leftover", version)
        listed = [key async for key, _ in self._stack.blob.list(f"{self._shard.id}/")]
        with progress("search", len(listed), "blobs") as step:
            for key in sorted(listed):
                data = await self._stack.blob.uncached.get(key)
                if data is not None:  # not deleted meanwhile
                    await self._stack.compute(self._look_at_blob, key, data)
                step.advance(1)
        names = {self._shard.known_as, self._shard.id}
        blob, since = self._stack.blob.uncached, self._shard.state.since
        for key in await files_before(blob, sorted(names), self._shard.id, since):
            self._tell("publication", key)
        for key, (kind, name) in self._named.items():
            if key not in listed:
                text = f"{key}, which {kind} {name} names, is missing"
                self._tell(kind if kind == "leftover" else "unread", text)
                self._result.blobs.add(key)
        return self._result

    async def _versions(self) -> AsyncIterator[Versioned]:
        """All versions, by scans."""
        at = 0
        while versions := await self._stack.consensus.scan(consensus_key(self._shard.id), at, SCAN_LIMIT):
            for version in versions:
                yield version
            at = versions[-1].seqno + 1

    # --- on threads ------------------------------------------------------------------------------

    def _look_at_version(self, kind: _Kind, version: Versioned) -> None:
        name = str(version.seqno)
        try:
            changes = decode_version(version.data, self._shard.id).changes
            self._note_tags(changes.tags.values(), kind, name)
            self._tell_rows(kind, name, self._matches_in(added_parts(changes), kind, name))
        except Corruption as error:
            self._tell("unread", f"{kind} {name}: {error}")
        else:
            self._look_at_positions(changes.subscriptions.values(), f"{kind} {name}")

    def _look_at_blob(self, key: str, data: bytes) -> None:
        before = len(self._result.remnants)
        try:
            if key.endswith(ROLLUP):
                state = decode_rollup(data, checksum_of(data))
                self._note_tags(state.tags.values(), "rollup", key)
                self._tell_rows("rollup", key, self._matches_in(state.parts, "rollup", key))
                self._look_at_positions(state.subscriptions.values(), key)
            elif key.endswith(PARQUET):
                self._tell_rows("part", key, self._matches_in_blob(data))
            else:
                self._tell("unread", f"{key}, which is neither a part nor a rollup")
        except Corruption as error:
            self._tell("unread", f"{key}: {error}")
        if len(self._result.remnants) > before:
            self._result.blobs.add(key)

    def _matches_in_blob(self, data: bytes) -> Iterator[MatchingUpdates]:
        for table in iter_rows(data, self._schemas, self._rows.table_schema.schema):
            yield self._rows.matches_in(table)

    @property
    def _schemas(self) -> list[Schema[Any, Any, Any]]:
        """The schemas of the shard, the newest first."""
        return [self._shard.schema(number) for number in sorted(self._shard.state.schemas, reverse=True)]

    def _matches_in(self, parts: Iterable[HollowPart], kind: _Kind, name: str) -> Iterator[MatchingUpdates]:
        """The matches in the inline ones of `parts`. Notes the names of the others."""
        for part in parts:
            if part.key is not None:
                self._named.setdefault(part.key, (kind, name))
            if part.inline is None:
                continue
            if part.checksum not in self._matches:
                rows = decode_inline(part.inline, self._shard.schema(part.schema_id), part.checksum)
                self._matches[part.checksum] = self._rows.matches_in(
                    adapt(rows, self._rows.table_schema.schema)
                )
            yield self._matches[part.checksum]

    def _note_tags(self, tags: Iterable[Tag], kind: _Kind, name: str) -> None:
        for tag in tags:
            for key in tag.keys:
                self._named.setdefault(key, (kind, name))

    def _look_at_positions(self, records: Iterable[SubscriptionRecord], place: str) -> None:
        for record in records:
            contents = record.position.contents
            if contents is not None and contents.key in self._rows.keys:
                self._tell("position", f"{record.key} in {place}")

    def _tell_rows(self, kind: _Kind, name: str, matches: Iterable[MatchingUpdates]) -> None:
        rows = 0
        for keys, time in matches:
            rows += len(keys)
            self._result.keys.update(keys)
            self._result.time = max(self._result.time, time)
        if rows:
            self._result.remnants.append(Remnant(kind=kind, name=name, rows=rows))

    def _tell(self, kind: _Kind, name: str) -> None:
        self._result.remnants.append(Remnant(kind=kind, name=name, rows=0))
