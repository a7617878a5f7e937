"""How a DataFrame becomes one append: the same for the engine, for `format("aiopersist")`, and for streams.

1. *Begin*, on the driver: find the shard, or make it; check the columns against it. A job that fails removes
   the shard that it made, if nothing was ever appended (`give_up`).
2. Tasks *stage* batches (`tasks.stage`), all under one writer.
3. What is replaced is looked up at the shard's upper and *retracted* by tasks, too (`tasks.retract`).
4. *Commit*: one compare-and-append of everything. Without a column of times all batches are moved to the
   upper as it is then; after a mismatch to the newer one, with new retractions.

With a column of times the shard's upper must be what it was at the beginning: a mismatch fails the write.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeAlias

from aiopersist.client import Client
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.errors import Error, InvalidUsage, SinceViolation, UnknownShard, UpperMismatch, UsageKind
from aiopersist.frontier import Antichain
from aiopersist.gc.collect import delete_data
from aiopersist.read.shared_read import SharedRead
from aiopersist.shard.catalog import ShardId, free
from aiopersist.shard.commit import commit
from aiopersist.spark import tasks
from aiopersist.spark.bridge import Bridge
from aiopersist.spark.columns import invalid, sources
from aiopersist.spark.place import SparkLocation
from aiopersist.spark.rows import Layout, Special, schema_of
from aiopersist.spark.tasks import StagedTask, TaskRefused, granted
from aiopersist.state.lifecycle import FinalizeUnused
from aiopersist.write.batch import Batch, discard_all, rebound
from aiopersist.write.checks import Txn, check_txn
from aiopersist.write.combine import last_complete
from aiopersist.write.handle import WriteHandle
from aiopersist.write.transmit import decode

log = logging.getLogger("aiopersist")

APPEND, OVERWRITE, UPSERT = "append", "overwrite", "upsert"

Writer: TypeAlias = WriteHandle[Any, Any]
Results: TypeAlias = Sequence[StagedTask | TaskRefused]
Run = Callable[[Callable[..., StagedTask], Sequence[tuple[Any, ...]]], Results]
"""Runs a task for each tuple of arguments, somewhere."""


class WriteSpec(NamedTuple):
    """What is asked for."""

    shard: str
    mode: str = APPEND
    keys: tuple[str, ...] = ()
    time: str | int | None = None
    """A column, or the one time of all updates."""
    diff: str | None = None
    txn: Txn | None = None
    schema: Schema[Any, Any, Any] | pa.Schema | None = None
    """Of a new shard: its own, or its columns; one that is there must be the same."""

    def check(self) -> None:
        """`InvalidUsage` for what cannot be together."""
        check_txn(self.txn)
        if self.mode not in (APPEND, OVERWRITE, UPSERT):
            text = f"{self.mode!r} is none of {APPEND}, {OVERWRITE}, {UPSERT}"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        if self.mode != APPEND and (self.time is not None or self.diff is not None):
            text = f"{self.mode} says itself which rows are retracted, and when: give neither time nor diff"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        if isinstance(self.time, int) and not 0 <= self.time < 2**63 - 1:
            text = f"time {self.time} is not in [0, 2**63 - 1)"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=self.time)


class Begun(NamedTuple):
    """What tasks and the commit must know. Picklable."""

    spec: WriteSpec
    shard: ShardId
    """The one that has the name now: another may take it while the job runs."""
    schema: Schema[Any, Any, Any]
    layout: Layout
    upper: Antichain
    """The shard's, at the beginning."""
    made: bool = False
    """For this job."""


async def begin(client: Client, frame: pa.Schema, spec: WriteSpec) -> Begun:
    """Check what can be checked before anything runs. `INVALID_COLUMN` for columns that do not fit the shard;
    a new one is made, if `keys` say which of them are its key, or `schema` says all. `CodecMismatch` for one
    that is there with another schema."""
    spec.check()
    special = Special(spec.time if isinstance(spec.time, str) else None, spec.diff)
    asked = asked_schema(spec, special)
    try:
        found = await client._shards.existing(spec.shard)
    except UnknownShard:
        schema, layout = _fitting(frame, spec, special, asked or _schema_of_frame(frame, spec, special))
        async with client.writer(spec.shard, schema) as writer:  # or finds that another made it otherwise
            return Begun(spec, writer.shard_id, schema, layout, writer.upper, made=True)
    if asked is not None:
        found.schema_id(asked)
    schema, layout = _fitting(frame, spec, special, asked or found.schema(found.state.schema_id))
    return Begun(spec, found.id, schema, layout, found.state.upper)


