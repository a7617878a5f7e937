"""How a DataFrame becomes one append: the same for the engine, for `format("aiopersist")`, and for streams.

1. *Plan*, on the driver: find the shard, or make it; check the columns against it. A job that fails removes
   the shard that it made, if nothing was ever appended (`remove_new_shard`).
2. Tasks *stage* batches (`tasks.stage`), all under one writer.
3. For an upsert or an overwrite, tasks *retract* the rows that the new ones replace, as of the shard's upper
   (`tasks.retract`). A deletion is an upsert of keys alone: they are staged so that tasks find them, and only
   the retractions are appended. A deletion by a condition stages nothing.
4. *Commit*: one compare-and-append of everything. Without a column of times all batches are moved to the
   upper as it is then, on a wall clock to now; after a mismatch to the newer upper, with new retractions.

With a column of times the upper must still be that of the plan: a mismatch fails the write.

Everything here is a coroutine of the bridge's loop; only `Run` blocks, on the thread that waits for the job.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, TypeAlias

from aiopersist.client import Client
from aiopersist.data.lazy import pa
from aiopersist.data.part.select import check_where
from aiopersist.data.types.schema import Schema
from aiopersist.errors import Error, InvalidUsage, SinceViolation, UnknownShard, UpperMismatch, UsageKind
from aiopersist.frontier import Antichain, int_time
from aiopersist.gc.collect import delete_data
from aiopersist.read.shared_read import SharedRead
from aiopersist.resource import Opening
from aiopersist.shard.catalog import ShardId, free
from aiopersist.shard.commit import commit
from aiopersist.spark import tasks
from aiopersist.spark.bridge import closing, on_caller, to_its_end
from aiopersist.spark.columns import invalid, sources
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.rows import BOTH, Layout, Special, schema_of
from aiopersist.spark.tasks import Retraction, StagedTask, TaskRefused, accepted
from aiopersist.state.lifecycle import FinalizeUnused
from aiopersist.state.writing import last_complete
from aiopersist.table.courtesy import asking
from aiopersist.write.batch import Batch, discard_all, rebound
from aiopersist.write.checks import Txn, check_txn
from aiopersist.write.handle import WriteHandle, session_of, time_of_write
from aiopersist.write.open import open_writer
from aiopersist.write.remote import register_writer
from aiopersist.write.transmit import decode

log = logging.getLogger("aiopersist")

APPEND, OVERWRITE, UPSERT, DELETE = MODES = "append", "overwrite", "upsert", "delete"
TRIES = 3  # of committing beside the users of a table, who are faster

Writer: TypeAlias = WriteHandle[Any, Any]
Results: TypeAlias = Sequence[StagedTask | TaskRefused]
Run = Callable[[Callable[..., StagedTask], Sequence[tuple[Any, ...]]], Results]
"""Runs a task for each tuple of arguments, and blocks until all are done."""


class WriteSpec(NamedTuple):
    """The write that the user asks for."""

    shard: str
    mode: str = APPEND
    keys: tuple[str, ...] = ()
    time: str | int | None = None
    """A column of times, or the one time of all updates."""
    diff: str | None = None
    """A column of diffs."""
    txn: Txn | None = None
    schema: Schema[Any, Any, Any] | pa.Schema | None = None
    """The schema of a new shard, or its columns; a shard that is there must have the same."""
    where: Any = None
    """The condition of a deletion without rows."""

    def check(self) -> None:
        """`InvalidUsage` for arguments that exclude each other."""
        check_txn(self.txn)
        if self.mode not in MODES:
            text = f"{self.mode!r} is none of {', '.join(MODES)}"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        if self.mode != APPEND and (self.time is not None or self.diff is not None):
            text = f"{self.mode} says itself which rows are retracted, and when: give neither time nor diff"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        if isinstance(self.time, int) and not 0 <= self.time < 2**63 - 1:
            text = f"time {self.time} is not in [0, 2**63 - 1)"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=self.time)


# --- the plan ----------------------------------------------------------------------------------------


class WritePlan(NamedTuple):
    """The plan, as tasks and the commit need it. Picklable."""

    spec: WriteSpec
    shard: ShardId
    """The shard that has the name now: another may take the name while the job runs."""
    schema: Schema[Any, Any, Any]
    layout: Layout
    upper: Antichain
    """The shard's upper at the plan."""
    made: bool = False
    """Whether this job made the shard."""
    table: bool = False
    """Whether it is a table, so that no key may come twice."""


