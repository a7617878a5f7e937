"""Structured streaming over shards: a source whose offsets are frontiers, and a sink that writes each batch
once.

*Source.* An offset is `{"time": t, "shard": id}`: everything before `t` was delivered, of that shard; one
that was made anew under the same name is another. Batches end between times, whatever limits say. Two times
stand for where a query may begin: its first batch, from `SNAPSHOT` to `t`, are the contents as of `t - 1`;
from `LATEST` to `t` there is nothing in it. So a batch is a function of its two offsets, which Spark logs
before it runs it: a restart gives the same.

A named hold keeps what a restart needs: it stands one before the end of the last batch that Spark committed.
A newer run takes it over, and fences the older. When since has passed the start of a batch, it fails and
says so.

*Sink.* A batch is one append with `txn = (query id, batch id)`: repeated, it writes nothing. Its time is the
shard's upper, never the clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

from aiopersist.client import Client
from aiopersist.errors import BatchExpired, Error, InvalidUsage, ShardFinalized, SinceViolation, UsageKind
from aiopersist.frontier import TIME_MAX, Antichain
from aiopersist.read.handle import ReadHandle
from aiopersist.read.shared_read import SharedRead
from aiopersist.settings import Settings
from aiopersist.shard.hold import Need
from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.options import LEASE_S, Options, invalid
from aiopersist.spark.partitions import (
    PiecePartition,
    StagedMessage,
    check_schema,
    columns_of,
    read_partition,
    run_here,
)
from aiopersist.spark.sessions import arrow_schema
from aiopersist.spark.tasks import TaskRefused
from aiopersist.spark.write import Plan, WriteJob, begin, plan, release, withdraw
from aiopersist.state.model import HollowBatch, State

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

SNAPSHOT, LATEST = -1, -2
Offset = dict[str, Any]


# --- the source ------------------------------------------------------------------------------------


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in a process of its own, as long as the query."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._place = options.place
        self._schema = schema
        self._start = _start_of(options)
        self._target: int | None = None
        """Where a query that takes what is available now ends."""
        self._reads: list[tuple[int, SharedRead]] = []
        """Of batches that Spark has not committed: their ends, and what keeps their blobs."""
        self._hold: Hold | None = None

    def initialOffset(self) -> Offset:  # noqa: N802  # Spark's name
        return {"time": self._start, "shard": self._state().shard}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._options.integer("maxrowspertrigger", least=1)
        size = self._options.integer("maxbytespertrigger", least=1)
        if rows is not None and size is not None:
            raise invalid("give max_rows_per_trigger or max_bytes_per_trigger, not both")
        if rows is not None:
            return ReadMaxRows(rows)
        return ReadAllAvailable() if size is None else ReadMaxBytes(size)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = end_of(self._state())

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        state = self._state()
        check_same(start, state)
        end = end_of(state) if self._target is None else self._target
        begin_ = start["time"]
        if begin_ < 0 and end <= _time_of(
            state.since
        ):  # nothing is complete yet, or what is after it readable
            return start
        if begin_ >= 0:
            end = max(end, begin_)
            if isinstance(limit, ReadMaxRows):
                end = cut(state, begin_, end, limit.max_rows)
            elif isinstance(limit, ReadMaxBytes):
                end = cut(state, begin_, end, limit.max_bytes, by_bytes=True)
        return {"time": end, "shard": state.shard}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = start["time"], end["time"]
        if first in (last, LATEST):
            return []
        found = bridge()
        check_same(end, self._state())  # after a restart the first batch is planned before anything else
        read = found.run(_leased, self._client(), self._options.shard, first, last)
        self._reads.append((last, read))
        columns = columns_of(self._options, read.schema)
        check_schema(columns, self._schema)
        pieces = found.run(read.pieces, self._options.tasks)
        at = last - 1 if first == SNAPSHOT else None
        return [PiecePartition(self._place, piece, columns, at=at) for piece in pieces]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition)

    def commit(self, end: Offset) -> None:
        """All before `end` is done. Comes one batch late."""
        done = [read for last, read in self._reads if last <= end["time"]]
        self._reads = [(last, read) for last, read in self._reads if last > end["time"]]
        for read in done:
            bridge().run(read.aclose)
        if end["time"] > 0:
            bridge().run(self._opened_hold().move, end["time"] - 1)

    def stop(self) -> None:
        """Rarely called: leases end what this does not."""
        for _, read in self._reads:
            bridge().run(read.aclose)
        self._reads = []
        if self._hold is not None:
            bridge().run(self._hold.reader.aclose)  # a named one is left to its lease

    def _client(self) -> Client:
        return bridge().client(self._place)

    def _state(self) -> State:
        self._opened_hold()  # before anything is planned on what it keeps
        return bridge().run(_state, self._client(), self._options.shard)

    def _opened_hold(self) -> Hold:
        if self._hold is None:
            name, lease_s = self._options.text("holdname"), self._options.seconds("leases", LEASE_S)
            self._hold = bridge().run(Hold.open, self._client(), self._options.shard, name, lease_s)
        return self._hold


class Hold:
    """What keeps history for the query: a named hold, which moves since as it moves; or, without a name, what
    any listen has, which moves nothing and ends with the process."""

    def __init__(self, reader: ReadHandle[Any, Any], need: Need | None) -> None:
        self.reader = reader
        self._need = need

    @classmethod
    async def open(cls, client: Client, shard: str, name: str | None, lease_s: float) -> Hold:
        """At the shard's since; a named one that is there keeps its frontier."""
        if name is not None:
            return cls(await client.reader(shard, hold_name=name, lease_s=lease_s), None)
        reader = await client.reader(shard)
        while True:  # since may move until it is held
            since = (await _state(client, shard)).since
            try:
                return cls(reader, await reader._shard.hold.need(since))
            except SinceViolation:
                continue

    async def move(self, time: int) -> None:
        """Let go of what is before `time`."""
        if self._need is None:
            await self.reader.downgrade_since(time)
        else:
            self.reader._shard.hold.check(self._need.reader)
            self.reader._shard.hold.move(self._need, Antichain(time))


