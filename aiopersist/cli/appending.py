"""Adds rows of files to a shard that is no table, or replaces its contents with them; in one append.

1. The rows become a batch.
2. To overwrite, another batch retracts the contents as of the upper.
3. Both are appended, unless another writer was first. In that case another batch retracts the changes since,
   and the append is tried again. If the history of the changes is gone, all contents are retracted again.

Memory grows neither with the rows nor with the contents.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, suppress
from typing import Any

from aiopersist.base.errors import InvalidUsage, SinceViolation, UpperMismatch, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.base.progress import progress
from aiopersist.cli.command import Problems
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.schema import Schema
from aiopersist.read.snapshot import some_batches
from aiopersist.state.writing import last_complete
from aiopersist.write.batch import Batch, discard_all
from aiopersist.write.handle import WriteHandle, time_of_write

DIFF = "diff"
Writer = WriteHandle[Any, Any]


async def append_rows(client: Client, shard: str, schema: Schema[Any, Any, Any], rows: Iterator[Any]) -> None:
    """Append rows, with the diffs in their column `diff`, or 1."""
    async with client.writer(shard, schema) as writer:
        batches = [await _built(writer, await _upper(writer), rows)]
        try:
            while not await _appended(writer, batches, await _upper(writer)):
                pass
        except BaseException:
            await discard_all(batches)
            raise


async def overwrite_rows(
    client: Client, shard: str, schema: Schema[Any, Any, Any], rows: Iterator[Any]
) -> None:
    """Replace the contents with rows."""
    async with client.writer(shard, schema) as writer, client.reader(shard, schema) as reader:
        new = await _built(writer, await _upper(writer), rows)
        old = Retractions(writer, reader)
        try:
            while True:
                upper = await old.catch_up()
                if (await client.schema(shard))[1] != schema:  # old rows may have more fields
                    raise Problems(f"the schema of {shard!r} changed meanwhile; nothing was written")
                if await _appended(writer, [new, *old.batches], upper):
                    return
        except BaseException:
            await discard_all([new, *old.batches])
            raise


class Retractions:
    """Batches that retract the contents as of the upper that `catch_up` returned."""

    def __init__(self, writer: Writer, reader: Any) -> None:
        self.batches: list[Batch] = []
        self._writer = writer
        self._reader = reader
        self._upper = 0
        """The upper up to which they retract; 0 at first."""

    async def catch_up(self) -> int:
        """Retract the contents at the upper. Returns the upper."""
        while (upper := await _upper(self._writer)) > self._upper:
            try:
                async with AsyncExitStack() as reads:
                    now = await reads.enter_async_context(self._reader.snapshot(upper - 1, wait=False))
                    if self._upper:  # opened last, so that the snapshot above has the history since then
                        await reads.enter_async_context(self._reader.snapshot(self._upper - 1, wait=False))
                    await self._retract(now)
                self._upper = upper
            except SinceViolation as error:
                await self._drop()
                since = error.since.time if isinstance(error.since, Antichain) else None
                if isinstance(since, int) and since >= upper:  # no writes for a long time
                    with suppress(UpperMismatch):  # after this the contents can be read
                        await self._writer.compare_and_append([], upper, since + 1)
        return upper

    async def _retract(self, now: Any) -> None:
        after = self._upper - 1 if self._upper else None
        with progress("retract", (await now.stats()).updates_max if after is None else None, "rows") as track:
            changes = some_batches(now, None, after, lambda named: True)
            async with aclosing(changes), aclosing(_negated(changes, now.as_of, track)) as negated:
                self.batches.append(await _built(self._writer, now.as_of, negated))

    async def _drop(self) -> None:
        batches, self.batches, self._upper = self.batches, [], 0
        await discard_all(batches)


async def _negated(batches: AsyncIterator[Any], time: int, track: Any) -> AsyncGenerator[Any, None]:
    async for batch in batches:
        table = pa.Table.from_batches([batch])
        diff = table.schema.get_field_index(DIFF)
        yield _at(table.set_column(diff, DIFF, pc.negate_checked(table.column(DIFF))), time)
        track.advance(batch.num_rows)


async def _built(writer: Writer, time: int, rows: Any) -> Batch:
    """A batch of rows at one time."""
    if isinstance(rows, Iterator):
        rows = (_at(table, time) for table in rows)
    async with writer.builder(time) as builder:
        await builder.extend(rows)
        return await builder.finish(time + 1)


def _at(table: "pa.Table", time: int) -> "pa.Table":
    """Rows as updates at one time."""
    rows = table.num_rows
    if DIFF not in table.schema.names:
        table = table.append_column(DIFF, pa.repeat(pa.scalar(1), rows))
    return table.append_column("time", pa.repeat(pa.scalar(time), rows))


async def _appended(writer: Writer, batches: list[Batch], upper: int) -> bool:
    """Append at this upper; on a wall clock, now. Returns whether no other writer was first."""
    moved = [last_complete(batch.upper) for batch in batches]  # by an earlier attempt: times never go back
    time = max(await time_of_write(writer, upper), *moved)
    for batch in batches:
        batch.rewrite_ts(time, time + 1)
    try:
        await writer.compare_and_append_batch(batches, upper, time + 1)
    except UpperMismatch:
        return False
    return True


async def _upper(writer: Writer) -> int:
    upper = (await writer.fetch_recent_upper()).time
    if not isinstance(upper, int):
        text = "its times are no ints, or it is closed: this command cannot append to it"
        raise InvalidUsage(UsageKind.INVALID_TIME, text, shard_id=writer.shard_id)
    return upper