def _fitting(
    frame: pa.Schema, spec: WriteSpec, special: Special, schema: Schema[Any, Any, Any]
) -> tuple[Schema[Any, Any, Any], Layout]:
    """The schema, and how a frame with these columns is written by it."""
    _check_keys(spec.keys, schema)
    return schema, Layout(frame, schema, special, spec.time if isinstance(spec.time, int) else 0)


def asked_schema(spec: WriteSpec, special: Special) -> Schema[Any, Any, Any] | None:
    """The schema that is asked for, if one is."""
    if spec.schema is None or isinstance(spec.schema, Schema):
        return spec.schema
    if not spec.keys:
        raise invalid("schema= is one of columns: say by keys= which of them are the key", "keys")
    names = {name.lower() for name in spec.schema.names}
    own = Special(*(None if name is None or name.lower() not in names else name for name in special))
    return schema_of(spec.schema, spec.keys, own)


def _schema_of_frame(frame: pa.Schema, spec: WriteSpec, special: Special) -> Schema[Any, Any, Any]:
    if not spec.keys:
        text = f"there is no shard {spec.shard!r} yet: say by keys= which columns are its key"
        raise invalid(text, "keys")
    return schema_of(frame, spec.keys, special)


async def give_up(client: Client, begun: Begun) -> None:
    """After a failure: remove the shard that was made for this job, so that none stays which nobody has
    written. Only if nothing was ever appended, by an append whose answer was lost neither, and nobody else is
    registered; the commit itself decides that. Raises no `Error`: the job's own says more."""
    if not begun.made:
        return
    shard = client._shards.at(begun.shard, begun.spec.shard)
    try:
        with client._shards.calls.call():
            await shard.register.refresh()
            if await commit(shard.register, FinalizeUnused(shard.id)):
                await delete_data(shard)
                await free(shard.stack, begun.spec.shard, shard.id)
    except Error as error:
        log.warning("shard %r, which a failed job made, may be left empty: %s", begun.spec.shard, error)


async def begin_open(client: Client, frame: pa.Schema, spec: WriteSpec) -> Begun:
    """The same; `UpperMismatch` for a shard that is finished, unless this was written before."""
    begun = await begin(client, frame, spec)
    if not begun.upper.elements and not await _is_done(client, begun):
        raise UpperMismatch(Antichain(0), begun.upper, shard_id=begun.shard)
    return begun


class Plan(NamedTuple):
    """What a job of hooks needs, in whatever process. Picklable."""

    begun: Begun
    grant: bytes
    """The one writer that tasks stage under."""


async def plan(client: Client, begun: Begun, lease_s: float) -> Plan:
    """Register that writer. What fails leaves no shard that was made for it."""
    try:
        return Plan(begun, await client.register_writer(begun.shard, begun.schema, lease_s))
    except BaseException:
        await give_up(client, begun)
        raise


async def release(client: Client, grant: bytes) -> None:
    """End that writer: what is staged under it and not appended is the sweep's."""
    try:
        await client.release_writer(grant)
    except Error:  # then its lease ends it
        pass


async def withdraw(client: Client, planned: Plan) -> None:
    """End that writer after a failure: what is staged under it and not appended is the sweep's."""
    await release(client, planned.grant)
    await give_up(client, planned.begun)


async def _is_done(client: Client, begun: Begun) -> bool:
    """Whether it was written before."""
    if begun.spec.txn is None:
        return False
    app, number = begun.spec.txn
    last = await client.txn_number(begun.shard, app)
    return last is not None and number <= last


def _check_keys(keys: Sequence[str], schema: Schema[Any, Any, Any]) -> None:
    mine = [name for name, source in sources(schema).items() if source.half == "key"]
    if keys and {name.lower() for name in keys} != {name.lower() for name in mine}:
        text = f"keys={list(keys)}: the key of the shard is {mine}, and no other is looked up by"
        raise invalid(text, keys[0])


