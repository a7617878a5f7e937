"""Uses of a Spark session, classic or Connect: types of schemas, number of tasks at once, work in tasks."""

import asyncio
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread

from aiopersist.base.portal import Waits
from aiopersist.base.progress import progress
from aiopersist.base.runtime import SYSTEM
from aiopersist.data.lazy import pa
from aiopersist.data.part.flat import invalid
from aiopersist.spark.tasks import TaskRefused, outcome_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")

log = logging.getLogger("aiopersist").getChild("spark")

RESULT = "result binary"
BINARY = "UTF8_BINARY"
"""The collation of text in shards."""
NO_COUNTERPART = {"variant", "geometry", "geography", "udt", "interval"}
LOOK_EVERY_S = 0.5  # at the tasks of a job with watched progress
TASKS_UNKNOWN = 8  # of a Connect session, which does not say how many tasks it runs at once


def arrow_schema(schema: "StructType") -> pa.Schema:
    """The Arrow types of a DataFrame's columns. `INVALID_COLUMN` for a column without an equal type."""
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
    """A type within `t` without an equal Arrow type, if any."""
    name = str(t.typeName())
    if name in NO_COUNTERPART:
        return name
    if getattr(t, "collation", BINARY) != BINARY:  # only text has one
        return f"{name} collate {t.collation}"
    inner = [f.dataType for f in t.fields] if hasattr(t, "fields") else []
    inner += [getattr(t, part) for part in ("elementType", "keyType", "valueType") if hasattr(t, part)]
    return next((name for name in map(_without_counterpart, inner) if name is not None), None)


def struct_type(schema: pa.Schema) -> "StructType":
    """The types of a DataFrame with these columns."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema, prefer_timestamp_ntz=True)


def cores(spark: "SparkSession") -> int:
    """The number of tasks that the session runs at once; a guess if it does not say."""
    setting = spark.conf.get("spark.default.parallelism", None)
    if setting is not None:
        return int(setting)
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
                yield _encoded(outcome_of(work, *jobs[number]))

    return collected(numbers.mapInArrow(run, RESULT))


def for_each_partition(
    df: "DataFrame", work: "Callable[[Iterator[pa.RecordBatch]], T]"
) -> list[T | TaskRefused]:
    """`work(batches)` for each partition; the results of one attempt of each, in any order. Blocks."""

    def run(batches: "Iterator[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
        yield _encoded(outcome_of(work, batches))

    return collected(df.mapInArrow(run, RESULT))


def collected(results: "DataFrame") -> list[Any]:
    """The results of tasks, on the driver."""
    return [pickle.loads(bytes(row[0])) for row in results.collect()]


def _encoded(result: Any) -> pa.RecordBatch:
    return pa.record_batch([pa.array([pickle.dumps(result)], pa.binary())], ["result"])


async def in_thread(spark: "SparkSession", call: Callable[[], T]) -> T:
    """A blocking call with Spark actions, on a new thread, since others need the few threads of the loop. If
    the caller is cancelled, the Spark jobs of the call and its wait for the bridge are cancelled, and this
    returns when the call has ended."""
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

    new_thread = anyio.CapacityLimiter(1)
    task = asyncio.create_task(anyio.to_thread.run_sync(tagged, limiter=new_thread))
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
    """The numbers of ended and of all tasks of the jobs with this tag; Spark plans stages one after the
    other, so the second may grow. Without a context nothing is known."""
    try:
        context = spark.sparkContext
        jobs = list(context._jsc.sc().statusTracker().getJobIdsForTag(tag))
    except Exception:  # Connect, or a session that ends
        return 0, None
    tracker = context.statusTracker()
    ids = {stage for job in jobs if (info := tracker.getJobInfo(job)) for stage in info.stageIds}
    stages = [stage for stage in map(tracker.getStageInfo, ids) if stage is not None]
    return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)


async def _ended(task: "asyncio.Task[Any]", waits: Waits, interrupt: Callable[[], Any]) -> None:
    """Wait until `task` has ended; until then cancel all its Spark jobs and waits."""
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
    """Three functions: add a tag to the jobs of this thread; remove it; cancel the jobs with a tag. These are
    tags of the context, since a classic session knows its tags only in the thread that set them."""
    try:
        context = spark.sparkContext
    except Exception:  # Connect has none
        return spark.addTag, spark.removeTag, spark.interruptTag
    return context.addJobTag, context.removeJobTag, context.cancelJobsWithTag
