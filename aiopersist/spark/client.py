"""The engine, from the driver's process: reads and writes of any size as Spark jobs, through `mapInArrow`.

Each call plans on the driver, lets tasks do the heavy work on parts in the blob store, and commits. Rows go
through the JVM only where a DataFrame needs them. The bridge (`bridge.py`) owns the client and its
heartbeats, so leases live as long as the `SparkClient` is open.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NoReturn

import anyio.to_thread

from aiopersist.client import Client
from aiopersist.compact.shared_compaction import Goal
from aiopersist.data.lazy import pa
from aiopersist.data.part.select import check_where
from aiopersist.data.types.schema import Schema
from aiopersist.errors import BatchExpired, InvalidUsage, UsageKind
from aiopersist.frontier import Time
from aiopersist.read.shared_read import SharedRead
from aiopersist.settings import Settings
from aiopersist.shard.registration import LOST_MAX
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.place import SparkLocation
from aiopersist.spark.sessions import (
    arrow_schema,
    cores,
    for_each,
    for_each_partition,
    in_thread,
    struct_type,
)
from aiopersist.spark.write import APPEND, Begun, WriteJob, WriteSpec, begin_open, give_up
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
    """Shards of a location, as DataFrames of `spark`. The location is as of `aiopersist.open`, but no
    instance, nothing in memory, and no URL with a secret in it: `env:NAME` names a variable, here and on the
    executors, that holds it. Registers `format("aiopersist")`, too.

    `InvalidLocation` at once for what cannot be used, `StorageUnavailable` for what cannot be reached."""
    place = SparkLocation.of(location, blob, consensus, settings)
    register(spark)
    return SparkClient(spark, place, bridge().acquire(place, maintenance=maintenance), maintenance)


def register(spark: "SparkSession") -> None:
    """Make `format("aiopersist")` known to `spark`; needless where Spark finds `pyspark_aiopersist`
    itself."""
    from aiopersist.spark.source import AiopersistSource

    spark.dataSource.register(AiopersistSource)


class SparkClient:
    """See the header. Blocking calls, for any thread; those that begin with `a` are coroutines of the same,
    for a driver that is itself asyncio. Close it when its DataFrames are no longer used."""

    def __init__(
        self, spark: "SparkSession", place: SparkLocation, client: Client, maintenance: bool
    ) -> None:
        self._spark = spark
        self._place = place
        self._shared = client
        self._maintenance = maintenance
        self._reads: list[tuple[DataFrame, SharedRead]] = []
        self._closed = False
        self._lock = Lock()
        """Of those two."""

    # --- reading ---------------------------------------------------------------------------------

    def snapshot_df(
        self,
        shard: str,
        as_of: Time | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: Any = None,
        expand: bool = True,
        parallelism: int | None = None,
        wait: bool = True,
    ) -> "DataFrame":
        """The contents at `as_of` (`None`: the greatest complete time, which is fixed here, not at each
        action). Rows are repeated as often as they are there; with `expand=False` there is a column `_diff`.

        `columns` of key and val, by their names in the DataFrame; `where` is a `pyarrow.compute` expression
        as a snapshot takes it, and passes over what cannot match. Both are checked here, before anything is
        waited for: `InvalidUsage` of kind `INVALID_COLUMN`. About `parallelism` tasks (those that Spark runs
        at once), each of a range of keys; none shuffles. Errors and `wait` as of `shared_read`."""
        columns = None if columns is None else tuple(columns)
        return self._read(
            partial(Columns, expand=expand, only=columns), where, parallelism, shard, as_of=as_of, wait=wait
        )

    def changes_df(
        self,
        shard: str,
        start: int,
        end: int | None = None,
        *,
        columns: Sequence[str] | None = None,
        where: Any = None,
        parallelism: int | None = None,
        wait: bool = True,
    ) -> "DataFrame":
        """The changes at times in `[start, end)` (`None`: all that are complete now), with columns `_time`
        and `_diff`. They need `since < start`, or both at the minimum: else `SinceViolation`."""
        columns = None if columns is None else tuple(columns)
        make = partial(Columns, time=True, expand=False, only=columns)
        return self._read(make, where, parallelism, shard, start=start, end=end, wait=wait)

    def _read(
        self, make: Callable[..., Columns], where: Any, tasks_: int | None, shard: str, **range_: Any
    ) -> "DataFrame":
        client = self._client()
        _checked(make, where, bridge().run(client.schema, shard)[1])
        read = bridge().run(partial(client.shared_read, shard, **range_))
        try:
            columns = _checked(make, where, read.schema)
            pieces = bridge().run(read.pieces, tasks_ or cores(self._spark))
            df = self._planned(pieces, columns, where)
            with self._lock:
                self._client()  # it may have been closed meanwhile
                self._reads.append((df, read))
        except BaseException:
            bridge().finish(read.aclose)
            raise
        return df

    def _planned(self, pieces: list[bytes], columns: Columns, where: Any) -> "DataFrame":
        """A task for each of the pieces."""
        place = self._place

        def rows(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from tasks.read(place, pieces[number], columns, where)

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
        """Write the rows in one commit, and return the time at which they are there: one that the library
        picks (the shard's upper), or the last before the new upper. A shard that is not there is made, if
        `keys` name the columns of its key, and is not left behind by a write that failed. Its columns are
        those of `df`, as nullable as Spark takes them to be; or `schema` says them, for good: a
        `StructType`, or a `Schema` of this library, which needs no `keys`. `CodecMismatch` if the shard is
        there with another.

        `time`: a column of times, or one time, at or beyond the upper: other writers then make it fail
        (`UpperMismatch`). `diff`: a column of diffs. `txn=(app, number)`: a repeat writes nothing. `mode`:
        `append`; `upsert` replaces the rows that have the same keys, `overwrite` all. Costs a few commits,
        and what tasks upload. `df` is computed again if the driver stood still beyond its lease meanwhile."""
        client, found = self._client(), bridge()
        spec = WriteSpec(shard, mode, tuple(keys), time, diff, txn, _asked(schema))
        begun = found.run(begin_open, client, arrow_schema(df.schema), spec)
        try:
            return self._written(client, df, begun, parallelism)
        except BaseException:
            with suppress(CancelledError):  # then an empty shard may stay
                found.finish(give_up, client, begun)
            raise

    def _written(self, client: Client, df: "DataFrame", begun: Begun, parallelism: int | None) -> int:
        """Write it, from the beginning again if the driver stood still for longer than its lease: nothing was
        appended then."""
        for _ in range(LOST_MAX - 1):
            with suppress(BatchExpired):
                return self._written_once(client, df, begun, parallelism)
        return self._written_once(client, df, begun, parallelism)

    def _written_once(self, client: Client, df: "DataFrame", begun: Begun, parallelism: int | None) -> int:
        found, place = bridge(), self._place
        writer = found.run(client.writer, begun.shard, begun.schema)
        try:
            grant = found.call(writer.to_transmittable)
            staged = for_each_partition(df, lambda batches: tasks.stage(place, grant, begun.layout, batches))
            run = partial(for_each, self._spark)
            job = WriteJob(found, client, place, begun, run, parallelism or cores(self._spark))
            return job.commit(staged)
        finally:
            found.finish(writer.aclose)

    # --- compaction ------------------------------------------------------------------------------

    def compact(self, shard: str, *, parallelism: int | None = None) -> bool:
        """Make all that is there one sorted batch, times advanced to since, as `force_compaction` does, by
        Spark's tasks: parts in, parts out, nothing through the JVM. Returns whether anything was done."""
        client, found, done, lost = self._client(), bridge(), False, 0
        goal: Goal | None = None
        while True:
            claimed = found.run(client.shared_compaction, shard, goal)
            goal = claimed.goal
            try:
                if not claimed.is_needed:
                    return done
                pieces = found.run(claimed.pieces, parallelism or cores(self._spark))
                jobs = [(self._place, piece) for piece in pieces]
                results = tasks.granted(for_each(self._spark, tasks.compact, jobs))
                applied = found.run(claimed.apply, results)
                done, lost = done or applied, lost + (not applied)
                if lost == CLAIMS_LOST_MAX:
                    raise BatchExpired("the claim of the compaction was lost, and lost again")
            finally:
                found.finish(claimed.aclose)

    # --- the same as coroutines ------------------------------------------------------------------

    async def asnapshot_df(self, *args: Any, **kwargs: Any) -> "DataFrame":
        """`snapshot_df`, on a thread."""
        return await in_thread(self._spark, partial(self.snapshot_df, *args, **kwargs))

    async def achanges_df(self, *args: Any, **kwargs: Any) -> "DataFrame":
        """`changes_df`, on a thread."""
        return await in_thread(self._spark, partial(self.changes_df, *args, **kwargs))

    async def awrite_df(self, *args: Any, **kwargs: Any) -> int:
        """`write_df`, on a thread. Cancelled, it ends the Spark jobs; whether it was committed before is
        told by its `txn`."""
        return await in_thread(self._spark, partial(self.write_df, *args, **kwargs))

    async def acompact(self, *args: Any, **kwargs: Any) -> bool:
        """`compact`, on a thread."""
        return await in_thread(self._spark, partial(self.compact, *args, **kwargs))

    async def arelease(self, *dfs: "DataFrame") -> None:
        """`release`, on a thread. Goes on in the background if the caller is cancelled."""
        await _to_its_end(partial(self.release, *dfs))

    async def aclose(self) -> None:
        """`close`, on a thread. Goes on in the background if the caller is cancelled."""
        await _to_its_end(self.close)

    # --- the end ---------------------------------------------------------------------------------

    def release(self, *dfs: "DataFrame") -> None:
        """Let go of what these DataFrames of this client read, or, without any, all that were made so far:
        they, and what was derived from them, must not be used any more. `InvalidUsage` of kind `CLOSED` for
        one for which nothing is held."""
        with self._lock:
            held = {id(df): (df, read) for df, read in self._reads}
            if any(id(df) not in held for df in dfs):
                text = "a DataFrame was released before, or is not as this client made it"
                raise InvalidUsage(UsageKind.CLOSED, text)
            released = [held[id(df)] for df in dfs] if dfs else self._reads[:]
        for made in released:
            with suppress(CancelledError):  # then its lease ends by itself
                bridge().finish(made[1].aclose)
            with self._lock, suppress(ValueError):
                self._reads.remove(made)

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.release()
        finally:
            bridge().release(self._place, maintenance=self._maintenance)

    def _client(self) -> Client:
        if self._closed:
            raise InvalidUsage(UsageKind.CLOSED, "the client is closed")
        return self._shared

    def __enter__(self) -> "SparkClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        text = "a SparkClient lives in one process: let a function that travels call connect itself"
        raise TypeError(text)

    def __repr__(self) -> str:
        return f"<SparkClient of {self._place}>"

    async def __aenter__(self) -> "SparkClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


def _checked(make: Callable[..., Columns], where: Any, schema: Schema[Any, Any, Any]) -> Columns:
    """The columns that are asked for of a shard with this schema, and the condition: both can be had."""
    if where is not None:
        check_where(where, schema)
    return make(schema)


def _asked(schema: Any) -> Schema[Any, Any, Any] | pa.Schema | None:
    """What `schema=` says."""
    from pyspark.sql.types import StructType

    if isinstance(schema, StructType):
        return arrow_schema(schema)
    if schema is not None and not isinstance(schema, Schema):
        text = f"schema= is a StructType or a Schema, not {type(schema).__name__}"
        raise InvalidUsage(UsageKind.INVALID_MODE, text)
    return schema


async def _to_its_end(call: Callable[[], None]) -> None:
    """On a thread of its own, where it goes on if the caller is cancelled."""
    await asyncio.shield(anyio.to_thread.run_sync(call, limiter=anyio.CapacityLimiter(1)))