async def _leased(client: Client, shard: str, first: int, last: int) -> SharedRead:
    try:
        if first == SNAPSHOT:
            return await client.shared_read(shard, last - 1, wait=False)
        return await client.shared_read(shard, start=first, end=last, wait=False)
    except SinceViolation as error:
        error.add_note(
            f"The stream is at time {max(first, 0)}, and history there was compacted: nothing was skipped, "
            "and nothing can be resumed. Begin a new query with a new checkpoint: without startingTime its "
            "first batch is the snapshot; with it, changes are held at times after since. To be restarted "
            "later, a query needs the option hold_name, and a lease_s that is longer than it may be away."
        )
        raise


async def _state(client: Client, shard: str) -> State:
    return (await client._shards.existing(shard)).state


def _start_of(options: Options) -> int:
    asked = (options.text("startingtime") or "snapshot").lower()
    named = {"snapshot": SNAPSHOT, "latest": LATEST, "earliest": 0}
    if asked in named:
        return named[asked]
    if not asked.isdecimal():
        raise invalid(f"option startingTime={asked!r} is no time, nor one of {', '.join(named)}")
    return int(asked)


def check_same(offset: Offset, state: State) -> None:
    """`ShardFinalized` if that is of a shard that is no more."""
    if offset.get("shard") != state.shard:
        text = (
            f"the stream is of a shard that was dropped ({offset.get('shard')}): what has its name now is "
            "another. Begin a new query with a new checkpoint."
        )
        raise ShardFinalized(text, shard_id=state.shard)


def end_of(state: State) -> int:
    """Up to where everything is complete; of a finished shard the greatest time there is."""
    return _time_of(state.upper)


