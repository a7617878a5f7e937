"""Structured streaming over shards: a source with frontiers as offsets; a sink that writes batches once.

*Source.* An offset is `{"time": t, "shard": id}`: everything before `t` of that shard was delivered. A new
shard with the same name is another shard. A batch always ends between two times, regardless of limits. Two
special times begin a query: a batch from `SNAPSHOT` to `t` has the contents as of `t - 1`; a batch from
`LATEST` to `t` is empty. So a batch is a function of its two offsets. Spark logs them before it runs the
batch, so a restart repeats the same batch.

A named hold keeps history for a restart: it is one time before the end of the last batch that Spark
committed. A newer run takes the hold over, and fences the older run. If since has passed the start of a
batch, the batch fails with an error.

*Sink.* A batch is one append with `txn = (query id, batch id)`, so a repeat writes nothing. Its time is the
shard's upper, never the clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from aiopersist.base.errors import (
    BatchExpired,
    Error,
    InvalidUsage,
    ShardFinalized,
    SinceViolation,
    UsageKind,
)
from aiopersist.base.frontier import TIME_MAX, Antichain
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.read.handle import ReadHandle
from aiopersist.read.shared_read import SharedRead
from aiopersist.shard.hold import HistoryPin
from aiopersist.shard.instant import time_of
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
)
from aiopersist.spark.options import LEASE_S, Options, instant, invalid
from aiopersist.spark.plan import GrantedWrite, plan_write
from aiopersist.spark.sessions import arrow_schema
from aiopersist.spark.tasks import TaskRefused, accepted
from aiopersist.state.model import HollowBatch, State

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SNAPSHOT, LATEST = -1, -2
Offset = dict[str, Any]


# --- the source ------------------------------------------------------------------------------------


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source. Spark runs it in its own process, as long as the query."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._location = options.location
        self._schema = schema
        self._start = _start_of(options)
        self._target: int | None = None
        """The end of a query with the trigger `availableNow`."""
        self._reads: list[tuple[int, SharedRead]] = []
        """The ends of batches that Spark has not committed, and the reads that keep their blobs."""
        self._hold: Hold | None = None

    def initialOffset(self) -> Offset:  # noqa: N802  # Spark's name
        shard = self._state().shard
        return {"time": bridge().run(_time, self._client(), shard, self._start), "shard": shard}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.integer("maxrowspertrigger", least=1)
        size = self._options.integer("maxbytespertrigger", least=1)
        if rows is not None and size is not None:
            raise invalid("use max_rows_per_trigger or max_bytes_per_trigger, not both")
        if rows is not None:
            return ReadMaxRows(rows)
        return ReadAllAvailable() if size is None else ReadMaxBytes(size)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = end_of(self._state())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        state = self._state()
        check_same(start, state)
        end = end_of(state) if self._target is None else self._target
        first = start["time"]
        if first < 0 and end <= _time_of(state.since):  # there is no readable time yet
            return start
        if first >= 0:
            end = max(end, first)
            if isinstance(limit, ReadMaxRows):
                end = cut(state, first, end, limit.max_rows)
            elif isinstance(limit, ReadMaxBytes):
                end = cut(state, first, end, limit.max_bytes, by_bytes=True)
        return {"time": end, "shard": state.shard}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = start["time"], end["time"]
        if first in (last, LATEST):
            return []
        pieces, columns, where = bridge().run(self._planned, self._client(), first, end)
        at = last - 1 if first == SNAPSHOT else None
        return [PiecePartition(self._location, piece, columns, where, at) for piece in pieces]

    async def _planned(self, client: Client, first: int, end: Offset) -> tuple[list[bytes], Columns, Any]:
        check_same(end, await self._held_state(client))  # a restart plans a batch before it asks for offsets
        read = await _leased(client, self._options.shard, first, end["time"])
        self._reads.append((end["time"], read))
        columns, where = columns_of(self._options, read.schema), condition_of(self._options, read.schema)
        check_schema(columns, self._schema)
        return await read.pieces(self._options.tasks, where), columns, where

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition)

    def commit(self, end: Offset) -> None:
        """Release everything before `end`. Spark calls this one batch late."""
        bridge().run(self._let_go, self._client(), end["time"])

    async def _let_go(self, client: Client, end: int) -> None:
        done = [read for last, read in self._reads if last <= end]
        self._reads = [(last, read) for last, read in self._reads if last > end]
        for read in done:
            await read.aclose()
        if end > 0:
            await (await self._opened_hold(client)).move(end - 1)

    def stop(self) -> None:
        """Spark rarely calls this; otherwise leases end the holds."""
        bridge().run(self._stop)

    async def _stop(self) -> None:
        for _, read in self._reads:
            await read.aclose()
        self._reads = []
        if self._hold is not None:
            await self._hold.reader.aclose()  # a named hold stays until its lease ends

    def _client(self) -> Client:
        return bridge().client(self._location)

    def _state(self) -> State:
        return bridge().run(self._held_state, self._client())

    async def _held_state(self, client: Client) -> State:
        """The shard's state. The hold is opened first, since plans rely on the history that it keeps."""
        await self._opened_hold(client)
        return await _state(client, self._options.shard)

    async def _opened_hold(self, client: Client) -> Hold:
        if self._hold is None:
            name, lease_s = self._options.text("holdname"), self._options.seconds("leases", LEASE_S)
            self._hold = await Hold.open(client, self._options.shard, name, lease_s)
        return self._hold