async def plan_write(client: Client, frame: pa.Schema, spec: WriteSpec) -> WritePlan:
    """Do all checks that are possible before anything runs. `INVALID_COLUMN` for columns that do not fit the
    shard. Makes a new shard, if `keys` say which columns are its key, or `schema` says all; but a deletion
    raises `UnknownShard`. `CodecMismatch` for a shard that is there with another schema."""
    spec.check()
    special = Special(spec.time if isinstance(spec.time, str) else None, spec.diff)
    asked = asked_schema(spec, special)
    try:
        found = await client._shards.existing(spec.shard)
    except UnknownShard:
        if spec.mode == DELETE:
            raise
        schema, layout = _fitting(frame, spec, special, asked or _schema_of_frame(frame, spec, special))
        async with client.writer(spec.shard, schema) as writer:  # or finds that another made it otherwise
            return WritePlan(spec, writer.shard_id, schema, layout, writer.upper, made=True)
    if found.state.table and spec.mode == APPEND:
        by_key = "upsert rows or delete keys (mode=, or the option apply)"
        text = f"{found.label} is a table, with one val per key: {by_key}, or overwrite all"
        raise InvalidUsage(UsageKind.NOT_A_TABLE, text, shard_id=found.id)
    if asked is not None:
        found.schema_id(asked)
    schema, layout = _fitting(frame, spec, special, asked or found.schema(found.state.schema_id))
    return WritePlan(spec, found.id, schema, layout, found.state.upper, table=found.state.table)


async def plan_open_write(client: Client, frame: pa.Schema, spec: WriteSpec) -> WritePlan:
    """`plan_write`; `UpperMismatch` for a finished shard, unless its `txn` was written before."""
    plan = await plan_write(client, frame, spec)
    if not plan.upper.elements and not await _is_done(client, plan):
        raise UpperMismatch(Antichain(0), plan.upper, shard_id=plan.shard)
    return plan


def _fitting(
    frame: pa.Schema, spec: WriteSpec, special: Special, schema: Schema[Any, Any, Any]
) -> tuple[Schema[Any, Any, Any], Layout]:
    """The schema, and how the rows of a frame with these columns become its updates."""
    _check_keys(spec.keys, schema)
    if spec.where is not None:
        check_where(spec.where, schema)
    halves = BOTH if spec.mode != DELETE else BOTH[:1] if spec.where is None else ()
    at = spec.time if isinstance(spec.time, int) else 0
    return schema, Layout(frame, schema, special, at, halves=halves)


def asked_schema(spec: WriteSpec, special: Special) -> Schema[Any, Any, Any] | None:
    """The schema that the user asks for, if any."""
    if spec.schema is None or isinstance(spec.schema, Schema):
        return spec.schema
    if not spec.keys:
        raise invalid("schema= names columns: say by keys= which of them are the key", "keys")
    names = {name.lower() for name in spec.schema.names}
    own = Special(*(None if name is None or name.lower() not in names else name for name in special))
    return schema_of(spec.schema, spec.keys, own)


def _schema_of_frame(frame: pa.Schema, spec: WriteSpec, special: Special) -> Schema[Any, Any, Any]:
    if not spec.keys:
        text = f"there is no shard {spec.shard!r} yet: say by keys= which columns are its key"
        raise invalid(text, "keys")
    return schema_of(frame, spec.keys, special)


def _check_keys(keys: Sequence[str], schema: Schema[Any, Any, Any]) -> None:
    mine = [name for name, source in sources(schema).items() if source.half == "key"]
    if keys and {name.lower() for name in keys} != {name.lower() for name in mine}:
        text = f"keys={list(keys)}: the key of the shard is {mine}: give these, or no keys"
        raise invalid(text, keys[0])


async def _is_done(client: Client, plan: WritePlan) -> bool:
    """Whether its `txn` was written before."""
    if plan.spec.txn is None:
        return False
    app, number = plan.spec.txn
    last = await client.txn_number(plan.shard, app)
    return last is not None and number <= last


