"""The uses of a Spark session, classic or Connect: it tells the types of its schemas and how many tasks it
runs at once, and it runs a piece of work in each of its tasks."""

import asyncio
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

from aiopersist.base.progress import progress
from aiopersist.base.runtime import SYSTEM
from aiopersist.data.lazy import pa
from aiopersist.spark.bridge import Waits
from aiopersist.spark.columns import invalid
from aiopersist.spark.tasks import TaskRefused, refusing

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")

log = logging.getLogger("aiopersist").getChild("spark")

RESULT = "result binary"
BINARY = "UTF8_BINARY"
"""The collation by which shards order and compare text."""
NO_COUNTERPART = {"variant", "geometry", "geography", "udt", "interval"}
LOOK_EVERY_S = 0.5  # at the tasks of a job that somebody watches
TASKS_UNKNOWN = 8  # a Connect session does not tell how many tasks it runs at once


def arrow_schema(schema: "StructType") -> pa.Schema:
    """The Arrow types of a DataFrame's columns. `INVALID_COLUMN` for a column without a counterpart of the
    same meaning."""
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema

    for field in schema:
        if (kind := _without_counterpart(field.dataType)) is not None:
            raise invalid(f"column {field.name!r} is {kind}, for which shards have no type", field.name)
    try:
        return to_arrow_schema(schema, timezone="UTC", error_on_duplicated_field_names_in_struct=True)
    except PySparkException as error:
        raise invalid(f"the columns cannot be stored: {error}", "") from error


def _without_counterpart(t: Any) -> str | None:
    """The type within `t` that Arrow has only under another meaning."""
    name = str(t.typeName())
    if name in NO_COUNTERPART:
        return name
    if getattr(t, "collation", BINARY) != BINARY:  # only text has one
        return f"{name} collate {t.collation}"
    inner = [f.dataType for f in t.fields] if hasattr(t, "fields") else []
    inner += [getattr(t, part) for part in ("elementType", "keyType", "valueType") if hasattr(t, part)]
    return next((found for found in map(_without_counterpart, inner) if found is not None), None)


def struct_type(schema: pa.Schema) -> "StructType":
    """The types of a DataFrame with these columns."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def cores(spark: "SparkSession") -> int:
    """How many tasks the session runs at once; a guess where it does not tell."""
    told = spark.conf.get("spark.default.parallelism", None)
    if told is not None:
        return int(told)
    try:
        return int(spark.sparkContext.defaultParallelism)
    except Exception:  # Connect has no context
        return TASKS_UNKNOWN


def for_each(
    spark: "SparkSession", work: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
) -> list[T | TaskRefused]:
    """`work(*job)` for each job, one task each; the results of one attempt of each, in any order. Blocks."""
    if not jobs:
        return []
    numbers = spark.range(len(jobs), numPartitions=len(jobs))

    def run(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield _encoded(refusing(work, *jobs[number]))

    return collected(numbers.mapInArrow(run, RESULT))


def for_each_partition(
    df: "DataFrame", work: "Callable[[Iterator[pa.RecordBatch]], T]"
) -> list[T | TaskRefused]:
    """`work(batches)` for each partition; the results of one attempt of each, in any order. Blocks."""

    def run(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        yield _encoded(refusing(work, batches))

    return collected(df.mapInArrow(run, RESULT))


def collected(results: "DataFrame") -> list[Any]:
    """The results of tasks, on the driver."""
    return [pickle.loads(bytes(row[0])) for row in results.collect()]


def _encoded(result: Any) -> pa.RecordBatch:
    return pa.record_batch([pa.array([pickle.dumps(result)], pa.binary())], ["result"])


async def in_thread(spark: "SparkSession", call: Callable[[], T]) -> T:
    """A blocking call with Spark actions, on a thread of its own: the loop has few threads, and others need
    them. If the caller is cancelled, the Spark jobs of the call and its wait for the bridge are cancelled,
    too, and this returns when the call has ended."""
    tag = f"aiopersist-{SYSTEM.uuid()}"
    add, remove, interrupt = _tagging(spark)
    waits = Waits()

    def tagged() -> T:
        add(tag)
        try:
            with waits:
                return call()
        finally:
            remove(tag)

    of_its_own = anyio.CapacityLimiter(1)
    task = asyncio.create_task(anyio.to_thread.run_sync(tagged, limiter=of_its_own))
    try:
        with progress("spark", None, "tasks") as step:
            while step.is_watched and not task.done():
                await asyncio.wait([task], timeout=LOOK_EVERY_S)
                step.tell(*await anyio.to_thread.run_sync(_tasks_of, spark, tag))
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        ending = asyncio.create_task(_ended(task, waits, partial(interrupt, tag)))
        with anyio.CancelScope(shield=True):  # a scope cancels again and again
            while not ending.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
        raise


def _tasks_of(spark: "SparkSession", tag: str) -> tuple[int, int | None]:
    """How many tasks of the jobs with this tag have ended, and how many there are so far: Spark plans stages
    one after the other. Nothing where the session has no context."""
    try:
        context = spark.sparkContext
        jobs = list(context._jsc.sc().statusTracker().getJobIdsForTag(tag))
    except Exception:  # Connect; a session that ends
        return 0, None
    tracker = context.statusTracker()
    ids = {stage for job in jobs if (found := tracker.getJobInfo(job)) for stage in found.stageIds}
    stages = [stage for stage in map(tracker.getStageInfo, ids) if stage is not None]
    return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)


async def _ended(task: "asyncio.Task[Any]", waits: Waits, interrupt: Callable[[], Any]) -> None:
    """Wait until `task` has ended; until then cancel each Spark job that it begins, and each wait."""
    while not task.done():
        waits.cancel()
        try:
            await anyio.to_thread.run_sync(interrupt, limiter=anyio.CapacityLimiter(1))
        except Exception as error:  # the session may end
            extra = {"error": type(error).__name__}
            log.warning("the Spark jobs of a cancelled call cannot be cancelled: %r", error, extra=extra)
        await asyncio.wait([task], timeout=1)
    if not task.cancelled():
        task.exception()  # marks it as seen


def _tagging(spark: "SparkSession") -> tuple[Callable[[str], Any], ...]:
    """Three functions: add a tag to the jobs of this thread, remove it, cancel the jobs of a tag from any
    thread. A classic session knows its own tags only in the thread that set them, so its context's tags are
    used."""
    try:
        context = spark.sparkContext
    except Exception:  # Connect has none
        return spark.addTag, spark.removeTag, spark.interruptTag
    return context.addJobTag, context.removeJobTag, context.cancelJobsWithTag
