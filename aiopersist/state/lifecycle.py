"""Commands for the life of a shard: creation, schemas, rollups, collection, the end."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct

from aiopersist.base.errors import SchemaMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import (
    Commit,
    Context,
    Keep,
    clock_corrections,
    commit,
    live,
    overdue,
    refusal_if_gone,
    renewed,
)
from aiopersist.state.diff import Changes, tombstone_of
from aiopersist.state.model import COLLECTION, Clock, LeasedReader, Retention, Rollup, State, Writer

TABLE_KEEP_S = 24 * 3600.0  # the history of a table, until its user says otherwise


class Create(Struct, frozen=True):
    """Create the shard, with `since = upper = minimum`, unless it exists."""

    shard: str
    schema: Mapping[str, Any]
    minimum: Antichain
    clock: Clock = Clock.LOGICAL
    table: bool = False

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is not None:
            return Keep()
        kind: dict[str, Any] = {}
        if self.clock is not Clock.LOGICAL:
            kind["clock"] = self.clock
        if self.table:
            kind["table"] = True
            kind["retention"] = {0: Retention(seconds=TABLE_KEEP_S, hold=self.minimum)}
        since = upper = self.minimum
        return Commit(
            Changes(shard=self.shard, since=since, upper=upper, schemas={0: dict(self.schema)}, **kind)
        )


class ExpireOverdue(Struct, frozen=True):
    """End the readers and writers whose leases have run out, and the subscriptions and tags that expire, in a
    shard without other commits."""

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.finalized:
            return Keep()
        has_work = overdue(state, context, {}) or clock_corrections(state, context, {})
        return commit(state, context) if has_work else Keep()


def first_expiry(state: State) -> float:
    """The moment when `ExpireOverdue` has work: the first lease ends, or the first subscription or tag
    expires, unless a heartbeat or an acknowledgement comes before."""
    leased: tuple[LeasedReader | Writer, ...] = (*state.readers.values(), *state.writers.values())
    ends = [record.heartbeat + record.lease_s for record in leased]
    ends += [tag.expires_at for tag in state.tags.values() if tag.expires_at is not None]
    return min((*ends, *(record.expires_at for record in state.subscriptions.values())), default=inf)


class Finalize(Struct, frozen=True):
    """Empty both frontiers and drop all records: every handle is fenced, every blob unreferenced. For a shard
    that does not exist yet this is the first version, so that no process creates it."""

    shard: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        is_done = state is not None and state.finalized
        return Keep() if is_done else Commit(tombstone_of(self.shard))


class FinalizeUnused(Struct, frozen=True):
    """As `Finalize`, if nothing was ever appended and no reader or writer is registered: after the failure of
    the append for which the shard was created. The result is whether it is finalized."""

    shard: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.finalized:
            return Keep(result=state is not None)
        users = (state.readers, state.writers, state.critical, state.retention, state.subscriptions)
        if state.batches or state.transactions or any(users) or state.schema_id > 0:
            return Keep(result=False)
        return Commit(tombstone_of(self.shard), True)


class MarkDeleted(Struct, frozen=True):
    """Record in a finalized shard that its data is deleted, so that maintenance and sweep skip the shard."""

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or not state.finalized or state.collected:
            return Keep()
        return Commit(tombstone_of(state.shard, data_deleted_at=state.seqno + 1))


class EvolveSchema(Struct, frozen=True):
    """Make `schema` the current one under the next id, if the current id is still `expected`.
    The caller has checked that `schema` is compatible with the schema of that id."""

    expected: int
    schema: Mapping[str, Any]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if state.schema_id != self.expected:
            return Keep(error=SchemaMismatch(self.expected, state.schema_id))
        if state.schemas[self.expected] == self.schema:
            return Keep(result=self.expected)
        return Commit(Changes(schemas={self.expected + 1: dict(self.schema)}), self.expected + 1)

    def happened(self, state: State) -> bool:
        """Ids are never reused, so the schema of the next id tells; another process may have added it."""
        return state.schemas.get(self.expected + 1) == self.schema


class AddRollup(Struct, frozen=True):
    """Name a rollup of version `seqno`, unless a newer one is named."""

    writer: str
    seqno: int
    rollup: Rollup

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (refusal := refusal_if_gone(state, self.writer)) is not None:
            return refusal
        if _has_rollup_since(state, self.seqno):
            return Keep(result=False)
        return commit(
            state,
            context,
            result=True,
            rollups={self.seqno: self.rollup},
            writers={self.writer: renewed(state, self.writer, context)},
        )

    def happened(self, state: State) -> bool | None:
        """A newer rollup may have replaced this one. Without a newer one, its absence is a proof."""
        if self.rollup in state.rollups.values():
            return True
        return None if _has_rollup_since(state, self.seqno) else False


class ForgetTransactions(Struct, frozen=True):
    """Forget those of `apps` whose numbers were last used before `oldest`. The caller has searched all
    applications on a thread; the command checks the results again."""

    apps: Sequence[str]
    oldest: float

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.finalized:
            return Keep()
        records = ((app, state.transactions.get(app)) for app in self.apps)
        stale = tuple(app for app, last in records if last is not None and last.at < self.oldest)
        return commit(state, context, drop={"transactions": stale}) if stale else Keep()


class EndCollection(Struct, frozen=True):
    """End a collection: the blobs dropped up to version `upto`, which has a rollup, are deleted. Drop the
    rollups before that version, and release the claim of `writer`."""

    upto: int
    writer: str | None

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.finalized:
            return Keep()
        gone = tuple(s for s in state.rollups if s < self.upto and s != state.latest_rollup)
        claim = state.claims.get(COLLECTION)
        claims = (COLLECTION,) if claim is not None and claim.writer == self.writer else ()
        drop = {name: keys for name, keys in (("rollups", gone), ("claims", claims)) if keys}
        if self.upto > state.collected:
            return Commit(Changes(collected=self.upto, drop=drop))
        return Commit(Changes(drop=drop)) if drop else Keep()


def _has_rollup_since(state: State, seqno: int) -> bool:
    return state.latest_rollup is not None and state.latest_rollup >= seqno