async def remove_new_shard(client: Client, plan: WritePlan) -> None:
    """After a failure: remove the shard that this job made, so that no unwritten shard stays.
    The commit itself removes it only if nothing was ever appended, not even by an append whose answer was
    lost, and no other client is registered. Raises no `Error`: the job's own error says more."""
    if not plan.made:
        return
    shard = client._shards.at(plan.shard, plan.spec.shard)
    try:
        with client._shards.calls.call():
            await shard.register.refresh()
            if await commit(shard.register, FinalizeUnused(shard.id)):
                await delete_data(shard)
                await free(shard.stack, plan.spec.shard, shard.id)
    except Error as error:
        log.warning("shard %r, which a failed job made, may stay empty: %s", plan.spec.shard, error)


def writer_of(client: Client, plan: WritePlan) -> Opening[Writer]:
    """A writer of the shard, also of a table: the plan says that its rule is kept."""
    ready = client._ready_to_write
    return open_writer(client._shards, plan.shard, plan.schema, None, ready, tables=plan.table)


# --- a writer for tasks that hooks run ---------------------------------------------------------------


class GrantedWrite(NamedTuple):
    """The plan and the writer of a job of hooks, for any process. Picklable."""

    plan: WritePlan
    grant: bytes
    """The one writer, under which tasks stage."""


async def grant_writer(client: Client, plan: WritePlan, lease_s: float) -> GrantedWrite:
    """Register that writer. A failure leaves no shard that was made for the job."""
    try:
        with client._shards.calls.call():
            grant = await register_writer(client._shards, plan.shard, plan.schema, lease_s, tables=plan.table)
        return GrantedWrite(plan, grant)
    except BaseException:
        await to_its_end(remove_new_shard, client, plan)
        raise


async def release_writer(client: Client, grant: bytes) -> None:
    """End that writer: the sweep deletes the batches that were staged under it and not appended."""
    with suppress(Error):  # then its lease ends it
        await client.release_writer(grant)


async def abandon(client: Client, write: GrantedWrite) -> None:
    """After a failure: end that writer, and remove the shard that was made for the job."""
    await release_writer(client, write.grant)
    await remove_new_shard(client, write.plan)


# --- the commit --------------------------------------------------------------------------------------


