"""From updates to a hollow batch: checked, cut at the target size, encoded, uploaded.

1. `take` converts the input piece by piece and checks it: data, then times against the bounds. What
   does not fit in the buffer of `settings.blob_target_size` becomes parts on the way: each is
   sorted, summed and encoded on a worker thread and uploaded in the background, at most
   `settings.batch_builder_max_outstanding_parts` at once; past that `take` waits for the oldest.
   So memory is bounded by the setting, whatever the size of the input.
2. `finish` makes the rest a part. If it is the only one and small, it is inline: no blob at all.
3. `discard` deletes what was uploaded, in the background: only for what surely is not referenced.

Blob keys are `<shard>/<writer>/<uuid>.parquet`; the writer is registered before the first upload.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aiopersist.data.codec import Schema
from aiopersist.data.consolidate import sort_and_consolidate
from aiopersist.data.convert import Buffer, Rows, is_arrow, pieces_of, rough_bytes, to_table
from aiopersist.data.inline import checksum, encode_inline
from aiopersist.data.order import row_key
from aiopersist.data.part import EncodedPart, StatsSpec, encode_part
from aiopersist.data.sizes import check_update_size, goodbytes, split
from aiopersist.data.times import first_row_beyond, first_row_not_beyond
from aiopersist.data.tiny import Tiny, tiny
from aiopersist.errors import Error, Indeterminate, InvalidUsage, StorageUnavailable, UsageKind
from aiopersist.frontier import Antichain, Description, Time, minimum
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.model import HollowBatch, HollowPart

log = logging.getLogger("aiopersist")

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

ON_THE_LOOP_ROWS = 256  # fewer rows are converted and sorted faster than a thread is reached
ON_THE_LOOP_BYTES = 64 * 1024


class Upload:
    """One batch in the making: `take`, then `finish`; `batch` is the result."""

    def __init__(
        self,
        shard: Shard,
        schema: Schema[Any, Any, Any],
        schema_id: int,
        writer: str,
        lower: Antichain,
        upper: Antichain,
        *,
        inline: bool = True,
    ) -> None:
        self.batch = HollowBatch.of(lower=lower, upper=upper, since=minimum(schema.time_length))
        self.writer = writer
        self._stack: Stack = shard.stack
        self._shard = shard
        self._schema = schema
        self._schema_id = schema_id
        self._buffer = Buffer()
        self._tiny: Tiny | None = None
        self._inline_allowed = inline
        self._rows = 0
        self._first_beyond: Time | None = None
        self._in_flight: deque[asyncio.Task[_Part | None]] = deque()
        self._parts: list[_Part] = []
        self._keys: list[str] = []

    async def take(self, updates: Any) -> None:
        """Convert and check `updates`: rows, Arrow data, or an iterator or async iterator of either. Times
        beyond the upper are told last: that is a rule of the whole, and the others of its rows."""
        await self._take(updates)
        if self._first_beyond is not None:
            raise _beyond(self._first_beyond, self.batch.upper)

    async def _take(self, updates: Any) -> None:
        rows = tiny(updates, self._schema) if self._tiny is None and not self._rows else None
        if rows is not None and rows.goodbytes <= self._stack.settings.update_size_max:
            check_int_bounds(rows.least_time, rows.greatest_time, self.batch.lower, self.batch.upper)
            self._tiny = rows
        elif isinstance(updates, AsyncIterable):
            async for piece in pieces_as_they_come(updates):
                await self._push(piece)
        elif isinstance(updates, Sequence) and not isinstance(updates, str | bytes):
            await self._push(updates)
        else:
            await self._push_all(pieces_of(updates))

    async def add(self, table: "pa.Table") -> None:
        """Take a table that was converted and checked before."""
        self._buffer.add(table)
        self._rows += table.num_rows
        await self._cut()

    async def finish(self) -> HollowBatch:
        """All parts uploaded and named in `batch`."""
        if self._tiny is not None:
            await self._take_tiny(self._tiny)
        rest = self._buffer.take() if self._buffer.rows else None
        if (
            rest is not None
            and not self._parts
            and not self._in_flight
            and self._fits_inline(goodbytes(rest))
        ):
            part = await self._inline(rest)
            self._parts += [part] if part else []
        else:
            if rest is not None:
                await self._start(rest)
            while self._in_flight:
                await self._collect()
        runs = tuple(i for i in range(1, len(self._parts)) if self._parts[i].first < self._parts[i - 1].last)
        parts = tuple(part.hollow for part in self._parts)
        self.batch = self.batch.replace(parts=parts, runs=runs)
        return self.batch

    def discard(self) -> asyncio.Task[None] | None:
        """Delete what was uploaded, in the background, once uploads in flight have ended: cut off, they
        could still arrive. Idempotent; the task, if there is anything to delete."""
        keys, self._keys = self._keys, []
        if not keys:
            return None
        return self._stack.supervisor.spawn(
            _delete(self._stack, list(self._in_flight), keys), "delete blobs of a failed append"
        )

    # --- the steps -------------------------------------------------------------------------------

    async def _take_tiny(self, rows: Tiny) -> None:
        """A handful of rows that are sorted and summed already."""
        if not rows.batch.num_rows:
            return
        if self._fits_inline(rows.goodbytes):
            self._parts.append(self._inline_part(rows.batch))
        else:
            await self.add(to_table(rows.batch, self._schema))

    async def _push_all(self, pieces: Iterator[Any]) -> None:
        """Push all `pieces`, which are computed on a worker thread, since they may be large."""
        while (piece := await self._stack.compute(next, pieces, None)) is not None:
            await self._push(piece)

    async def _push(self, piece: Any) -> None:
        if is_small(piece):
            table = self._checked(piece)
        else:
            table = await self._stack.compute(self._checked, piece)
        await self.add(table)

    def _checked(self, piece: Any) -> "pa.Table":
        table = to_table(piece, self._schema, row_base=self._rows)
        check_update_size(table, self._stack.settings.update_size_max, row_base=self._rows)
        check_lower(table, self.batch.lower)
        if self._first_beyond is None:
            self._first_beyond = first_beyond(table, self.batch.upper)
        return table

    async def _cut(self) -> None:
        target = self._stack.settings.blob_target_size
        while self._buffer.rows and self._buffer.goodbytes >= max(target, 1):
            *full, last = await self._stack.compute(_split, self._buffer.take(), target)
            for piece in full:
                await self._start(piece)
            if goodbytes(last) >= target:
                await self._start(last)
            else:
                self._buffer.add(last)

    def _fits_inline(self, size: int) -> bool:
        settings, state = self._stack.settings, self._shard.state
        return (
            self._inline_allowed
            and size < settings.inline_writes_single_max_bytes
            and state.inline_bytes + size < settings.inline_writes_total_max_bytes
        )

    async def _inline(self, table: "pa.Table") -> "_Part | None":
        if table.num_rows > ON_THE_LOOP_ROWS:
            table = await self._stack.compute(sort_and_consolidate, table)
        else:
            table = sort_and_consolidate(table)
        return self._inline_part(table) if table.num_rows else None

    def _inline_part(self, columns: "pa.Table | pa.RecordBatch") -> "_Part":
        data = encode_inline(columns)
        hollow = HollowPart.of(
            inline=data,
            size=len(data),
            rows=columns.num_rows,
            checksum=checksum(data),
            schema_id=self._schema_id,
        )
        return _Part(hollow, None, None)

    async def _start(self, table: "pa.Table") -> None:
        """Encode and upload `table` in the background; wait for the oldest if too many are in flight."""
        while len(self._in_flight) >= self._stack.settings.batch_builder_max_outstanding_parts:
            await self._collect()
        key = f"{self._shard.id}/{self.writer}/{self._stack.runtime.uuid()}.parquet"
        self._keys.append(key)
        self._in_flight.append(self._stack.supervisor.spawn(self._upload(key, table), "upload a part"))

    async def _collect(self) -> None:
        """Wait for the oldest part in flight."""
        part = await asyncio.shield(self._in_flight[0])
        self._in_flight.popleft()
        if part is not None:
            self._parts.append(part)

    async def _upload(self, key: str, table: "pa.Table") -> "_Part | None":
        encoded = await self._stack.compute(self._encode, table)
        if encoded is None:
            return None
        part, first, last = encoded
        try:
            await self._stack.blob.set(key, part.data)
        except Indeterminate as error:  # nothing names it: as far as anybody can see it did not happen
            raise StorageUnavailable(f"part {key} was perhaps not written: {error}") from error
        hollow = HollowPart(
            key=key,
            size=part.size,
            rows=part.rows,
            footer_bytes=part.footer_bytes,
            checksum=part.checksum,
            schema_id=self._schema_id,
            key_lower=part.key_lower,
            stats=part.stats,
        )
        return _Part(hollow, first, last)

    def _encode(self, table: "pa.Table") -> "tuple[EncodedPart, Any, Any] | None":
        table = sort_and_consolidate(table)
        if not table.num_rows:
            return None
        description = Description(self.batch.lower, Antichain(), self.batch.since)
        settings = self._stack.settings
        stats = StatsSpec(
            settings.stats_collection_enabled, settings.stats_budget_bytes, settings.stats_untrimmable_columns
        )
        encoded = encode_part(
            table, self._schema, description, row_group_bytes=settings.row_group_bytes, stats=stats
        )
        return encoded, row_key(table, 0), row_key(table, table.num_rows - 1)


class _Part(NamedTuple):
    """A part and its least and greatest (key, val, time), which tell whether it continues a run."""

    hollow: HollowPart
    first: Any
    last: Any


def check_int_bounds(least: int, greatest: int, lower: Antichain, upper: Antichain) -> None:
    """`InvalidUsage` unless all times from `least` to `greatest` lie beyond `lower` and not beyond
    `upper`."""
    if not lower.less_equal(least):
        raise _not_beyond(least, lower)
    if upper.less_equal(greatest):
        raise _beyond(greatest, upper)


def check_lower(table: "pa.Table", lower: Antichain) -> None:
    """`InvalidUsage` unless every time lies beyond `lower`."""
    if table.num_rows and (row := first_row_not_beyond(table, lower)) is not None:
        raise _not_beyond(_time(table.column("time")[row].as_py()), lower)


def first_beyond(table: "pa.Table", upper: Antichain) -> Time | None:
    """The first time that lies at or beyond `upper`."""
    row = first_row_beyond(table, upper) if table.num_rows else None
    return None if row is None else _time(table.column("time")[row].as_py())


def _not_beyond(time: Time, lower: Antichain) -> InvalidUsage:
    message = f"time {time} is not at or beyond lower {lower}"
    return InvalidUsage(UsageKind.UPDATE_NOT_BEYOND_LOWER, message, time=time, lower=lower)


def _beyond(time: Time, upper: Antichain) -> InvalidUsage:
    message = f"time {time} is at or beyond upper {upper}"
    return InvalidUsage(UsageKind.UPDATE_BEYOND_UPPER, message, time=time, upper=upper)


def _time(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _split(table: "pa.Table", target: int) -> list["pa.Table"]:
    return list(split(table, max(target, 1)))


async def pieces_as_they_come(updates: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """The input in pieces that `to_table` takes."""
    gathered = Rows()
    async for item in updates:
        if is_arrow(item):
            if gathered.rows:
                yield gathered.take()
            yield item
        elif gathered.add(item):
            yield gathered.take()
    if gathered.rows:
        yield gathered.take()


def is_small(rows: Any) -> bool:
    """Whether a thread would cost more than converting the rows here."""
    return (
        isinstance(rows, Sequence)
        and len(rows) <= ON_THE_LOOP_ROWS
        and sum(map(rough_bytes, rows)) <= ON_THE_LOOP_BYTES
    )


async def _delete(stack: Stack, in_flight: list[asyncio.Task[Any]], keys: list[str]) -> None:
    """Delete `keys` once nothing can write them any more. What fails is left to the sweep."""
    if in_flight:
        await asyncio.wait(in_flight)
    try:
        await stack.blob.delete(keys)
    except Error as error:
        log.warning("%d blobs of a failed append are left to the sweep: %s", len(keys), error)
