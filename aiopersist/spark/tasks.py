"""The code that runs in Spark's workers: functions of values, each for one piece of a job.

A task may run twice, even at the same time, and may be killed at any moment. So no task changes a shard:
tasks upload parts under a writer that the driver registered, and return bytes. The driver uses the bytes of
one attempt. A sweep deletes the parts of other attempts once the writer has ended.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiopersist.base.errors import BatchExpired, DiffOverflow, Error, InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import TIME_MAX
from aiopersist.base.portal import on_caller
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa, pc
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.rows import Layout
from aiopersist.write.transmit import WRITER

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")

THREADS = "POLARS_MAX_THREADS"
TOGETHER_BYTES = 8 * 1024 * 1024


class StagedTask(NamedTuple):
    """The batch that a task staged."""

    batch: bytes
    """The result of `Batch.to_transmittable`."""
    rows: int
    first: int = 0
    """The least time of its updates; meaningless without rows."""
    last: int = 0
    """The greatest time of its updates."""


class TaskRefused(NamedTuple):
    """The value that a task returns for an error that every attempt would meet. So Spark does not repeat the
    task, and the driver raises the error."""

    error: Error


def outcome_of(work: Callable[..., T], *args: Any) -> T | TaskRefused:
    """`work(*args)`, or the error that every attempt would meet."""
    try:
        return work(*args)
    except (InvalidUpdate, InvalidUsage, DiffOverflow, BatchExpired) as error:
        return TaskRefused(error)


def accepted(results: "Iterable[T | TaskRefused]") -> list[T]:
    """The results; raises the error of the first refusal."""
    successes: list[T] = []
    for result in results:
        if isinstance(result, TaskRefused):
            raise result.error
        successes.append(result)
    return successes


def worker_client(location: SparkLocation) -> Client:
    """The client of this worker. Polars and Arrow get as many threads as the task has cores."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None:
        cores = max(context.cpus(), 1)
        os.environ.setdefault(THREADS, str(cores))  # read when polars is first imported
        pa.set_cpu_count(cores)
    own_bridge = bridge()
    own_bridge.is_worker = True
    return own_bridge.client(location)


def makes_a_table() -> bool:
    """Whether this task's write creates a table of Spark. No option distinguishes it from `save(path)`, but
    Spark runs it as an inner execution. In a `foreachBatch` all executions are inner: there it is `False`."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or context.getLocalProperty("sql.streaming.queryId") is not None:
        return False
    own, root = (context.getLocalProperty(f"spark.sql.execution.{name}") for name in ("id", "root.id"))
    return own is not None and root is not None and own != root


def read(
    location: SparkLocation, piece: bytes, columns: Columns, where: Any = None, at: int | None = None
) -> "Iterator[pa.RecordBatch]":
    """The rows of a piece of a shared read as columns of a DataFrame. `at`: the time of contents."""
    client = worker_client(location)
    for batch in bridge().iterate(lambda: client.workers.read_piece(piece, where)):
        yield from columns.batches(batch, at)


def stage(
    location: SparkLocation, writer: bytes, layout: Layout, batches: "Iterable[pa.RecordBatch]"
) -> StagedTask:
    """Upload rows as a batch under the writer: sorted, consolidated, in bounded memory."""
    updates = _together(layout.updates(batch) for batch in batches if batch.num_rows)
    return bridge().run(_stage, worker_client(location), writer, updates)


def _together(tables: "Iterable[pa.Table]") -> "Iterator[pa.Table]":
    """Larger tables, since each costs switches between threads, and Spark's batches have 10,000 rows."""
    group: list[pa.Table] = []
    size = 0
    for table in tables:
        group.append(table)
        size += table.nbytes
        if size >= TOGETHER_BYTES:
            yield pa.concat_tables(group)
            group, size = [], 0
    if group:
        yield pa.concat_tables(group)


