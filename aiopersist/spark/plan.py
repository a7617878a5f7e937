"""The plan of a write, on the driver: the shard, which is found or made; how the columns of a DataFrame are
its updates; the one writer under which the tasks of hooks stage. A job that fails removes the shard that it
made, if nothing was ever appended (`remove_new_shard`).
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from aiopersist.base.errors import Error, InvalidUsage, UnknownShard, UpperMismatch, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.base.resource import Opening
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa
from aiopersist.data.part.select import check_where
from aiopersist.data.types.schema import Schema
from aiopersist.gc.collect import delete_data
from aiopersist.shard.catalog import ShardId, free
from aiopersist.shard.commit import commit
from aiopersist.spark.bridge import to_its_end
from aiopersist.spark.columns import invalid, sources
from aiopersist.spark.rows import BOTH, Layout, Special, schema_of
from aiopersist.state.lifecycle import FinalizeUnused
from aiopersist.write.checks import Txn, check_txn
from aiopersist.write.handle import WriteHandle
from aiopersist.write.open import open_writer
from aiopersist.write.remote import register_writer

log = logging.getLogger("aiopersist").getChild("spark")

APPEND, OVERWRITE, UPSERT, DELETE = MODES = "append", "overwrite", "upsert", "delete"

Writer: TypeAlias = WriteHandle[Any, Any]


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
        asked = found.as_stored(asked)
    schema, layout = _fitting(frame, spec, special, asked or found.schema(found.state.schema_id))
    layout.readable = found.state.table and spec.mode != DELETE
    return WritePlan(spec, found.id, schema, layout, found.state.upper, table=found.state.table)


async def plan_open_write(client: Client, frame: pa.Schema, spec: WriteSpec) -> WritePlan:
    """`plan_write`; `UpperMismatch` for a finished shard, unless its `txn` was written before."""
    plan = await plan_write(client, frame, spec)
    if not plan.upper.elements and not await is_done(client, plan):
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


async def is_done(client: Client, plan: WritePlan) -> bool:
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
        text, extra = "shard %r, which a failed job made, may stay empty: %s", {"shard": shard.known_as}
        log.warning(text, plan.spec.shard, error, extra=extra)


def writer_of(client: Client, plan: WritePlan) -> Opening[Writer]:
    """A writer of the shard, also of a table: the plan says that its rule is kept."""
    return open_writer(client._shards, plan.shard, plan.schema, None, tables=plan.table)


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
        await client.workers.release_writer(grant)


async def abandon(client: Client, write: GrantedWrite) -> None:
    """After a failure: end that writer, and remove the shard that was made for the job."""
    await release_writer(client, write.grant)
    await remove_new_shard(client, write.plan)