class WriteJob:
    """The driver's part, once tasks have staged. Blocking: `run` may be Spark's."""

    def __init__(
        self, bridge: Bridge, client: Client, place: SparkLocation, begun: Begun, run: Run, n: int
    ) -> None:
        """Retractions are staged by about `n` tasks."""
        self._bridge = bridge
        self._client = client
        self._place = place
        self._begun = begun
        self._spec = begun.spec
        self._run = run
        self._tasks = n

    def commit(self, results: Results) -> int:
        """Append it all, once; the time at which it is complete. Whatever it raises, nothing was appended,
        and what was staged is deleted; but after `Indeterminate` nobody knows."""
        run = self._bridge.run
        writer = run(self._client.writer, self._begun.shard, self._begun.schema)
        try:
            batches = run(_restored, writer, results)
            try:
                staged = granted(results)
                if run(_is_done, self._client, self._begun):  # whatever the upper is now
                    return last_complete(run(writer.fetch_recent_upper))
                if not self._begun.upper.elements:
                    raise UpperMismatch(Antichain(0), Antichain(), shard_id=self._begun.shard)
                if self._spec.mode != APPEND:
                    return self._replace(writer, batches, staged)
                if self._spec.time is None:
                    return run(self._append, writer, batches)
                return run(self._append_timed, writer, batches, staged)
            finally:
                self._bridge.finish(discard_all, batches)
        finally:
            self._bridge.finish(writer.aclose)

    def _replace(self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]) -> int:
        """With retractions of what is there, as of the upper at which all of it is appended."""
        run, finish, shard = self._bridge.run, self._bridge.finish, self._begun.shard
        while True:
            with ExitStack() as ends:
                upper, read = run(self._there, writer)
                done: Results = ()
                if read is not None:
                    ends.callback(finish, read.aclose)
                    # of the schema as it is now: it may have got a field since the beginning
                    retracting = run(self._client.writer, shard, read.schema)
                    ends.callback(finish, retracting.aclose)
                    grant = self._bridge.call(retracting.to_transmittable)
                    pieces = run(self._pieces, read, staged)
                    done = self._run(tasks.retract, [(self._place, grant, *piece) for piece in pieces])
                retractions = run(_restored, writer, done)
                ends.callback(finish, discard_all, retractions)
                granted(done)
                try:
                    return run(_append_at, writer, [*batches, *retractions], upper, self._spec.txn)
                except UpperMismatch as error:
                    if error.current == Antichain():
                        raise

    async def _there(self, writer: Writer) -> tuple[int, SharedRead | None]:
        """The upper, and what there is to retract; `None` where there is nothing. New rows are looked through
        in any case: no key may come twice."""
        while True:
            upper = await _upper(writer)
            if not upper and self._spec.mode == OVERWRITE:
                return upper, None
            try:
                if not upper:
                    return upper, await self._client.shared_read(self._begun.shard, start=0, end=0)
                return upper, await self._client.shared_read(self._begun.shard, upper - 1)
            except SinceViolation as error:
                await _pass(writer, upper, error.since)

    async def _pieces(
        self, read: SharedRead, staged: Sequence[StagedTask]
    ) -> list[tuple[bytes, bytes | None]]:
        if self._spec.mode == OVERWRITE:
            return [(piece, None) for piece in await read.pieces(self._tasks)]
        hollow = [decode(one.batch, self._begun.shard).batch for one in staged]
        return list(await read.pieces_beside(self._tasks, hollow))

    async def _append(self, writer: Writer, batches: list[Batch]) -> int:
        while True:
            try:
                return await _append_at(writer, batches, await _upper(writer), self._spec.txn)
            except UpperMismatch as error:
                if error.current == Antichain():
                    raise

    async def _append_timed(self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]) -> int:
        """At the times that the rows have, if the upper is still what it was."""
        lower = self._begun.upper
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
    """The batches of those tasks that have one."""
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
    upper = (await writer.fetch_recent_upper()).time
    if upper is None:
        raise UpperMismatch(Antichain(0), Antichain(), shard_id=writer.shard_id)
    assert isinstance(upper, int)
    return upper


async def _pass(writer: Writer, upper: int, since: Any) -> None:
    """All history is gone, as of a shard that keeps the last hour of it and was not written for longer: what
    is there can be read once the upper is past since. Nothing is appended up to there."""
    if not since.elements:  # it is finished, as will be found
        return
    with suppress(UpperMismatch):
        await writer.compare_and_append([], upper, since.time + 1)


async def _append_at(writer: Writer, batches: Sequence[Batch], upper: int, txn: Txn | None) -> int:
    """Append batches of one time at the upper, if that is still it."""
    for batch in batches:
        batch.rewrite_ts(upper, upper + 1)
    await writer.compare_and_append_batch(batches, upper, upper + 1, txn)
    return upper if txn is None else last_complete(writer.upper)  # a repeat is complete at some time before