async def _stage(client: Client, writer: bytes, updates: "Iterator[pa.Table]") -> StagedTask:
    with client._stack.tracing.span("spark.task", "", WRITER.trace(writer)):
        rows, first, last = 0, TIME_MAX, 0
        async with client.workers.builder_from_transmittable(writer, 0) as builder:
            while (table := await on_caller(next, updates, None)) is not None:
                least, greatest = (bound.as_py() for bound in pc.min_max(table.column("time")).values())
                first, last = min(first, least), max(last, greatest)
                await builder.extend(table)
                rows += table.num_rows
            batch = await builder.finish(_after(last))
        return StagedTask(batch.to_transmittable(), rows, first, last)


def _after(time: int) -> int:
    if time == TIME_MAX:
        raise InvalidUpdate(f"time {time} is the greatest time, which no upper is beyond: use a smaller time")
    return time + 1


class Retraction(NamedTuple):
    """The rows of a piece of contents to retract."""

    piece: bytes
    staged: bytes | None = None
    """A piece of updates with the keys of the rows to retract; `None`: retract all rows."""
    unique: bool = False
    """Whether to refuse a duplicate key in `staged`."""
    every: bool = False
    """Whether to retract rows with any key, not only with those of `staged`."""
    where: Any = None
    """A condition; only matching rows are retracted."""


def retract(location: SparkLocation, writer: bytes, job: Retraction) -> StagedTask:
    """Upload the rows to retract, with negated diffs, at time 0."""
    return bridge().run(_retract, worker_client(location), writer, job)


async def _retract(client: Client, writer: bytes, job: Retraction) -> StagedTask:
    with client._stack.tracing.span("spark.task", "", WRITER.trace(writer)):
        keys = None if job.staged is None else await _keys(client, job.staged, unique=job.unique)
        rows = 0
        async with client.workers.builder_from_transmittable(writer, 0) as builder:
            async for batch in client.workers.read_piece(job.piece, job.where):
                table = pa.Table.from_batches([batch])
                if keys is not None and not job.every:
                    table = table.filter(_is_in(table.column("key"), keys))
                if table.num_rows:
                    await builder.extend(_negated(table))
                    rows += table.num_rows
            return StagedTask((await builder.finish(1)).to_transmittable(), rows)


def _negated(table: "pa.Table") -> "pa.Table":
    times = pa.repeat(pa.scalar(0, pa.int64()), table.num_rows)
    diffs = pc.negate_checked(table.column("diff"))
    return pa.table([table.column("key"), table.column("val"), times, diffs], ["key", "val", "time", "diff"])


async def _keys(client: Client, staged: bytes, *, unique: bool) -> "pl.DataFrame":
    """The keys of the written rows. `InvalidUpdate` for a duplicate key if `unique`."""
    import polars as pl

    tables = [pa.Table.from_batches([batch]) async for batch in client.workers.read_piece(staged)]
    if not tables:
        return pl.DataFrame()
    whole = pa.concat_tables(tables)
    keys = pl.DataFrame({"key": pl.from_arrow(whole.column("key").combine_chunks())})
    is_duplicate = keys.is_duplicated() | pl.Series(pc.not_equal(whole.column("diff"), 1).combine_chunks())
    if unique and is_duplicate.any():
        key = keys.filter(is_duplicate)["key"][0]
        raise InvalidUpdate(f"the rows have key {key!r} more than once: write one row per key")
    return keys


def _is_in(column: Any, keys: "pl.DataFrame") -> Any:
    import polars as pl

    if keys.is_empty():
        return pa.repeat(False, len(column))
    frame = pl.DataFrame({"key": pl.from_arrow(column.combine_chunks())}).with_row_index("row")
    rows = frame.join(keys, on="key", how="semi", nulls_equal=True)["row"].sort()
    mask = pl.zeros(len(frame), pl.Int8, eager=True).scatter(rows, 1).cast(pl.Boolean)
    return mask.to_arrow()


def compact(location: SparkLocation, piece: bytes) -> bytes:
    """Do a piece of a compaction."""
    return bridge().run(worker_client(location).compact_piece, piece)
