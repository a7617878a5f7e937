"""How a DataFrame becomes one append: the same for the engine, for `format("aiopersist")`, and for streams.

1. *Begin*, on the driver: find the shard, or make it; check the columns against it.
2. Tasks *stage* batches (`tasks.stage`), all under one writer.
3. What is replaced is looked up at the shard's upper and *retracted* by tasks, too (`tasks.retract`).
4. *Commit*: one compare-and-append of everything. Without a column of times all batches are moved to the
   upper as it is then; after a mismatch to the newer one, with new retractions.

With a column of times the shard's upper must be what it was at the beginning: a mismatch fails the write.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple, TypeAlias

from aiopersist.client import Client
from aiopersist.data.codec import Schema
from aiopersist.data.lazy import pa
from aiopersist.errors import InvalidUsage, SinceViolation, UnknownShard, UpperMismatch, UsageKind
from aiopersist.frontier import Antichain
from aiopersist.read.shared import SharedRead
from aiopersist.shard.catalog import ShardId
from aiopersist.spark import tasks
from aiopersist.spark.bridge import Bridge
from aiopersist.spark.columns import invalid, sources
from aiopersist.spark.place import Place
from aiopersist.spark.rows import Layout, Special, schema_of
from aiopersist.spark.tasks import Refused, Staged, granted
from aiopersist.write.batch import Batch, discard_all
from aiopersist.write.checks import Txn, check_txn
from aiopersist.write.combine import last_complete
from aiopersist.write.handle import WriteHandle
from aiopersist.write.transmit import decode

APPEND, OVERWRITE, UPSERT = "append", "overwrite", "upsert"

Writer: TypeAlias = WriteHandle[Any, Any]
Results: TypeAlias = Sequence[Staged | Refused]
Run = Callable[[Callable[..., Staged], Sequence[tuple[Any, ...]]], Results]
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


async def begin(client: Client, frame: pa.Schema, spec: WriteSpec) -> Begun:
    """Check what can be checked before anything runs. `INVALID_COLUMN` for columns that do not fit the shard;
    a new one is made, if `keys` say which of them are its key."""
    spec.check()
    special = Special(spec.time if isinstance(spec.time, str) else None, spec.diff)
    try:
        shard = await client.shard_id(spec.shard)
        _, schema = await client.schema(shard)
    except UnknownShard:
        if not spec.keys:
            text = f"there is no shard {spec.shard!r} yet: say by keys= which columns are its key"
            raise invalid(text, "keys") from None
        made = schema_of(frame, spec.keys, special)
        async with client.writer(spec.shard, made) as writer:  # or finds that another made it otherwise
            shard = writer.shard_id
            _, schema = await client.schema(shard)
    _check_keys(spec.keys, schema)
    at = spec.time if isinstance(spec.time, int) else 0
    layout = Layout(frame, schema, special, at)
    return Begun(spec, shard, schema, layout, await client.upper(shard))


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
    """Register that writer."""
    return Plan(begun, await client.register_writer(begun.shard, begun.schema, lease_s))


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


class Job:
    """The driver's part, once tasks have staged. Blocking: `run` may be Spark's."""

    def __init__(self, bridge: Bridge, client: Client, place: Place, begun: Begun, run: Run, n: int) -> None:
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

    def _replace(self, writer: Writer, batches: list[Batch], staged: Sequence[Staged]) -> int:
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

    async def _pieces(self, read: SharedRead, staged: Sequence[Staged]) -> list[tuple[bytes, bytes | None]]:
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

    async def _append_timed(self, writer: Writer, batches: list[Batch], staged: Sequence[Staged]) -> int:
        """At the times that the rows have, if the upper is still what it was."""
        lower = self._begun.upper
        first = min((one.first for one in staged if one.rows), default=None)
        if first is not None and not lower.less_equal(first):
            text = f"time {first} is not at or beyond the upper {lower}"
            raise InvalidUsage(UsageKind.UPDATE_NOT_BEYOND_LOWER, text, time=first, lower=lower)
        upper = lower.join(Antichain(max((one.last + 1 for one in staged if one.rows), default=0)))
        for batch in batches:
            batch._rebound(lower, upper)
        await writer.compare_and_append_batch(batches, lower, upper, self._spec.txn)
        return last_complete(writer.upper)


async def _restored(writer: Writer, results: Results) -> list[Batch]:
    """The batches of those tasks that have one."""
    batches: list[Batch] = []
    try:
        for one in results:
            if isinstance(one, Staged):
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
