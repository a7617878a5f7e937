"""The plan of a write, on the driver: the shard, existing or new; how columns of a DataFrame become updates;
the one writer under which tasks of hooks stage. A failed job removes the shard that it created if nothing was
ever appended (`remove_new_shard`).
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from aiopersist.base.errors import Error, InvalidUsage, UnknownShard, UpperMismatch, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.base.portal import to_its_end
from aiopersist.base.resource import Opening
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa
from aiopersist.data.part.flat import invalid, sources
from aiopersist.data.part.select import check_where
from aiopersist.data.types.schema import Schema
from aiopersist.gc.collect import delete_data
from aiopersist.shard.catalog import ShardId, free
from aiopersist.shard.commit import commit
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
    """The schema of a new shard, or its columns; an existing shard must have the same."""
    where: Any = None
    """The condition of a deletion without rows."""

    def check(self) -> None:
        """`InvalidUsage` for arguments that exclude each other."""
        check_txn(self.txn)
        if self.mode not in MODES:
            text = f"{self.mode!r} is none of {', '.join(MODES)}"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        if self.mode != APPEND and (self.time is not None or self.diff is not None):
            text = f"{self.mode} decides which rows are retracted, and when: pass neither time nor diff"
            raise InvalidUsage(UsageKind.INVALID_MODE, text)
        if isinstance(self.time, int) and not 0 <= self.time < 2**63 - 1:
            text = f"time {self.time} is not in [0, 2**63 - 1)"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=self.time)


class WritePlan(NamedTuple):
    """The plan for tasks and the commit. Picklable."""

    spec: WriteSpec
    shard: ShardId
    """The shard that now has the name; another may take the name while the job runs."""
    schema: Schema[Any, Any, Any]
    layout: Layout
    upper: Antichain
    """The shard's upper at the plan."""
    is_new: bool = False
    """Whether this job created the shard."""
    table: bool = False
    """Whether it is a table, where each key has one row."""


async def plan_write(client: Client, frame: pa.Schema, spec: WriteSpec) -> WritePlan:
    """Check everything that can be checked before anything runs. `INVALID_COLUMN` for columns that do not fit
    the shard. Creates a missing shard if `keys` or `schema` describe it, but a deletion raises
    `UnknownShard`. `CodecMismatch` for an existing shard with another schema."""
    spec.check()
    special = Special(spec.time if isinstance(spec.time, str) else None, spec.diff)
    own_schema = asked_schema(spec, special)
    try:
        shard = await client._shards.existing(spec.shard)
    except UnknownShard:
        if spec.mode == DELETE:
            raise
        schema, layout = _fitting(frame, spec, special, own_schema or _schema_of_frame(frame, spec, special))
        async with client.writer(spec.shard, schema) as writer:  # raises if another job created another shard
            return WritePlan(spec, writer.shard_id, schema, layout, writer.upper, is_new=True)
    if shard.state.table and spec.mode == APPEND:
        by_key = "upsert rows or delete keys (mode=, or the option apply)"
        text = f"{shard.label} is a table, with one value per key: {by_key}, or overwrite all"
        raise InvalidUsage(UsageKind.NOT_A_TABLE, text, shard_id=shard.id)
    if own_schema is not None:
        own_schema = shard.as_stored(own_schema)
    schema, layout = _fitting(frame, spec, special, own_schema or shard.schema(shard.state.schema_id))
    layout.readable = shard.state.table and spec.mode != DELETE
    return WritePlan(spec, shard.id, schema, layout, shard.state.upper, table=shard.state.table)


async def plan_open_write(client: Client, frame: pa.Schema, spec: WriteSpec) -> WritePlan:
    """`plan_write`; `UpperMismatch` for a finished shard, unless its `txn` was written before."""
    plan = await plan_write(client, frame, spec)
    if not plan.upper.elements and not await is_done(client, plan):
        raise UpperMismatch(Antichain(0), plan.upper, shard_id=plan.shard)
    return plan


