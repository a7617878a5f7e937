"""The parts of a snapshot, one by one, so that several processes can read it together; and batches of leased
parts, in any client.

`fetch_part` returns the updates of one part at times `<= as_of`, all at that time, not summed with those of
other parts. The sum of all parts is the snapshot. The snapshot holds the blobs, so keep it open until the
last part is fetched.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from aiopersist.base.errors import (
    CodecMismatch,
    DiffOverflow,
    Error,
    InvalidUpdate,
    InvalidUsage,
    LeaseExpired,
    MissingPart,
)
from aiopersist.base.frontier import Time, shaped
from aiopersist.data.lazy import pa
from aiopersist.data.part.stats import ColumnStats, decode_stats, leaf_types, merge
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import at_time
from aiopersist.data.updates.updates import Updates
from aiopersist.parts.divide import check_part
from aiopersist.parts.envelope import Envelope
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.read.stream import Runs, in_batches
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.commit import commit
from aiopersist.shard.lease import HEARTBEATS_PER_LEASE
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.keys import BlobKey
from aiopersist.state.model import HollowBatch
from aiopersist.state.names import live_parts
from aiopersist.state.reading import KeepReader
from aiopersist.state.record import HollowPart, Record

ENVELOPE = Envelope("part", format=1)


class TransmittedPart(Record, frozen=True, kw_only=True):
    """A part, encoded for another process."""

    shard: str
    reader: str
    """The reader whose lease keeps the blob."""
    schema_id: int
    """The schema of the read."""
    as_of: int | tuple[int, ...]
    batch: HollowBatch
    """It has only this part."""


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
        """Updates in it, including those beyond the time of the snapshot."""
        return self._part.rows

    @property
    def stats(self) -> dict[str, ColumnStats] | None:
        """Bounds of the values of each leaf column, by its dotted name; `None` without statistics."""
        stored = stats_of(self._part)
        return None if stored is None else decode_stats(stored, self._fetch.schema)

    def to_transmittable(self) -> bytes:
        """The part as bytes, for `client.workers.fetch_part` in any process while the snapshot is open."""
        value = TransmittedPart(
            shard=self._fetch.shard.id,
            reader=self._reader,
            schema_id=self._fetch.schema_id,
            as_of=self._as_of,
            batch=self._batch.replace(parts=(self._part,), runs=()),
        )
        return ENVELOPE.encode(value)

    def __repr__(self) -> str:
        return f"<LeasedPart {self.key or 'inline'}: {self.encoded_size_bytes} bytes>"


async def fetch_part(
    shards: Shards, data: bytes, schema: Schema[Any, Any, Any] | None
) -> Updates[Any, Any, Any]:
    """See `Workers.fetch_part`."""
    transmitted = ENVELOPE.decode(data, TransmittedPart)
    shard = await shards.of_a_piece(_checked(transmitted))
    if not {transmitted.schema_id, transmitted.batch.parts[0].schema_id} <= shard.state.schemas.keys():
        raise InvalidUpdate("a transmitted part has a schema that the shard does not have")
    stored = shard.schema(transmitted.schema_id)
    try:
        shaped(transmitted.as_of, stored.time_length)
    except InvalidUsage as error:
        raise InvalidUpdate(f"a transmitted part has no time of the shard: {error}") from error
    chosen = stored if schema is None else shard.as_stored(schema)
    if not stored.same_as(chosen):
        raise CodecMismatch(schema, stored, shard_id=shard.id)
    fetch = Fetch(shard, chosen)
    named = [(transmitted.batch, part) for part in transmitted.batch.parts]
    try:
        table = await fetch.table(named, Selection(as_of=transmitted.as_of), transmitted.reader)
    except MissingPart as error:
        raise await why_missing(shard, transmitted.batch.parts, error, "snapshot") from None
    return Updates(at_time(table, transmitted.as_of, fetch.schema), fetch.schema)


async def leased_batches(
    fetch: Fetch, runs: Runs, selection: Selection, reader: str, read: str, final: bool
) -> "AsyncGenerator[pa.RecordBatch, None]":
    """The rows of runs that the lease of `reader`, perhaps of another client, keeps. Renews it when that is
    due. `LeaseExpired`, which says that the `read` was closed, if a part is gone."""
    shard = fetch.shard
    await _renew(shard, reader)
    async with aclosing(in_batches(fetch, runs, selection, reader, final=final)) as batches:
        try:
            async for batch in batches:
                await _renew(shard, reader)  # a large read may take longer than the lease
                yield batch
        except DiffOverflow as error:
            error.shard_id = shard.id
            raise
        except MissingPart as error:
            raise await why_missing(shard, (part for run in runs for _, part in run), error, read) from None


async def _renew(shard: Shard, reader: str) -> None:
    """Renew the lease if a heartbeat is due. If it has ended, only the read of a missing part fails."""
    record = shard.state.readers.get(reader)
    if record is None:
        return
    now = await shard.stack.consensus.now()
    if now - record.heartbeat > record.lease_s / HEARTBEATS_PER_LEASE:
        try:
            await keep_lease(shard, reader)
        except LeaseExpired:
            pass


async def keep_lease(shard: Shard, reader: str) -> None:
    """A heartbeat: one commit."""
    await commit(shard.register, KeepReader(reader))


async def why_missing(shard: Shard, parts: Iterable[HollowPart], error: MissingPart, read: str) -> Error:
    """`LeaseExpired` for a deleted part, or `error` if the newest version names all of `parts`."""
    keys = {part.key for part in parts if part.key is not None}
    if keys <= live_parts(await shard.open()):
        return error
    return LeaseExpired(f"the {read} was closed, and a part of it is gone", shard_id=shard.id)


def stats_of(part: HollowPart) -> dict[str, Any] | None:
    """The stored statistics that a read may use: without the times of a rewritten part."""
    if part.stats is None or part.rewrite is None:
        return part.stats
    return {name: entry for name, entry in part.stats.items() if name.partition(".")[0] != "time"}


def common_stats(parts: Sequence[HollowPart], schema: Schema[Any, Any, Any]) -> dict[str, ColumnStats]:
    """Bounds over all parts, for the columns of `schema` with statistics in every part."""
    records = [stats_of(part) for part in parts]
    present = [record for record in records if record is not None]
    if not present or len(present) < len(records):
        return {}
    common = set.intersection(leaf_types(schema).keys() & present[0].keys(), *map(set, present))
    return decode_stats(merge([{name: r[name] for name in sorted(common)} for r in present], schema), schema)


def _checked(transmitted: TransmittedPart) -> str:
    """The shard of a transmitted part; `InvalidUpdate` if it cannot be a part."""
    (part, *others) = transmitted.batch.parts or (None,)
    if part is None or others:
        raise InvalidUpdate("a transmitted part names no part, or several")
    check_part(part)
    try:
        ShardId.parse(transmitted.shard)
        mine = part.key is None or BlobKey.parse(part.key).shard == transmitted.shard
    except InvalidUsage as error:
        raise InvalidUpdate(f"a transmitted part cannot be read: {error}") from error
    if not mine:
        raise InvalidUpdate(f"part {part.key} is not of shard {transmitted.shard}")
    return transmitted.shard
