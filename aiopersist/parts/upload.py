"""From updates to a hollow batch: checked, cut at the target size, encoded, uploaded.

1. `take` converts the input chunk by chunk and checks it: data, then times against the lower. When the buffer
   reaches `settings.blob_target_size` it becomes a part: sorted, summed and encoded on a worker thread and
   uploaded in the background, at most `settings.batch_builder_max_outstanding_parts` at once; then `take`
   waits for the oldest. Of one Arrow table up to `RUN_PARTS` parts are sorted together, as one run, and
   encoded at once. So memory is bounded for any size of the input.
2. `check_upper` compares all times with the upper, which the caller may choose late.
3. `finish` makes a part of the rest. If it is the only part, and small, it is inline.
4. `discard` deletes the blobs in the background: only if surely no state names them.

The blob keys carry the id of the writer, which is registered before the first upload.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import pairwise
from threading import Event
from typing import Any, NamedTuple

import anyio.to_thread

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain, Description, Time, minimum
from aiopersist.base.resource import run_bounded
from aiopersist.base.settings import Settings
from aiopersist.data.lazy import pa
from aiopersist.data.part.part import EncodedPart
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.buffer import Buffer, Row
from aiopersist.data.updates.consolidate import sort_and_consolidate, sorted_rows
from aiopersist.data.updates.convert import RowBuffer, chunks_of, is_arrow, rough_bytes, to_table
from aiopersist.data.updates.order import row_key
from aiopersist.data.updates.sizes import check_update_size, cut, goodbytes, groups
from aiopersist.data.updates.times import Greatest, Seen, first_row_not_beyond
from aiopersist.data.updates.tiny import TIME_AND_DIFF_BYTES, PlainRows
from aiopersist.parts.columns import columns_of
from aiopersist.parts.put import NewBlobs, inline_part, part_writer, put
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import Total
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart

ON_THE_LOOP_ROWS = 256  # converting and sorting fewer rows is faster than the way to a thread
ON_THE_LOOP_BYTES = 64 * 1024
RUN_PARTS = 2  # parts of a table that are sorted together
SORTING = 1  # sorts of a batch at once: each needs the memory of its columns once more


class Upload:
    """A batch that is being written. Not for several tasks at once. `one_blob`: all updates become one blob
    of any size. `raw`: updates may have any times, and are neither sorted nor summed; `finish_raw` replaces
    `finish`."""

    def __init__(
        self,
        shard: Shard,
        schema: Schema[Any, Any, Any],
        schema_id: int,
        writer: str,
        lower: Antichain,
        *,
        one_blob: bool = False,
        since: Antichain | None = None,
        raw: bool = False,
    ) -> None:
        self.writer = writer
        self.lower = lower
        self.write_stalls = 0
        """How often a part waited for an earlier one."""
        self.parts_finished = 0
        self.rows_taken = 0
        self.seen = Seen()
        """The times, if the upload is raw."""
        self._shard = shard
        self._stack = shard.stack
        self._blobs = NewBlobs(shard, writer)
        self._schema = schema
        self._schema_id = schema_id
        self._since = minimum(schema.time_length) if since is None else since
        self._buffer = Buffer(schema)
        self._plain: PlainRows | None = None  # only builders add single rows
        self._one_blob = one_blob
        self._greatest = Greatest()
        self._raw = raw
        self._in_flight: deque[tuple[asyncio.Task[list[_FinishedPart]], int]] = deque()
        """The number of parts of each started run."""
        self._added = 0  # goodbytes
        self._at_once = 1  # parts that are sorted together
        self._parts: list[_FinishedPart] = []
        self._sorting = asyncio.Semaphore(SORTING)
        self._outstanding = self._stack.settings.batch_builder_max_outstanding_parts
        self._room = asyncio.Semaphore(self._outstanding)
        """Limits the parts that are encoded and uploaded at once: a run has several."""

    @property
    def parts_in_flight(self) -> int:
        """Parts that were started and not collected yet."""
        return min(sum(parts for _, parts in self._in_flight), self._outstanding)

    @property
    def _target(self) -> int:
        """The goodbytes of a part."""
        return max(self._stack.settings.blob_target_size, 1)

    async def take(self, updates: Any) -> None:
        """Convert and check `updates`: rows, Arrow data, or an iterator or async iterator of either. Start
        the full parts. A sequence of rows is taken or refused as a whole; of other input the chunks before a
        refused chunk are taken (`rows_taken`)."""
        if isinstance(updates, Sequence) and not isinstance(updates, str | bytes):
            await self._push(updates, 0)
            return
        in_chunks = chunks_as_they_come if isinstance(updates, AsyncIterable) else chunks_on_a_thread
        is_table = is_arrow(updates) and hasattr(updates, "__len__")
        self._at_once, added = RUN_PARTS if is_table and not self._raw else 1, self._added
        try:
            async with aclosing(in_chunks(updates)) as chunks:
                before = self.rows_taken
                async for chunk in chunks:
                    await self._push(chunk, self.rows_taken - before)
            is_large = self._added - added >= self._target
            if is_large and is_table and not self._one_blob and self._buffer.goodbytes >= self._target:
                await self._make_room()
                self._start(self._buffer.take())
        finally:
            self._at_once = 1
        await self.start_full()

    def take_row(self, row: Row) -> bool:
        """Take one update at once if it is plain; returns whether it was taken. Call `start_full` then."""
        if self._plain is None:
            self._plain = PlainRows(self._schema)
        size = self._plain.size(row)
        if size is None or size - TIME_AND_DIFF_BYTES > self._stack.settings.update_size_max:
            return False
        if not self.lower.less_equal(row[2]):
            raise _not_beyond(row[2], self.lower)
        self._greatest.add_int(row[2])
        self._buffer.add_row(row, size)
        self.rows_taken += 1
        return True

    async def add(self, table: "pa.Table") -> None:
        """Take a table that was converted and checked."""
        self._greatest.add(table)
        await self._add(table)

    async def _add(self, table: "pa.Table") -> None:
        before = self._buffer.goodbytes
        self._buffer.add(table)
        self._added += self._buffer.goodbytes - before
        self.rows_taken += table.num_rows
        await self.start_full()

    async def start_full(self) -> None:
        """Start the full parts. A cancelled call loses no updates: the rest stays in the buffer."""
        most = self._at_once * self._target
        while not self._one_blob and self._buffer.goodbytes >= most:
            await self._make_room()
            parts = list[pa.Table]()
            while len(parts) < self._at_once and self._buffer.goodbytes >= self._target:
                parts.append(self._buffer.take_reaching(self._target))
            self._start(pa.concat_tables(parts))

    def check_upper(self, upper: Antichain) -> None:
        """`InvalidUsage` if the time of an update is at or beyond `upper`, even if updates cancel out."""
        time = self._greatest.beyond(upper)
        if time is not None:
            message = f"time {time} is at or beyond upper {upper}"
            raise InvalidUsage(UsageKind.UPDATE_BEYOND_UPPER, message, time=time, upper=upper)

    async def finish(self, upper: Antichain) -> HollowBatch:
        """The batch, with all parts uploaded."""
        rest = self._buffer.take() if self._buffer.rows else None
        if rest is not None and not self._blobs.keys and self._fits_inline(goodbytes(rest)):
            part = await self._inline(rest)
            self._parts += [part] if part else []
        elif rest is not None:
            await self._make_room()
            self._start(rest)
        while self._in_flight:
            await self._collect()
        runs = tuple(i for i in range(1, len(self._parts)) if self._parts[i].first < self._parts[i - 1].last)
        parts = tuple(part.hollow for part in self._parts)
        return HollowBatch(lower=self.lower, upper=upper, since=self._since, parts=parts, runs=runs)

    async def finish_raw(self) -> "list[tuple[HollowPart | pa.Table, int]]":
        """The updates in the order they came: uploaded parts, then a table of the rest, which is less than a
        part. Each item has its goodbytes."""
        size = self._buffer.goodbytes
        rest = [(self._buffer.take(), size)] if self._buffer.rows else []
        while self._in_flight:
            await self._collect()
        return [*((part.hollow, part.hollow.goodbytes or 0) for part in self._parts), *rest]

    @property
    def wrote(self) -> Total:
        """The total of the parts. Not counted for inline parts."""
        diffs = sum(part.diffs for part in self._parts)
        return Total(sum(part.hollow.rows for part in self._parts), diffs % 2**64)

    def check_parts(self) -> None:
        """Raise the error of a part in flight that has failed."""
        for task, _ in self._in_flight:
            if task.done() and (error := task.exception()) is not None:
                raise error

    def discard(self) -> asyncio.Task[None] | None:
        """Drop the buffer, and delete the blobs: see `NewBlobs`."""
        self._buffer = Buffer(self._schema)
        return self._blobs.discard()

    # --- the steps -------------------------------------------------------------------------------

    async def _push(self, chunk: Any, row_base: int) -> None:
        convert = partial(self._columns, row_base)
        if is_small(chunk):
            table = convert(chunk)
            times = self._times(table)
        else:
            table = await columns_of(self._stack, chunk, convert, self._schema)
            times = await self._stack.compute(self._times, table)
        if isinstance(times, Seen):
            self.seen.merge(times)
        else:
            self._greatest.merge(times)
        await self._add(table)

    def _columns(self, row_base: int, chunk: Any, start: int = 0) -> "pa.Table":
        """The chunk, or a slice of it, checked except for its times."""
        table = to_table(chunk, self._schema, row_base=row_base + start)
        check_update_size(table, self._stack.settings.update_size_max, row_base=row_base + start)
        return table

    def _times(self, table: "pa.Table") -> Greatest | Seen:
        """The times, checked."""
        if self._raw:
            seen = Seen()
            seen.add(table)
            return seen
        row = first_row_not_beyond(table, self.lower) if table.num_rows else None
        if row is not None:
            raise _not_beyond(_time(table.column("time")[row].as_py()), self.lower)
        greatest = Greatest()
        greatest.add(table)
        return greatest

    def _fits_inline(self, size: int) -> bool:
        return not self._one_blob and fits_inline(size, self._stack.settings)

    async def _inline(self, table: "pa.Table") -> "_FinishedPart | None":
        if table.num_rows > ON_THE_LOOP_ROWS:
            table = await self._stack.compute(sort_and_consolidate, table)
        else:
            table = sort_and_consolidate(table)
        return self._inline_part(table) if table.num_rows else None

    def _inline_part(self, columns: "pa.Table | pa.RecordBatch") -> "_FinishedPart":
        return _FinishedPart(inline_part(columns, self._schema_id), None, None)

    async def _make_room(self) -> None:
        """Wait for the oldest parts until another may be in flight."""
        while self.parts_in_flight >= self._outstanding:
            self.write_stalls += 1
            await self._collect()

    def _start(self, table: "pa.Table") -> None:
        """Sort, encode and upload `table` in the background."""
        parts = 1 if self._at_once == 1 else goodbytes(table) // self._target + 1
        keys = [self._blobs.key() for _ in range(parts)]
        task = self._blobs.begin(self._upload([table], keys), "upload parts")
        self._in_flight.append((task, parts))

    async def _collect(self) -> None:
        """Wait for the oldest parts in flight."""
        parts = await asyncio.shield(self._in_flight[0][0])
        self._in_flight.popleft()
        self.parts_finished += max(len(parts), 1)
        self._parts += parts

    async def _upload(self, only: list["pa.Table"], keys: Sequence[str]) -> "list[_FinishedPart]":
        """Sort the table, and encode and write a part of it under each key, or fewer parts. Only the list
        `only` has the table, so its memory is freed early."""
        rows, size = only[0].num_rows, goodbytes(only[0])
        group = max(self._stack.settings.row_group_bytes * rows // max(size, 1), 1)
        if self._raw:
            slices = cut(only.pop(), self._stack.settings.row_group_bytes)
            tables = [lambda: slices]
        else:
            async with self._sorting:
                result = await self._stack.compute(sorted_rows, only)
            ends = [len(result)]
            if len(keys) > 1:
                ends = await self._stack.compute(result.cuts, self._target)
            tables = [partial(result.tables, start, end, group) for start, end in pairwise([0, *ends])]
        assert len(tables) <= len(keys)  # each part but the last has the target
        jobs = [partial(self._upload_part, part, key) for part, key in zip(tables, keys, strict=False)]
        return [part for part in await run_bounded(len(keys), jobs) if part is not None]

    async def _upload_part(
        self, tables: "Callable[[], Iterator[pa.Table]]", key: str
    ) -> "_FinishedPart | None":
        async with self._room:
            encoded = await self._stack.compute(self._encode, tables)
            if encoded is None:
                return None
            part, first, last, diffs = encoded
            hollow = await put(self._stack.blob, key, part, self._schema_id)
        return _FinishedPart(hollow.replace(key_lower=None) if self._raw else hollow, first, last, diffs)

    def _encode(
        self, tables: "Callable[[], Iterator[pa.Table]]"
    ) -> "tuple[EncodedPart, Any, Any, int] | None":
        description = Description(self.lower, Antichain(), self._since)
        writer = part_writer(self._shard, self._schema_id, description)
        first = last = None
        for group in groups(tables(), self._stack.settings.row_group_bytes):
            first = row_key(group, 0) if first is None else first
            last = row_key(group, -1)
            writer.write(group)
        return (writer.finish(), first, last, writer.diffs) if writer.rows else None


def fits_inline(goodbytes: int, settings: Settings) -> bool:
    """Whether a batch of that size is kept in the state."""
    return goodbytes < min(settings.inline_writes_single_max_bytes, settings.inline_writes_total_max_bytes)


class _FinishedPart(NamedTuple):
    """A part, its least and greatest (key, value, time), which decide whether it continues a run, and the sum
    of its diffs."""

    hollow: HollowPart
    first: Any
    last: Any
    diffs: int = 0


def _not_beyond(time: Time, lower: Antichain) -> InvalidUsage:
    message = f"time {time} is not at or beyond lower {lower}"
    return InvalidUsage(UsageKind.UPDATE_NOT_BEYOND_LOWER, message, time=time, lower=lower)


def _time(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


async def chunks_on_a_thread(updates: Any) -> AsyncGenerator[Any, None]:
    """The input in chunks for `to_table`, made on a thread of their own: an iterator may be large, or may
    wait. After a cancellation the thread stops after its present item."""
    stopped, thread = Event(), anyio.CapacityLimiter(1)
    chunks = chunks_of(updates, stopped)
    try:
        while (chunk := await anyio.to_thread.run_sync(next, chunks, None, limiter=thread)) is not None:
            yield chunk
    finally:
        stopped.set()


async def chunks_as_they_come(updates: AsyncIterable[Any]) -> AsyncGenerator[Any, None]:
    """As `chunks_on_a_thread`, for an async iterator. Each chunk must be converted before the next one is
    requested, since a stream of batches may reuse its memory."""
    gathered = RowBuffer()
    async for item in updates:
        if is_arrow(item):
            if gathered.rows:
                yield gathered.take()
            async with aclosing(chunks_on_a_thread(item)) as chunks:
                async for chunk in chunks:
                    yield chunk
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
