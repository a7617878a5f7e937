"""`format("aiopersist")`: a thin adapter of Spark's Python data sources over the same planner and committer.

Spark calls the hooks in processes of its own, which live about a minute: each opens a client when it needs
one, and what must outlive the process is a lease of `lease_s`, which running tasks renew. Nothing is pushed
down: what is asked for is asked for by options (`options.py`).

| hook                 | where                         | what it does                                     |
|----------------------|-------------------------------|--------------------------------------------------|
| `schema`             | the driver's machine          | looks up the shard's schema                      |
| `partitions`         | the same                      | plans, pins `as_of`, takes the lease             |
| `read`               | workers                       | a piece each                                     |
| `writer`             | the driver's machine          | checks the columns, registers the one writer     |
| `write`              | workers                       | stages a batch under it                          |
| `commit`             | the driver's machine          | one append, then ends the writer                 |
| `abort`              | the same, also after `commit` | ends the writer; deletes nothing of what it staged |
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

from aiopersist.client import Client
from aiopersist.data.lazy import pa
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.options import LEASE_S, LOST, READ, STREAM_READ, STREAM_WRITE, WRITE, Options, invalid
from aiopersist.spark.partitions import (
    PiecePartition,
    StagedMessage,
    check_schema,
    columns_of,
    read_partition,
    run_here,
    stored_schema,
    within,
)
from aiopersist.spark.place import SparkLocation
from aiopersist.spark.sessions import arrow_schema, struct_type
from aiopersist.spark.streams import StreamReader, StreamWriter
from aiopersist.spark.tasks import TaskRefused, makes_a_table, refusing
from aiopersist.spark.write import Plan, WriteJob, begin_open, plan, release, withdraw

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
        """The columns of a DataFrame of the shard: with `_time` and `_diff` where changes are asked for."""
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
        return BatchWriter.begun(self._options, schema, overwrite)


class BatchReader(DataSourceReader):
    """A batch read."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        options = self._options
        client = bridge().client(options.place)
        pieces, columns, where = bridge().run(_planned, client, options)
        check_schema(columns, self._schema)
        return [PiecePartition(options.place, piece, columns, where) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition)


async def _planned(client: Client, options: Options) -> tuple[list[bytes], Columns, Any]:
    start, end = options.integer("startingtime"), options.integer("endingtime")
    if start is None and end is not None:
        raise invalid("option endingTime wants startingTime")
    if start is not None and options.text("asof") is not None:
        raise invalid("give as_of, or startingTime and endingTime, not both")
    read = await client.shared_read(
        options.shard,
        options.time("asof"),
        start=start,
        end=end,
        wait=False,
        lease_s=options.seconds("leases", LEASE_S),
        keep=True,
    )
    try:
        columns, where = columns_of(options, read.schema), within(options, read.schema)
        pieces = await read.pieces(options.tasks)
    except BaseException:
        await read.give_up()
        raise
    await read.aclose()  # the lease stays
    return pieces, columns, where


# --- write -----------------------------------------------------------------------------------------


class BatchWriter(DataSourceArrowWriter):
    """A batch write. It travels to workers and to the committer."""

    def __init__(self, place: SparkLocation, planned: Plan, tasks_: int) -> None:
        self._place = place
        self._plan = planned
        self._tasks = tasks_

    @classmethod
    def begun(cls, options: Options, schema: StructType, overwrite: bool) -> BatchWriter:
        """On the driver's machine, before anything runs."""
        place = options.place
        client, frame = bridge().client(place), arrow_schema(schema)
        spec = options.write_spec(overwrite=overwrite)
        lease_s = options.seconds("leases", LEASE_S)
        begun = bridge().run(begin_open, client, frame, spec)
        return cls(place, bridge().run(plan, client, begun, lease_s), options.tasks)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if makes_a_table():
            return StagedMessage(TaskRefused(invalid(LOST)))
        layout = self._plan.begun.layout
        return StagedMessage(refusing(tasks.stage, self._place, self._plan.grant, layout, iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        found = bridge()
        client = found.client(self._place)
        results = [message.result for message in messages if isinstance(message, StagedMessage)]
        job = WriteJob(found, client, self._place, self._plan.begun, run_here, self._tasks)
        job.commit(results)
        found.run(release, client, self._plan.grant)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Also called after `commit` raised or died, when its append may have happened, or happen yet: so
        nothing is deleted. Without its writer what was staged and not appended is the sweep's."""
        found = bridge()
        found.run(withdraw, found.client(self._place), self._plan)
