"""The engine in the driver's process: reads and writes of any size as Spark jobs, through `mapInArrow`.

Each job is one coroutine of the bridge's loop (`bridge.py`): it plans, lets tasks do the heavy work on parts
in the blob store, and commits. Each blocking method hands its coroutine to the bridge, and makes the Spark
actions that the coroutine awaits (`on_caller`) on the caller's thread. Rows go through the JVM only if a
DataFrame needs them. The bridge owns the client and its heartbeats, so leases last while the `SparkClient` is
open.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import anyio.to_thread

from aiopersist.base.errors import BatchExpired, InvalidUsage, UsageKind
from aiopersist.base.frontier import Time
from aiopersist.base.portal import closing, on_caller, to_its_end
from aiopersist.base.resource import Resource
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.compact.shared_compaction import Goal
from aiopersist.data.lazy import pa
from aiopersist.data.part.flat import invalid
from aiopersist.data.part.select import check_where
from aiopersist.data.types.schema import Schema
from aiopersist.read.shared_read import SharedRead
from aiopersist.shard.registration import LOST_MAX
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.plan import (
    APPEND,
    DELETE,
    WritePlan,
    WriteSpec,
    plan_open_write,
    remove_new_shard,
    writer_of,
)
from aiopersist.spark.registration import register
from aiopersist.spark.sessions import (
    arrow_schema,
    cores,
    for_each,
    for_each_partition,
    in_thread,
    struct_type,
)
from aiopersist.spark.write import WriteJob
from aiopersist.storage.urls import Location
from aiopersist.write.checks import Txn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


CLAIMS_LOST_MAX = 5  # of one compaction


def connect(
    spark: "SparkSession",
    location: "str | os.PathLike[str] | Location | None" = None,
    *,
    blob: str | None = None,
    consensus: str | None = None,
    settings: Settings | None = None,
    maintenance: bool = True,
) -> "SparkClient":
    """Shards of a location as DataFrames of `spark`. Pass the location as to `aiopersist.open`, but no
    instance, no store in memory, and no URL with a secret: `env:NAME` names a variable with such a URL, on
    the driver and on the executors. Also registers `format("aiopersist")`.

    `InvalidLocation` for an unusable location, `StorageUnavailable` for an unreachable store."""
    public = SparkLocation.of(location, blob, consensus, settings)
    register(spark)
    return SparkClient(spark, public, bridge().acquire(public, maintenance=maintenance), maintenance)


class SparkClient(Resource):
    """See the header. Its methods block; any thread may call them. Each has a coroutine with the same name
    and a leading `a`, for asyncio drivers. Close the client when its DataFrames are no longer used."""

    def __init__(
        self, spark: "SparkSession", location: SparkLocation, client: Client, maintenance: bool
    ) -> None:
        self._spark = spark
        self._location = location
        self._shared = client
        self._maintenance = maintenance
        self._lock = Lock()
        """Guards the next two attributes."""
        self._reads: list[tuple[DataFrame, SharedRead]] = []
        self._closed = False

    # --- reading ---------------------------------------------------------------------------------

    def snapshot_df(
        self,
        shard: str,
        as_of: Time | datetime | None = None,
        *,
        tag: str | None = None,
        columns: Sequence[str] | None = None,
        where: Any = None,
        expand: bool = True,
        parallelism: int | None = None,
        wait: bool = True,
    ) -> "DataFrame":
        """The contents at `as_of` (`None`: the greatest complete time, fixed by this call, not by each
        action; on a wall clock also an aware `datetime`), or those that the `tag` keeps. Each row appears as
        often as its diff says; with `expand=False` it appears once, with a column `_diff`.

        `columns` selects columns of key and value, by their names in the DataFrame. `where` is a
        `pyarrow.compute` expression, as for a snapshot: parts that cannot match are not read. Both are
        checked first: `InvalidUsage` of kind `INVALID_COLUMN`. About `parallelism` tasks (by default as many
        as Spark runs at once) each read a range of keys, without shuffles. Errors and `wait` as in
        `shared_read`."""
        make = partial(Columns, expand=expand, only=None if columns is None else tuple(columns))
        return self._read(make, where, parallelism, shard, as_of=as_of, tag=tag, wait=wait)

    def changes_df(
        self,
        shard: str,
        start: int | datetime,
        end: int | datetime | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: Any = None,
        parallelism: int | None = None,
        wait: bool = True,
    ) -> "DataFrame":
        """The changes at times in `[start, end)` (`None`: to the greatest complete time), with columns
        `_time` and `_diff`. `SinceViolation` unless `since < start`, or both are the minimum."""
        make = partial(Columns, time=True, expand=False, only=None if columns is None else tuple(columns))
        return self._read(make, where, parallelism, shard, start=start, end=end, wait=wait)

    def _read(
        self, make: Callable[..., Columns], where: Any, tasks_: int | None, shard: str, **range_: Any
    ) -> "DataFrame":
        client, tasks_ = self._client(), tasks_ or cores(self._spark)
        return bridge().run(partial(self._read_job, client, make, where, tasks_, shard, **range_))

    async def _read_job(
        self, client: Client, make: Callable[..., Columns], where: Any, tasks_: int, shard: str, **range_: Any
    ) -> "DataFrame":
        _checked(make, where, (await client.schema(shard))[1])
        read = await client.workers.shared_read(shard, **range_)
        try:
            columns = _checked(make, where, read.schema)
            df = await on_caller(self._planned, await read.pieces(tasks_, where), columns, where)
            with self._lock:
                self._client()  # another thread may have closed it meanwhile
                self._reads.append((df, read))
        except BaseException:
            await to_its_end(read.aclose)
            raise
        return df

    def _planned(self, pieces: list[bytes], columns: Columns, where: Any) -> "DataFrame":
        """A DataFrame with a task for each piece."""
        location = self._location

        def rows(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from tasks.read(location, pieces[number], columns, where)

        numbers = self._spark.range(len(pieces), numPartitions=len(pieces))
        return numbers.mapInArrow(rows, struct_type(columns.arrow_schema))

    # --- writing ---------------------------------------------------------------------------------

    def write_df(
        self,
        df: "DataFrame",
        shard: str,
        *,
        keys: Sequence[str] = (),
        time: str | int | None = None,
        diff: str | None = None,
        txn: Txn | None = None,
        mode: str = APPEND,
        schema: "Schema[Any, Any, Any] | StructType | None" = None,
        parallelism: int | None = None,
    ) -> int:
        """Write the rows in one commit. Returns the time at which they are complete: without `time`, the
        shard's upper or, on a wall clock, now; otherwise the last time before the new upper. Creates a
        missing shard if `keys` name the columns of its key; a failed write leaves no new shard behind. The
        columns of a new shard are those of `df`, nullable as in Spark, or those of `schema`: a `StructType`,
        or a `Schema` of this library, which needs no `keys`. They are fixed for good. `CodecMismatch` if the
        shard exists with another schema.

        `time`: a column of times, or one time, at or beyond the upper; then an append by another writer makes
        this one fail (`UpperMismatch`). `diff`: a column of diffs. `txn=(app, number)`: a repeat writes
        nothing. Costs a few commits and the uploads of the tasks. Spark computes `df` again if the driver
        stood still for longer than its lease.

        `mode`: `append` adds rows; `upsert` replaces rows with the same keys; `overwrite` replaces all rows;
        `delete` removes rows with the keys in `df`, which has only columns of the key. Duplicate and missing
        keys are ignored there. A table takes all modes except `append` (`NOT_A_TABLE`)."""
        client, tasks_ = self._client(), parallelism or cores(self._spark)
        spec = WriteSpec(shard, mode, tuple(keys), time, diff, txn, _schema_argument(schema))
        return bridge().run(self._write_job, client, df, arrow_schema(df.schema), spec, tasks_)

    def delete_where(
        self, shard: str, where: Any, *, txn: Txn | None = None, parallelism: int | None = None
    ) -> int:
        """Delete the rows that match `where`, a `pyarrow.compute` expression as for `snapshot_df`, in one
        commit: all rows at its time, even if other writers add some meanwhile. Returns the time of the
        deletion. Parts that cannot match are not read. `INVALID_COLUMN` for a wrong condition, `txn` as in
        `write_df`. To delete by keys, use `write_df` with `mode="delete"`."""
        client, tasks_ = self._client(), parallelism or cores(self._spark)
        if where is None:
            raise invalid("where= is missing: it selects the rows to delete", "")
        spec = WriteSpec(shard, DELETE, txn=txn, where=where)
        return bridge().run(self._write_job, client, None, pa.schema([]), spec, tasks_)

    async def _write_job(
        self, client: Client, df: "DataFrame | None", frame: pa.Schema, spec: WriteSpec, tasks_: int
    ) -> int:
        """Plan and write; again if the driver stood still for longer than its lease: nothing was appended."""
        plan = await plan_open_write(client, frame, spec)
        try:
            for _ in range(LOST_MAX - 1):
                with suppress(BatchExpired):
                    return await self._write_once(client, df, plan, tasks_)
            return await self._write_once(client, df, plan, tasks_)
        except BaseException:
            await to_its_end(remove_new_shard, client, plan)
            raise

    async def _write_once(self, client: Client, df: "DataFrame | None", plan: WritePlan, tasks_: int) -> int:
        location, layout = self._location, plan.layout
        if df is None:
            return await WriteJob(client, location, plan, partial(for_each, self._spark), tasks_).commit([])
        async with closing(writer_of(client, plan)) as writer:
            grant = writer.to_transmittable()
            staged = await on_caller(
                for_each_partition, df, lambda batches: tasks.stage(location, grant, layout, batches)
            )
            job = WriteJob(client, location, plan, partial(for_each, self._spark), tasks_)
            return await job.commit(staged)

    # --- compaction ------------------------------------------------------------------------------

    def compact(self, shard: str, *, parallelism: int | None = None) -> bool:
        """Merge the whole shard into one sorted batch, with times advanced to since, like `force_compaction`.
        Spark's tasks read and write parts; no rows go through the JVM. Returns whether anything was done."""
        return bridge().run(self._compact_job, self._client(), shard, parallelism or cores(self._spark))

    async def _compact_job(self, client: Client, shard: str, tasks_: int) -> bool:
        goal: Goal | None = None
        done, lost = False, 0
        while True:
            async with closing(client.workers.shared_compaction(shard, goal)) as claimed:
                goal = claimed.goal
                if not claimed.is_needed:
                    return done
                jobs = [(self._location, piece) for piece in await claimed.pieces(tasks_)]
                results = tasks.accepted(await on_caller(for_each, self._spark, tasks.compact, jobs))
                applied = await claimed.apply(results)
                done, lost = done or applied, lost + (not applied)
                if lost == CLAIMS_LOST_MAX:
                    text = f"shard {shard!r}: the compaction lost its claim {lost} times: try again"
                    raise BatchExpired(text)

    # --- the same as coroutines ------------------------------------------------------------------

    async def asnapshot_df(self, *args: Any, **kwargs: Any) -> "DataFrame":
        """`snapshot_df`, on a new thread."""
        return await in_thread(self._spark, partial(self.snapshot_df, *args, **kwargs))

    async def achanges_df(self, *args: Any, **kwargs: Any) -> "DataFrame":
        """`changes_df`, on a new thread."""
        return await in_thread(self._spark, partial(self.changes_df, *args, **kwargs))

    async def awrite_df(self, *args: Any, **kwargs: Any) -> int:
        """`write_df`, on a new thread. If the caller is cancelled, its Spark jobs are cancelled, too;
        `txn` tells whether the rows were committed before (`Client.txn_number`)."""
        return await in_thread(self._spark, partial(self.write_df, *args, **kwargs))

    async def adelete_where(self, *args: Any, **kwargs: Any) -> int:
        """`delete_where`, on a new thread. Cancellation as in `awrite_df`."""
        return await in_thread(self._spark, partial(self.delete_where, *args, **kwargs))

    async def acompact(self, *args: Any, **kwargs: Any) -> bool:
        """`compact`, on a new thread."""
        return await in_thread(self._spark, partial(self.compact, *args, **kwargs))

    async def arelease(self, *dfs: "DataFrame") -> None:
        """`release`, on a new thread, which continues if the caller is cancelled."""
        await _to_its_end(partial(self.release, *dfs))

    async def aclose(self) -> None:
        """`close`, on a new thread, which continues if the caller is cancelled."""
        await _to_its_end(self.close)

    # --- the end ---------------------------------------------------------------------------------

    def release(self, *dfs: "DataFrame") -> None:
        """End the leases of these DataFrames; without arguments, of all so far. Do not use them, or
        DataFrames derived from them, afterwards. `InvalidUsage` of kind `CLOSED` for one without a lease."""
        with self._lock:
            leased = {id(df): (df, read) for df, read in self._reads}
            if any(id(df) not in leased for df in dfs):
                text = "this DataFrame was released before, or is derived or of another client"
                raise InvalidUsage(UsageKind.CLOSED, text)
            released = [leased[id(df)] for df in dfs] if dfs else self._reads[:]
        bridge().run(self._release_job, released)

    async def _release_job(self, released: "Sequence[tuple[DataFrame, SharedRead]]") -> None:
        for df_and_read in released:
            await to_its_end(df_and_read[1].aclose)
            with self._lock, suppress(ValueError):
                self._reads.remove(df_and_read)

    def close(self) -> None:
        """End all leases. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.release()
        finally:
            bridge().release(self._location, maintenance=self._maintenance)

    def _client(self) -> Client:
        if self._closed:
            raise InvalidUsage(UsageKind.CLOSED, "the client is closed")
        return self._shared

    def __enter__(self) -> "SparkClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        text = "a SparkClient belongs to one process: call connect inside the function that travels"
        raise TypeError(text)

    def __repr__(self) -> str:
        return f"<SparkClient of {self._location}>"


def _checked(make: Callable[..., Columns], where: Any, schema: Schema[Any, Any, Any]) -> Columns:
    """The columns of a DataFrame; checks that the shard has them and those of `where`."""
    if where is not None:
        check_where(where, schema)
    return make(schema)


def _schema_argument(schema: Any) -> Schema[Any, Any, Any] | pa.Schema | None:
    """The schema or the columns in `schema=`."""
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return arrow_schema(schema)
    if schema is not None and not isinstance(schema, Schema):
        text = f"schema= is a StructType or a Schema, not {type(schema).__name__}"
        raise InvalidUsage(UsageKind.INVALID_MODE, text)
    return schema


async def _to_its_end(call: Callable[[], None]) -> None:
    """`call`, on a new thread, which continues if the caller is cancelled."""
    await asyncio.shield(anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1)))