class WriteJob:
    """The driver's part, once tasks have staged."""

    def __init__(
        self, client: Client, location: SparkLocation, plan: WritePlan, run: Run, tasks_: int
    ) -> None:
        """About `tasks_` tasks stage retractions."""
        self._client = client
        self._location = location
        self._plan = plan
        self._spec = plan.spec
        self._run = run
        self._tasks = tasks_

    async def commit(self, results: Results) -> int:
        """Append everything, once; returns the time at which it is complete. If this raises, nothing was
        appended, and the staged batches are deleted; only after `Indeterminate` the outcome is unknown."""
        plan = self._plan
        async with closing(writer_of(self._client, plan)) as writer, AsyncExitStack() as ends:
            batches = await _restored(writer, results)
            ends.push_async_callback(to_its_end, discard_all, batches)
            staged = accepted(results)
            if await _is_done(self._client, plan):  # whatever the upper is now
                return last_complete(await writer.fetch_recent_upper())
            if not plan.upper.elements:
                raise UpperMismatch(Antichain(0), Antichain(), shard_id=plan.shard)
            if self._spec.mode != APPEND:
                return await self._replace(writer, batches, staged)
            if self._spec.time is None:
                return await self._append(writer, batches)
            return await self._append_timed(writer, batches, staged)

    async def _replace(self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]) -> int:
        """Append with retractions of the contents, at the upper as of which they were made; again if another
        writer came first. Those of a table stand back after some vain tries."""
        tries = 0
        async with asking(session_of(writer)) as ask:
            while True:
                tries += 1
                if tries > TRIES and self._plan.table:
                    await ask()
                try:
                    return await self._try_to_replace(writer, batches, staged)
                except UpperMismatch as error:
                    if error.current == Antichain():
                        raise

    async def _try_to_replace(
        self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]
    ) -> int:
        async with AsyncExitStack() as ends:
            upper, read = await self._there(writer)
            done: Results = ()
            if read is not None:
                ends.push_async_callback(to_its_end, read.aclose)
                # the schema as it is now: it may have got a field since the plan
                opening = writer_of(self._client, self._plan._replace(schema=read.schema))
                grant = (await ends.enter_async_context(closing(opening))).to_transmittable()
                jobs = [(self._location, grant, piece) for piece in await self._pieces(read, staged)]
                done = await on_caller(self._run, tasks.retract, jobs)
            retractions = await _restored(writer, done)
            ends.push_async_callback(to_its_end, discard_all, retractions)
            accepted(done)
            new = [] if self._spec.mode == DELETE else batches
            return await _append_at(writer, [*new, *retractions], upper, self._spec.txn)

    async def _there(self, writer: Writer) -> tuple[int, SharedRead | None]:
        """The upper, and a read of the rows to retract; `None` for none. An upsert, and a write of a table,
        always reads: its tasks also look for keys that the new rows have twice."""
        while True:
            upper = await _upper(writer)
            if not upper and self._spec.mode == OVERWRITE and not self._plan.table:
                return upper, None
            try:
                if not upper:
                    return upper, await self._client.shared_read(self._plan.shard, start=0, end=0)
                return upper, await self._client.shared_read(self._plan.shard, upper - 1)
            except SinceViolation as error:
                await _pass(writer, upper, error.since)

    async def _pieces(self, read: SharedRead, staged: Sequence[StagedTask]) -> list[Retraction]:
        """For each task: the rows that go."""
        mode, where = self._spec.mode, self._spec.where
        if where is not None or (mode == OVERWRITE and not self._plan.table):
            return [Retraction(piece, where=where) for piece in await read.pieces(self._tasks)]
        hollow = [decode(one.batch, self._plan.shard).batch for one in staged]
        return [
            Retraction(*pieces, unique=mode != DELETE, every=mode == OVERWRITE)
            for pieces in await read.pieces_beside(self._tasks, hollow)
        ]

    async def _append(self, writer: Writer, batches: list[Batch]) -> int:
        while True:
            try:
                return await _append_at(writer, batches, await _upper(writer), self._spec.txn)
            except UpperMismatch as error:
                if error.current == Antichain():
                    raise

    async def _append_timed(self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]) -> int:
        """Append at the times that the rows have, if the upper is still that of the plan."""
        lower = self._plan.upper
        first = min((one.first for one in staged if one.rows), default=None)
        if first is not None and not lower.less_equal(first):
            text = f"time {first} is not at or beyond the upper {lower}"
            raise InvalidUsage(UsageKind.UPDATE_NOT_BEYOND_LOWER, text, time=first, lower=lower)
        upper = lower.join(Antichain(max((one.last + 1 for one in staged if one.rows), default=0)))
        for batch in batches:
            rebound(batch, lower, upper)
        await writer.compare_and_append_batch(batches, lower, upper, self._spec.txn)
        return last_complete(writer.upper)


async def _restored(writer: Writer, results: Results) -> list[Batch]:
    """The batches of the tasks that staged one."""
    batches: list[Batch] = []
    try:
        for one in results:
            if isinstance(one, StagedTask):
                batch = await writer.batch_from_transmittable(one.batch)
                batches.append(batch)
    except BaseException:
        await discard_all(batches)
        raise
    return batches


async def _upper(writer: Writer) -> int:
    upper = int_time(await writer.fetch_recent_upper())
    if upper is None:
        raise UpperMismatch(Antichain(0), Antichain(), shard_id=writer.shard_id)
    return upper


async def _pass(writer: Writer, upper: int, since: Any) -> None:
    """Move the upper past since, with nothing appended: then the contents can be read. A shard that keeps its
    last hour of history, and was not written for longer, has none left before its upper."""
    if not since.elements:  # the shard is finished, as the caller finds out
        return
    with suppress(UpperMismatch):
        await writer.compare_and_append([], upper, since.time + 1)


async def _append_at(writer: Writer, batches: Sequence[Batch], upper: int, txn: Txn | None) -> int:
    """Append batches of one time if the upper is still `upper`: at that time; on a wall clock, now."""
    moved = (last_complete(batch.upper) for batch in batches)  # by a try before, perhaps: times never go back
    time = max(await time_of_write(writer, upper), *moved, upper)
    for batch in batches:
        batch.rewrite_ts(time, time + 1)
    await writer.compare_and_append_batch(batches, upper, time + 1, txn)
    return time if txn is None else last_complete(writer.upper)  # a repeat is complete at some time before