class Hold:
    """The hold that keeps history for the query. A named hold lets since move with it. A hold without a name
    is like that of a listen: it moves nothing, and ends with the process."""

    def __init__(self, reader: ReadHandle[Any, Any], pin: HistoryPin | None) -> None:
        self.reader = reader
        self._pin = pin

    @classmethod
    async def open(cls, client: Client, shard: str, name: str | None, lease_s: float) -> Hold:
        """Hold the shard's since; an existing named hold keeps its frontier."""
        if name is not None:
            return cls(await client.reader(shard, hold_name=name, lease_s=lease_s), None)
        reader = await client.reader(shard)
        while True:  # since may move before the hold is set
            since = (await _state(client, shard)).since
            try:
                return cls(reader, await reader._shard.hold.need(since))
            except SinceViolation:
                continue

    async def move(self, time: int) -> None:
        """Release history before `time`."""
        if self._pin is None:
            await self.reader.downgrade_since(time)
        else:
            self.reader._shard.hold.check(self._pin.reader)
            self.reader._shard.hold.move(self._pin, Antichain(time))


async def _leased(client: Client, shard: str, first: int, last: int) -> SharedRead:
    try:
        if first == SNAPSHOT:
            return await client.workers.shared_read(shard, last - 1, wait=False)
        return await client.workers.shared_read(shard, start=first, end=last, wait=False)
    except SinceViolation as error:
        error.add_note(
            f"The stream is at time {max(first, 0)}, and history there was compacted: the query skipped "
            "nothing, but cannot continue. Start a new query with a new checkpoint: without startingTime its "
            "first batch is the snapshot; otherwise choose a time after since. To restart later, a query "
            "needs the option hold_name, and a lease_s longer than its downtime."
        )
        raise


async def _state(client: Client, shard: str) -> State:
    return (await client._shards.existing(shard)).state


async def _time(client: Client, shard: str, start: int | datetime) -> int:
    """The time of `start`, which may be an instant."""
    return time_of(start, await client._shards.existing(shard))


def _start_of(options: Options) -> int | datetime:
    text = options.text("startingtime") or "snapshot"
    named = {"snapshot": SNAPSHOT, "latest": LATEST, "earliest": 0}
    if text.lower() in named:
        return named[text.lower()]
    if (at := instant(text)) is not None:
        return at
    if not text.isdecimal():
        raise invalid(f"option startingTime={text!r} is neither a time nor one of {', '.join(named)}")
    return int(text)


def check_same(offset: Offset, state: State) -> None:
    """`ShardFinalized` if the offset belongs to a dropped shard."""
    if offset.get("shard") != state.shard:
        text = (
            f"the stream reads a shard that was dropped ({offset.get('shard')}); another shard has its name "
            "now. Start a new query with a new checkpoint."
        )
        raise ShardFinalized(text, shard_id=state.shard)


