"""What runs in Spark's workers: plain functions of values, each a piece of a job.

A task may run twice, at the same time too, and be killed at any moment, without notice. So none of them
changes a shard: they upload parts under a writer that the driver has registered, and what they return is
bytes, of which the driver uses those of one attempt. What the others leave is the sweep's once the writer is
gone.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiopersist.client import Client
from aiopersist.data.lazy import pa, pc
from aiopersist.errors import BatchExpired, DiffOverflow, Error, InvalidUpdate, InvalidUsage
from aiopersist.frontier import TIME_MAX
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.place import SparkLocation
from aiopersist.spark.rows import Layout
from aiopersist.write.builder import BatchBuilder

if TYPE_CHECKING:
    import polars as pl

T = TypeVar("T")

THREADS = "POLARS_MAX_THREADS"


class StagedTask(NamedTuple):
    """What a task has written."""

    batch: bytes
    """`Batch.to_transmittable`."""
    rows: int
    first: int = 0
    """The least time of its updates, if there are any."""
    last: int = 0
    """The greatest."""


class TaskRefused(NamedTuple):
    """What a task gives in place of its result, if no other attempt could do better: so Spark does not repeat
    it, and the driver raises what it was."""

    error: Error


def refusing(work: Callable[..., T], *args: Any) -> T | TaskRefused:
    """`work(*args)`, or why it can never be done."""
    try:
        return work(*args)
    except (InvalidUpdate, InvalidUsage, DiffOverflow, BatchExpired) as error:
        return TaskRefused(error)


def granted(results: "Iterable[T | TaskRefused]") -> list[T]:
    """The results, unless one was refused: then that is raised."""
    found: list[T] = []
    for result in results:
        if isinstance(result, TaskRefused):
            raise result.error
        found.append(result)
    return found


def worker_client(place: SparkLocation) -> Client:
    """The client of this worker, which has as many threads for computing as the task has cores."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is not None:
        cores = max(context.cpus(), 1)
        os.environ.setdefault(THREADS, str(cores))  # read when polars is first imported
        pa.set_cpu_count(cores)
    found = bridge()
    found.is_worker = True
    return found.client(place)


def makes_a_table() -> bool:
    """Whether the write that this task is of is a part of making a table. No option tells it apart from
    `save(path)`; but Spark runs it as an execution within that of the table. So is all that a `foreachBatch`
    runs, of which nothing can be told."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None or context.getLocalProperty("sql.streaming.queryId") is not None:
        return False
    mine, root = (context.getLocalProperty(f"spark.sql.execution.{name}") for name in ("id", "root.id"))
    return mine is not None and root is not None and mine != root


def read(
    place: SparkLocation, piece: bytes, columns: Columns, where: Any = None, at: int | None = None
) -> "Iterator[pa.RecordBatch]":
    """The rows of a piece of a shared read, as the columns of a DataFrame. `at`: the time of contents."""
    client = worker_client(place)
    for batch in bridge().iterate(lambda: client.read_piece(piece, where)):
        yield from columns.batches(batch, at)


def stage(
    place: SparkLocation, writer: bytes, layout: Layout, batches: "Iterable[pa.RecordBatch]"
) -> StagedTask:
    """Upload the rows as a batch under that writer: sorted, consolidated, in bounded memory."""
    found = bridge()
    builder = found.run(worker_client(place).builder_from_transmittable, writer, 0)
    rows, first, last = 0, TIME_MAX, 0
    try:
        for batch in batches:
            if batch.num_rows:
                updates = layout.updates(batch)
                least, greatest = (bound.as_py() for bound in pc.min_max(updates.column("time")).values())
                first, last = min(first, least), max(last, greatest)
                found.run(builder.extend, updates)
                rows += batch.num_rows
        return StagedTask(found.run(_finished, builder, _after(last)), rows, first, last)
    finally:
        found.run(builder.aclose)


async def _finished(builder: BatchBuilder, upper: int) -> bytes:
    return (await builder.finish(upper)).to_transmittable()


def _after(time: int) -> int:
    if time == TIME_MAX:
        raise InvalidUpdate(f"time {time} is the last there is, so no upper is beyond it")
    return time + 1


def retract(place: SparkLocation, writer: bytes, piece: bytes, staged: bytes | None) -> StagedTask:
    """Upload the rows of a piece of contents with their diffs negated, at time 0; only those whose keys are
    in `staged`, a piece of updates, if it is given."""
    client = worker_client(place)
    return bridge().run(_retract, client, writer, piece, staged)


async def _retract(client: Client, writer: bytes, piece: bytes, staged: bytes | None) -> StagedTask:
    keys = None if staged is None else await _keys(client, staged)
    rows = 0
    async with client.builder_from_transmittable(writer, 0) as builder:
        async for batch in client.read_piece(piece):
            found = pa.Table.from_batches([batch])
            if keys is not None:
                found = found.filter(_is_in(found.column("key"), keys))
            if found.num_rows:
                await builder.extend(_negated(found))
                rows += found.num_rows
        return StagedTask((await builder.finish(1)).to_transmittable(), rows)


def _negated(found: "pa.Table") -> "pa.Table":
    times = pa.repeat(pa.scalar(0, pa.int64()), found.num_rows)
    diffs = pc.negate_checked(found.column("diff"))
    return pa.table([found.column("key"), found.column("val"), times, diffs], ["key", "val", "time", "diff"])


async def _keys(client: Client, staged: bytes) -> "pl.DataFrame":
    """The keys of what is to be put in the place of what is there, each once."""
    import polars as pl

    tables = [pa.Table.from_batches([batch]) async for batch in client.read_piece(staged)]
    if not tables:
        return pl.DataFrame()
    whole = pa.concat_tables(tables)
    keys = pl.DataFrame({"key": pl.from_arrow(whole.column("key").combine_chunks())})
    twice = keys.is_duplicated() | pl.Series(pc.not_equal(whole.column("diff"), 1).combine_chunks())
    if twice.any():
        key = keys.filter(twice)["key"][0]
        raise InvalidUpdate(f"an upsert has key {key!r} more than once: which row is to stay cannot be told")
    return keys


def _is_in(column: Any, keys: "pl.DataFrame") -> Any:
    import polars as pl

    if keys.is_empty():
        return pa.repeat(False, len(column))
    frame = pl.DataFrame({"key": pl.from_arrow(column.combine_chunks())}).with_row_index("row")
    rows = frame.join(keys, on="key", how="semi", nulls_equal=True)["row"].sort()
    mask = pl.zeros(len(frame), pl.Int8, eager=True).scatter(rows, 1).cast(pl.Boolean)
    return mask.to_arrow()


def compact(place: SparkLocation, piece: bytes) -> bytes:
    """Do a piece of a compaction."""
    client = worker_client(place)
    return bridge().run(client.compact_piece, piece)
