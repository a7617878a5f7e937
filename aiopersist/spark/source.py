"""`format("aiopersist")`: a thin adapter between Spark's Python data sources and the engine.

Spark calls the hooks in its own processes, which live about a minute. Each process opens a client on demand.
A lease of `lease_s`, renewed by running tasks, keeps blobs that must outlive the process. Options
(`options.py`) say what to read. No reader has `pushFilters`: what Spark pushes for one query of a `load()`
reaches its other queries, and then they lack rows.

| hook                 | where                         | action                                           |
|----------------------|-------------------------------|--------------------------------------------------|
| `schema`             | the driver's machine          | looks up the shard's schema                      |
| `partitions`         | the driver's machine          | plans, pins `as_of`, takes the lease             |
| `read`               | workers                       | reads one piece                                  |
| `writer`             | the driver's machine          | checks the columns, registers the one writer     |
| `write`              | workers                       | stages a batch under that writer                 |
| `commit`             | the driver's machine          | appends once, then ends the writer               |
| `abort`              | the same, also after `commit` | ends the writer; deletes no staged batch         |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

from aiopersist.client.client import Client
from aiopersist.data.lazy import pa
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.hooks import (
    PiecePartition,
    StagedMessage,
    abort_writes,
    check_schema,
    columns_of,
    commit_staged,
    condition_of,
    grant_write,
    read_partition,
    stored_schema,
)
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.options import LEASE_S, LOST, READ, STREAM_READ, STREAM_WRITE, WRITE, Options, invalid
from aiopersist.spark.plan import GrantedWrite, plan_open_write
from aiopersist.spark.sessions import arrow_schema, struct_type
from aiopersist.spark.streams import StreamReader, StreamWriter
from aiopersist.spark.tasks import TaskRefused, makes_a_table, outcome_of

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class AiopersistSource(DataSource):
    """See the header."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = Options(options)

    @classmethod
    def name(cls) -> str:
        return "aiopersist"

    def schema(self) -> StructType:
        """The columns of the shard in a DataFrame; for changes with `_time` and `_diff`."""
        return struct_type(columns_of(self._options, stored_schema(self._options)).arrow_schema)

    def reader(self, schema: StructType) -> DataSourceReader:
        self._options.check(READ, "of a read")
        return BatchReader(self._options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        self._options.check(STREAM_READ, "of a streaming read")
        return StreamReader(self._options, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        self._options.check(STREAM_WRITE, "of a streaming write")
        return StreamWriter(self._options, schema, overwrite)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        self._options.check(WRITE, "of a write")
        return BatchWriter.planned(self._options, schema, overwrite)


class BatchReader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        location = self._options.location
        pieces, columns, where = bridge().run(_planned, bridge().client(location), self._options)
        check_schema(columns, self._schema)
        return [PiecePartition(location, piece, columns, where) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)


async def _planned(client: Client, options: Options) -> tuple[list[bytes], Columns, Any]:
    start, end = options.instant("startingtime"), options.instant("endingtime")
    if start is None and end is not None:
        raise invalid("option endingTime needs startingTime")
    if start is not None and options.text("asof") is not None:
        raise invalid("use as_of or startingTime and endingTime, not both")
    read = await client.workers.shared_read(
        options.shard,
        options.time("asof"),
        start=start,
        end=end,
        tag=options.text("tag"),
        wait=False,
        lease_s=options.seconds("leases", LEASE_S),
        keep=True,
    )
    try:
        columns, where = columns_of(options, read.schema), condition_of(options, read.schema)
        pieces = await read.pieces(options.tasks, where)
    except BaseException:
        await read.give_up()
        raise
    await read.aclose()  # the lease stays
    return pieces, columns, where


# --- write -----------------------------------------------------------------------------------------


class BatchWriter(DataSourceArrowWriter):
    """A batch write. It travels to workers and to the committer."""

    def __init__(self, location: SparkLocation, write: GrantedWrite, tasks_: int) -> None:
        self._location = location
        self._write = write
        self._tasks = tasks_

    @classmethod
    def planned(cls, options: Options, schema: StructType, overwrite: bool) -> BatchWriter:
        """On the driver's machine, before anything runs."""
        location, spec = options.location, options.write_spec(overwrite=overwrite)
        frame, lease_s = arrow_schema(schema), options.seconds("leases", LEASE_S)
        write = grant_write(bridge().client(location), plan_open_write, frame, spec, lease_s)
        return cls(location, write, options.tasks)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if makes_a_table():
            return StagedMessage(TaskRefused(invalid(LOST)))
        layout = self._write.plan.layout
        return StagedMessage(outcome_of(tasks.stage, self._location, self._write.grant, layout, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        results = [message.result for message in messages if isinstance(message, StagedMessage)]
        commit_staged(self._location, self._write.plan, [self._write.grant], results, self._tasks)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        abort_writes(self._location, [self._write])