def cut(state: State, start: int, end: int, budget: int, *, by_bytes: bool = False) -> int:
    """How far a batch from `start` goes that has about `budget` updates (or encoded bytes) and ends by `end`:
    between two appends; within one that is larger between two times, as if they were spread evenly. At least
    one time."""
    taken = 0.0
    for batch in state.batches.values():
        first, last = _time_of(batch.lower), _last_of(batch)
        low, high = max(first, start), min(last, end)
        size = sum(part.size for part in batch.parts) if by_bytes else batch.len
        if low >= high or not size:
            continue
        each = size / (last - first)
        if taken + each * (high - low) > budget:
            return low if low > start else min(max(low + int(budget / each), start + 1), end)
        taken += each * (high - low)
    return end


def _last_of(batch: HollowBatch) -> int:
    """The end of its times; where there is none, what statistics tell of them."""
    if batch.upper.elements:
        return _time_of(batch.upper)
    stats = [(part.stats or {}).get("time") for part in batch.parts]
    greatest = [entry["max"] for entry in stats if entry is not None and entry["max"] is not None]
    return max(greatest) + 1 if greatest and len(greatest) == len(stats) else TIME_MAX


def _time_of(frontier: Antichain) -> int:
    time = frontier.elements[0] if frontier.elements else TIME_MAX
    if isinstance(time, tuple):
        text = "streams are of int times; this shard has product times"
        raise InvalidUsage(UsageKind.INVALID_TIME, text)
    return time


# --- the sink --------------------------------------------------------------------------------------


class StreamWriter(DataSourceStreamArrowWriter):
    """Made anew for each batch: by who plans it, which pickles it for the tasks, and by the committer."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        self._place = options.place
        self._spec = options.write_spec(overwrite=overwrite, streaming=True)
        self._app = options.text("txnappid")
        self._tasks = options.tasks
        self._lease_s = options.seconds("leases", Settings().writer_lease_s)
        self._frame = arrow_schema(schema)
        self._plan: Plan | TaskRefused | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For tasks: so this is where a batch is planned, by no hook of its own. What is refused is told by
        the tasks, and raised by the commit."""
        if self._plan is None:
            client = bridge().client(self._place)
            try:
                begun = bridge().run(begin, client, self._frame, self._spec)
                self._plan = bridge().run(plan, client, begun, self._lease_s)
            except Error as error:
                self._plan = TaskRefused(error)
        return self.__dict__

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        from pyspark import TaskContext

        planned = self._plan
        if not isinstance(planned, Plan):
            assert planned is not None  # it was pickled
            return StagedMessage(planned)
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty("sql.streaming.queryId")
        layout = planned.begun.layout
        staged = tasks.refusing(tasks.stage, self._place, planned.grant, layout, iterator)
        return StagedMessage(staged, query, planned)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        told = [message for message in messages if isinstance(message, StagedMessage)]
        results = [message.result for message in told]
        plans = [message.plan for message in told if message.plan is not None]
        if not plans:
            tasks.granted(results)
            return
        app = self._app or next((message.query for message in told if message.query), None)
        if app is None:
            raise invalid("the query has no id here: give option txn_app_id")
        found, begun = bridge(), plans[0].begun
        begun = begun._replace(spec=begun.spec._replace(txn=(app, batchId)))
        job = WriteJob(found, found.client(self._place), self._place, begun, run_here, self._tasks)
        try:
            job.commit(results)
        except BatchExpired as error:
            error.add_note(
                "From its planning to its first task, or from its last one to the commit, the batch took "
                "longer than the lease of what it stages: give the stream a longer one by option lease_s."
            )
            raise
        for grant in {planned.grant for planned in plans}:
            found.run(release, found.client(self._place), grant)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Also called after `commit` raised or died, when its append may have happened, or happen yet: so
        nothing is deleted. Without its writer what was staged and not appended is the sweep's."""
        told = [message.plan for message in messages if isinstance(message, StagedMessage)]
        for planned in {planned.grant: planned for planned in told if planned is not None}.values():
            bridge().run(withdraw, bridge().client(self._place), planned)
