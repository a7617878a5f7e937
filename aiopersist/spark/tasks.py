"""The code that runs in Spark's workers: plain functions of values, each doing one piece of a job.

A task may run twice, even at the same time, and may be killed at any moment, without notice. So no task
changes a shard: tasks upload parts under a writer that the driver has registered, and return bytes, of which
the driver uses those of one attempt. The sweep deletes the parts of the other attempts, once the writer is
gone.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiopersist.base.errors import BatchExpired, DiffOverflow, Error, InvalidUpdate, InvalidUsage
from aiopersist.base.frontier import TIME_MAX
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa, pc
from aiopersist.spark.bridge import bridge, on_caller
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
    """The batch that a task has written."""

    batch: bytes
    """As `Batch.to_transmittable` gives it."""
    rows: int
    first: int = 0
    """The least time of its updates; means nothing without rows."""
    last: int = 0
    """The greatest time of its updates."""


class TaskRefused(NamedTuple):
    """The value that a task returns instead of its result, if no other attempt could do better: Spark does
    not repeat the task, and the driver raises the error."""

    error: Error


def refusing(work: Callable[..., T], *args: Any) -> T | TaskRefused:
    """`work(*args)`, or the error that every attempt would meet."""
    try:
        return work(*args)
    except (InvalidUpdate, InvalidUsage, DiffOverflow, BatchExpired) as error:
        return TaskRefused(error)


def accepted(results: "Iterable[T | TaskRefused]") -> list[T]:
    """The results; raises the error of the first that was refused."""
    found: list[T] = []
    for result in results:
        if isinstance(result, TaskRefused):
            raise result.error
        found.append(result)
    return found


def worker_client(location: SparkLocation) -> Client:
    """The client of this worker. Polars and Arrow get as many threads as the task has cores."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None:
        cores = max(context.cpus(), 1)
        os.environ.setdefault(THREADS, str(cores))  # read when polars is first imported
        pa.set_cpu_count(cores)
    found = bridge()
    found.is_worker = True
    return found.client(location)


def makes_a_table() -> bool:
    """Whether the write of this task is a part of making a table. No option tells such a write from
    `save(path)`, but Spark runs it as an execution within the table's. Everything in a `foreachBatch` is such
    an inner execution, too: the cases cannot be told apart there, and the answer is no."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or context.getLocalProperty("sql.streaming.queryId") is not None:
        return False
    mine, root = (context.getLocalProperty(f"spark.sql.execution.{name}") for name in ("id", "root.id"))
    return mine is not None and root is not None and mine != root


def read(
    location: SparkLocation, piece: bytes, columns: Columns, where: Any = None, at: int | None = None
) -> "Iterator[pa.RecordBatch]":
    """The rows of a piece of a shared read, as the columns of a DataFrame. `at`: the time of contents."""
    client = worker_client(location)
    for batch in bridge().iterate(lambda: client.workers.read_piece(piece, where)):
        yield from columns.batches(batch, at)


def stage(
    location: SparkLocation, writer: bytes, layout: Layout, batches: "Iterable[pa.RecordBatch]"
) -> StagedTask:
    """Upload the rows as a batch under that writer: sorted, consolidated, in bounded memory."""
    updates = _together(layout.updates(batch) for batch in batches if batch.num_rows)
    return bridge().run(_stage, worker_client(location), writer, updates)


def _together(tables: "Iterable[pa.Table]") -> "Iterator[pa.Table]":
    """Spark's batches are small (10,000 rows), and each table costs some trips between threads."""
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
            while (some := await on_caller(next, updates, None)) is not None:
                least, greatest = (bound.as_py() for bound in pc.min_max(some.column("time")).values())
                first, last = min(first, least), max(last, greatest)
                await builder.extend(some)
                rows += some.num_rows
            batch = await builder.finish(_after(last))
        return StagedTask(batch.to_transmittable(), rows, first, last)


def _after(time: int) -> int:
    if time == TIME_MAX:
        raise InvalidUpdate(f"time {time} is the greatest: no upper is beyond it: give a lesser time")
    return time + 1


class Retraction(NamedTuple):
    """The rows of a piece of contents that go."""

    piece: bytes
    staged: bytes | None = None
    """A piece of updates, whose keys are those of the rows that go; `None`: all of them."""
    unique: bool = False
    """Whether a key that `staged` has twice is refused."""
    every: bool = False
    """Whether all rows go, also those with other keys than `staged` has."""
    where: Any = None
    """The condition that only the rows that go fulfil."""


def retract(location: SparkLocation, writer: bytes, wanted: Retraction) -> StagedTask:
    """Upload the rows that go with their diffs negated, at time 0."""
    return bridge().run(_retract, worker_client(location), writer, wanted)


async def _retract(client: Client, writer: bytes, wanted: Retraction) -> StagedTask:
    with client._stack.tracing.span("spark.task", "", WRITER.trace(writer)):
        keys = None if wanted.staged is None else await _keys(client, wanted.staged, unique=wanted.unique)
        rows = 0
        async with client.workers.builder_from_transmittable(writer, 0) as builder:
            async for batch in client.workers.read_piece(wanted.piece, wanted.where):
                found = pa.Table.from_batches([batch])
                if keys is not None and not wanted.every:
                    found = found.filter(_is_in(found.column("key"), keys))
                if found.num_rows:
                    await builder.extend(_negated(found))
                    rows += found.num_rows
            return StagedTask((await builder.finish(1)).to_transmittable(), rows)


def _negated(found: "pa.Table") -> "pa.Table":
    times = pa.repeat(pa.scalar(0, pa.int64()), found.num_rows)
    diffs = pc.negate_checked(found.column("diff"))
    return pa.table([found.column("key"), found.column("val"), times, diffs], ["key", "val", "time", "diff"])


async def _keys(client: Client, staged: bytes, *, unique: bool) -> "pl.DataFrame":
    """The keys of the rows that are written. `InvalidUpdate` for a key that is there twice, if they are to be
    `unique`."""
    import polars as pl

    tables = [pa.Table.from_batches([batch]) async for batch in client.workers.read_piece(staged)]
    if not tables:
        return pl.DataFrame()
    whole = pa.concat_tables(tables)
    keys = pl.DataFrame({"key": pl.from_arrow(whole.column("key").combine_chunks())})
    twice = keys.is_duplicated() | pl.Series(pc.not_equal(whole.column("diff"), 1).combine_chunks())
    if unique and twice.any():
        key = keys.filter(twice)["key"][0]
        raise InvalidUpdate(f"the rows have key {key!r} more than once: give one row per key")
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
