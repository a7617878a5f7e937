"""Shared by the batch and streaming hooks of `format("aiopersist")`: the chosen columns, the values that
travel to tasks and back, and the end of a write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition, WriterCommitMessage

from aiopersist.client.client import Client
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.key_range import Leaf, leaves
from aiopersist.data.part.where_text import parse_where
from aiopersist.data.types.schema import Schema
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.columns import Columns
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.options import Options, invalid
from aiopersist.spark.plan import (
    GrantedWrite,
    WritePlan,
    WriteSpec,
    abandon,
    grant_writer,
    release_writer,
)
from aiopersist.spark.replace import Results
from aiopersist.spark.sessions import arrow_schema
from aiopersist.spark.tasks import StagedTask, TaskRefused, outcome_of
from aiopersist.spark.write import WriteJob

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Planning = Callable[[Client, pa.Schema, WriteSpec], Awaitable[WritePlan]]


def stored_schema(options: Options) -> Schema[Any, Any, Any]:
    """The current schema of the shard."""
    shard = options.shard  # before the client: an error of this option is clearer than one of a store
    return bridge().run(bridge().client(options.location).schema, shard)[1]


def columns_of(options: Options, schema: Schema[Any, Any, Any]) -> Columns:
    """The columns that the options ask for."""
    changes = options.text("startingtime") is not None
    expand = options.flag("expand", not changes)
    if changes and expand:
        raise invalid("changes have columns _time and _diff: use expand=true or startingTime, not both")
    return Columns(schema, time=changes, expand=expand, only=options.names("columns") or None)


def check_schema(columns: Columns, schema: StructType) -> None:
    """Refuse a user's schema with other columns."""
    expected = columns.arrow_schema
    if arrow_schema(schema).names != expected.names:
        raise invalid(
            f"the schema of the shard is {expected.names}: choose by option columns, not by schema()"
        )


def condition_of(options: Options, schema: Schema[Any, Any, Any]) -> Any:
    """The condition of the options `where` and `key_range`; `None` without both."""
    text = options.text("where")
    conditions = [None if text is None else parse_where(text, schema), _key_condition(options, schema)]
    present = [condition for condition in conditions if condition is not None]
    return reduce(and_, present) if present else None


def _key_condition(options: Options, schema: Schema[Any, Any, Any]) -> Any:
    bounds = options.key_range()
    if bounds is None:
        return None
    order = leaves(schema)
    if not order or order[0].path[0] != "key":
        raise invalid("option key_range: the first column of this shard's key has no order")
    lower, upper = (_bound(order[0], value) for value in bounds)
    field = pc.field(*order[0].path)
    conditions = [field >= lower] if lower is not None else []
    conditions += [field < upper] if upper is not None else []
    return conditions[0] & conditions[1] if len(conditions) == 2 else next(iter(conditions), None)


def _bound(leaf: Leaf, value: Any) -> Any:
    is_ = pa.types
    is_text = is_.is_temporal(leaf.type) or is_.is_decimal(leaf.type) or is_.is_binary(leaf.type)
    try:
        if isinstance(value, str) and is_text:
            return pa.scalar(value).cast(leaf.type)
        if isinstance(value, bool) and not is_.is_boolean(leaf.type):
            raise TypeError("a truth value")
        return None if value is None else pa.scalar(value, leaf.type)
    except (pa.ArrowException, TypeError, ValueError) as e:
        raise invalid(f"option key_range: {value!r} is no {leaf.type}: {e}") from e


@dataclass
class PiecePartition(InputPartition):
    """A piece of a read, for a task."""

    location: SparkLocation
    piece: bytes
    columns: Columns
    where: Any = None
    at: int | None = None
    """`_time` of every row, if the rows have no times."""

    def __repr__(self) -> str:  # Spark logs it
        return f"PiecePartition({len(self.piece)} bytes)"


def read_partition(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """The rows of a partition, in a worker."""
    assert isinstance(partition, PiecePartition)
    return tasks.read(partition.location, partition.piece, partition.columns, partition.where, partition.at)


@dataclass
class StagedMessage(WriterCommitMessage):
    """The message of a task to the process that commits."""

    result: StagedTask | TaskRefused
    query: str | None = None
    """The id of the streaming query."""
    write: GrantedWrite | None = None
    """The write of the streaming batch; `None` if it was refused."""


def grant_write(
    client: Client, plan: Planning, columns: pa.Schema, spec: WriteSpec, lease_s: float
) -> GrantedWrite:
    """Plan a write of a DataFrame with these columns, and register its writer."""

    async def grant() -> GrantedWrite:
        return await grant_writer(client, await plan(client, columns, spec), lease_s)

    return bridge().run(grant)


def commit_staged(
    location: SparkLocation, plan: WritePlan, grants: Iterable[bytes], results: Results, task_count: int
) -> None:
    """Append the batches that tasks staged, once, then end their writers."""
    client = bridge().client(location)

    async def commit() -> None:
        await WriteJob(client, location, plan, _run_here, task_count).commit(results)
        for grant in grants:
            await release_writer(client, grant)

    bridge().run(commit)


def _run_here(work: Any, jobs: Sequence[tuple[Any, ...]]) -> list[StagedTask | TaskRefused]:
    """The tasks one after the other in this process: where Spark calls `commit`, there are no Spark tasks."""
    return [outcome_of(work, *job) for job in jobs]


def abort_writes(location: SparkLocation, writes: Iterable[GrantedWrite]) -> None:
    """Spark also calls `abort` after `commit` raised or died, when the append may have happened or may
    follow. So this only ends the writers; a sweep then deletes batches that were not appended."""
    client = bridge().client(location)

    async def abandon_all() -> None:
        for write in writes:
            await abandon(client, write)

    bridge().run(abandon_all)