def end_of(state: State) -> int:
    """The time before which everything is complete; of a finished shard the greatest time."""
    return _time_of(state.upper)


def cut(state: State, start: int, end: int, budget: int, *, by_bytes: bool = False) -> int:
    """The end, at most `end`, of a batch from `start` with about `budget` updates (or encoded bytes). It lies
    between two appends, or within a larger append between two times, as if its updates were spread evenly.
    The batch has at least one time."""
    total = 0.0
    for batch in state.batches.values():
        first, last = _time_of(batch.lower), _last_of(batch)
        low, high = max(first, start), min(last, end)
        size = sum(part.size for part in batch.parts) if by_bytes else batch.len
        if low >= high or not size:
            continue
        each = size / (last - first)
        if total + each * (high - low) > budget:
            return low if low > start else min(max(low + int(budget / each), start + 1), end)
        total += each * (high - low)
    return end


def _last_of(batch: HollowBatch) -> int:
    """The end of the batch's times; for a batch without an upper by its statistics."""
    if batch.upper.elements:
        return _time_of(batch.upper)
    stats = [(part.stats or {}).get("time") for part in batch.parts]
    greatest = [entry["max"] for entry in stats if entry is not None and entry["max"] is not None]
    return max(greatest) + 1 if greatest and len(greatest) == len(stats) else TIME_MAX


def _time_of(frontier: Antichain) -> int:
    time = frontier.elements[0] if frontier.elements else TIME_MAX
    if isinstance(time, tuple):
        text = "a stream reads int times, and this shard has product times"
        raise InvalidUsage(UsageKind.INVALID_TIME, text)
    return time


# --- the sink --------------------------------------------------------------------------------------


class StreamWriter(DataSourceStreamArrowWriter):
    """The sink. Spark creates it twice per batch: to plan (then it is pickled for tasks), and to commit."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        self._location = options.location
        self._spec = options.write_spec(overwrite=overwrite, streaming=True)
        self._app = options.text("txnappid")
        self._tasks = options.tasks
        self._lease_s = options.seconds("leases", Settings().writer_lease_s)
        self._frame = arrow_schema(schema)
        self._write: GrantedWrite | TaskRefused | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Plan the batch: Spark has no hook for this, but pickles the writer for the tasks. Tasks pass on a
        refusal, and the commit raises it."""
        if self._write is None:
            client = bridge().client(self._location)
            try:
                self._write = grant_write(client, plan_write, self._frame, self._spec, self._lease_s)
            except Error as error:
                self._write = TaskRefused(error)
        return self.__dict__

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        from pyspark import TaskContext

        write = self._write
        if not isinstance(write, GrantedWrite):
            assert write is not None  # it was pickled
            return StagedMessage(write)
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
        staged = tasks.outcome_of(tasks.stage, self._location, write.grant, write.plan.layout, iterator)
        return StagedMessage(staged, query, write)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        staged = [message for message in messages if isinstance(message, StagedMessage)]
        results, writes = [message.result for message in staged], _writes(messages)
        if not writes:
            accepted(results)
            return
        app = self._app or next((message.query for message in staged if message.query), None)
        if app is None:
            raise invalid("Spark gives no id of the query: set option txn_app_id")
        plan = next(iter(writes.values())).plan
        plan = plan._replace(spec=plan.spec._replace(txn=(app, batchId)))
        try:
            commit_staged(self._location, plan, writes.keys(), results, self._tasks)
        except BatchExpired as error:
            error.add_note(
                "The time from planning to the first task, or from the last task to the commit, exceeded the "
                "lease of staged data: give the stream a longer lease with option lease_s."
            )
            raise

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        abort_writes(self._location, _writes(messages).values())


def _writes(messages: Sequence[WriterCommitMessage | None]) -> dict[bytes, GrantedWrite]:
    """The writes of the tasks, by their grants."""
    writes = [message.write for message in messages if isinstance(message, StagedMessage)]
    return {write.grant: write for write in writes if write is not None}