def _fitting(
    frame: pa.Schema, spec: WriteSpec, special: Special, schema: Schema[Any, Any, Any]
) -> tuple[Schema[Any, Any, Any], Layout]:
    """The schema, and the layout that turns rows of the frame into updates."""
    _check_keys(spec.keys, schema)
    if spec.where is not None:
        check_where(spec.where, schema)
    halves = BOTH if spec.mode != DELETE else BOTH[:1] if spec.where is None else ()
    at = spec.time if isinstance(spec.time, int) else 0
    return schema, Layout(frame, schema, special, at, halves=halves)


def asked_schema(spec: WriteSpec, special: Special) -> Schema[Any, Any, Any] | None:
    """The schema in the user's arguments, if any."""
    if spec.schema is None or isinstance(spec.schema, Schema):
        return spec.schema
    if not spec.keys:
        raise invalid("schema= names columns: name those of the key in keys=", "keys")
    names = {name.lower() for name in spec.schema.names}
    own = Special(*(None if name is None or name.lower() not in names else name for name in special))
    return schema_of(spec.schema, spec.keys, own)


def _schema_of_frame(frame: pa.Schema, spec: WriteSpec, special: Special) -> Schema[Any, Any, Any]:
    if not spec.keys:
        text = f"there is no shard {spec.shard!r} yet: name the columns of its key in keys="
        raise invalid(text, "keys")
    return schema_of(frame, spec.keys, special)


def _check_keys(keys: Sequence[str], schema: Schema[Any, Any, Any]) -> None:
    key_names = [name for name, source in sources(schema).items() if source.half == "key"]
    if keys and {name.lower() for name in keys} != {name.lower() for name in key_names}:
        text = f"keys={list(keys)}: the key of the shard is {key_names}: pass these or no keys"
        raise invalid(text, keys[0])


async def is_done(client: Client, plan: WritePlan) -> bool:
    """Whether its `txn` was written before."""
    if plan.spec.txn is None:
        return False
    app, number = plan.spec.txn
    last = await client.txn_number(plan.shard, app)
    return last is not None and number <= last


async def remove_new_shard(client: Client, plan: WritePlan) -> None:
    """After a failure: remove the shard that this job created. The commit removes it only if nothing was ever
    appended, not even by an append with a lost answer, and no other client is registered. Raises no `Error`,
    since the job's error says more."""
    if not plan.is_new:
        return
    shard = client._shards.at(plan.shard, plan.spec.shard)
    try:
        with client._shards.calls.call():
            await shard.register.refresh()
            if await commit(shard.register, FinalizeUnused(shard.id)):
                await delete_data(shard)
                await free(shard.stack, plan.spec.shard, shard.id)
    except Error as error:
        text, extra = "shard %r, created by a failed job, may stay empty: %s", {"shard": shard.known_as}
        log.warning(text, plan.spec.shard, error, extra=extra)


def writer_of(client: Client, plan: WritePlan) -> Opening[Writer]:
    """A writer of the shard, also of a table: the plan keeps its rule of one row per key."""
    return open_writer(client._shards, plan.shard, plan.schema, None, tables=plan.table)


# --- a writer for tasks that hooks run ---------------------------------------------------------------


class GrantedWrite(NamedTuple):
    """The plan and the writer of a job, for any process. Picklable."""

    plan: WritePlan
    grant: bytes
    """The one writer, under which tasks stage."""


async def grant_writer(client: Client, plan: WritePlan, lease_s: float) -> GrantedWrite:
    """Register the writer; a failure removes a shard created for the job."""
    try:
        with client._shards.calls.call():
            grant = await register_writer(client._shards, plan.shard, plan.schema, lease_s, tables=plan.table)
        return GrantedWrite(plan, grant)
    except BaseException:
        await to_its_end(remove_new_shard, client, plan)
        raise


async def release_writer(client: Client, grant: bytes) -> None:
    """End the writer; a sweep then deletes its staged batches that were not appended."""
    with suppress(Error):  # otherwise its lease ends it
        await client.workers.release_writer(grant)


async def abandon(client: Client, write: GrantedWrite) -> None:
    """After a failure: end the writer, and remove a shard created for the job."""
    await release_writer(client, write.grant)
    await remove_new_shard(client, write.plan)
