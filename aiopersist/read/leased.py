"""The parts of a snapshot, one by one: to be read elsewhere, by several processes at once.

A part is read as it lies: updates at times `<= as_of`, told as of that time, and not summed with those of
other parts. Whoever reads them all and sums them has the snapshot. The snapshot that they come from holds the
blobs, so it must be open until the last one is fetched.
"""

from abc import ABC, abstractmethod
from typing import Any

from aiopersist.data.assemble import at_time
from aiopersist.data.codec import Schema
from aiopersist.data.stats import ColumnStats, decode_stats
from aiopersist.data.updates import Updates
from aiopersist.errors import CodecMismatch, Corruption, LeaseExpired
from aiopersist.frontier import Time
from aiopersist.resource import Scope
from aiopersist.shard.envelope import Envelope
from aiopersist.shard.fetch import Fetch, Named, Selection
from aiopersist.shard.shard import Shard
from aiopersist.state.model import HollowBatch, Record, State

ENVELOPE = Envelope("part", format=1)


class TransmittedPart(Record):
    """What travels."""

    shard: str
    reader: str
    """Whose lease keeps the blob."""
    schema_id: int
    """Of the columns that it is read as."""
    as_of: int | tuple[int, ...]
    batch: HollowBatch
    """With this part alone."""


class LeasedPart:
    """A part of an open snapshot."""

    def __init__(self, named: Named, fetch: Fetch, reader: str, as_of: Time) -> None:
        self._batch, self._part = named
        self._fetch = fetch
        self._reader = reader
        self._as_of = as_of

    @property
    def key(self) -> str | None:
        """Its blob key; `None` if it is inline."""
        return self._part.key

    @property
    def encoded_size_bytes(self) -> int:
        return self._part.size

    @property
    def len(self) -> int:
        """Updates in it, those beyond the time of the snapshot included."""
        return self._part.rows

    @property
    def stats(self) -> dict[str, ColumnStats] | None:
        """Bounds of the values of each leaf column, by its dotted name; `None` if it has none."""
        stored = self._part.stats
        if stored is None:
            return None
        return decode_stats(stored, self._fetch.shard.schema(self._part.schema_id))

    def to_transmittable(self) -> bytes:
        """What another process hands to `client.fetch_part` while the snapshot is open."""
        value = TransmittedPart.of(
            shard=self._fetch.shard.id,
            reader=self._reader,
            schema_id=self._fetch.schema_id,
            as_of=self._as_of,
            batch=self._batch.replace(parts=(self._part,), runs=()),
        )
        return ENVELOPE.seal(value)

    def __repr__(self) -> str:
        return f"<LeasedPart {self.key or 'inline'}: {self.encoded_size_bytes} bytes>"


class FetchesParts(ABC):
    """A part of the client."""

    _calls: Scope

    @abstractmethod
    async def _existing(self, name: str) -> Shard:
        """The shard of that name or id, as it is now; `UnknownShard`."""

    async def fetch_part(
        self, data: bytes, schema: Schema[Any, Any, Any] | None = None
    ) -> Updates[Any, Any, Any]:
        """The updates of a part that a snapshot gave, here or in another process: at times `<= as_of`, told
        as of that time, not consolidated across parts. By the stored schema, or one that is the same.

        `InvalidUpdate` for what is no part; `LeaseExpired` once the snapshot was closed, or its lease lost,
        and the part is gone. One request for the shard's head, and one for the part if it is not inline."""
        with self._calls.call():
            told = ENVELOPE.open(data, TransmittedPart)
            shard = await self._existing(told.shard)
            stored = shard.schema(told.schema_id)
            if schema is not None and not stored.same_as(schema):
                raise CodecMismatch(schema, stored, shard_id=shard.id)
            fetch = Fetch(shard, schema or stored)
            named = [(told.batch, part) for part in told.batch.parts]
            try:
                table = await fetch.table(named, Selection(as_of=told.as_of), told.reader)
            except Corruption:
                there = _names(await shard.open())
                if any(part.key in there for _, part in named):
                    raise
                what = "the snapshot was closed, and a part of it is gone"
                raise LeaseExpired(what, shard_id=shard.id) from None
            return Updates(at_time(table, told.as_of, fetch.schema), fetch.schema)


def _names(state: State) -> set[str | None]:
    """The blobs of parts that are there."""
    return {part.key for batch in state.batches.values() for part in batch.parts}
