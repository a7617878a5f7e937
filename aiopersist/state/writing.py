"""Commands of writers: registrations and appends."""

from collections.abc import Mapping
from math import inf
from types import MappingProxyType
from typing import Any, Protocol

from msgspec import Struct

from aiopersist.base.errors import (
    BatchExpired,
    Error,
    InvalidUsage,
    LeaseExpired,
    UpperMismatch,
    UsageKind,
    shown,
)
from aiopersist.base.frontier import Antichain, int_time, last_before, successor
from aiopersist.state.command import Commit, Context, Keep, claims_of, commit, live, micros, renewed
from aiopersist.state.consuming import Staged, consumed_ids, refusal_if_consumed
from aiopersist.state.diff import Changes, tombstone_of
from aiopersist.state.keys import writer_of
from aiopersist.state.model import HollowBatch, State, TransactionRecord, Writer
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.spine import changed_levels, dropped_levels, spine_of
from aiopersist.state.subscriptions import Ack, acknowledged, with_new_updates


class RegisterWriter(Struct, frozen=True):
    """Register a fresh writer id: versions may name blobs of this writer from now on."""

    writer: str
    lease_s: float

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        record = Writer(heartbeat=context.now, lease_s=self.lease_s)
        return commit(state, context, writers={self.writer: record})

    def happened(self, state: State) -> bool | None:
        """Ids are fresh, so a record proves it. Without one the writer may have registered and expired."""
        return True if self.writer in state.writers else None


class HeartbeatWriter(Struct, frozen=True):
    """Renew the lease of the writer. Always a commit."""

    writer: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if self.writer not in state.writers:
            return Keep(error=LeaseExpired(f"writer {self.writer} is no longer registered"))
        return commit(state, context, writers={self.writer: renewed(state, self.writer, context)})


class Occupy(Struct, frozen=True):
    """Take the next version with a heartbeat, or without changes, so that a statement still on its way to
    that version can never take it. This settles a cancelled append."""

    writer: str

    def __call__(self, state: State | None, context: Context) -> Commit:
        if state is not None and state.finalized:  # every version of a tombstone must say that it is one
            return Commit(tombstone_of(state.shard, state.collected and state.seqno + 1))
        if state is None or self.writer not in state.writers:
            return Commit(Changes())
        return commit(state, context, writers={self.writer: renewed(state, self.writer, context)})


class CloseTo(Struct, frozen=True):
    """Move the upper to `upper`, unless it is there or further: there are no updates before it."""

    upper: Antichain

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if self.upper <= state.upper:
            return Keep()
        batch = HollowBatch(lower=state.upper, upper=self.upper, since=Antichain(0))
        return commit(state, context, upper=self.upper, **insert(state, batch))

    def happened(self, state: State) -> bool:
        """The upper never goes back, whichever command moved it."""
        return self.upper <= state.upper


class ExpireWriter(Struct, frozen=True):
    """End a registration: batches staged under it can no longer be appended."""

    writer: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or self.writer not in state.writers:
            return Keep()
        claims = claims_of(state, (self.writer,))
        drop: dict[str, tuple[int | str, ...]] = {"writers": (self.writer,), "claims": claims}
        return Commit(Changes(drop={name: keys for name, keys in drop.items() if keys}))


class Appended(Struct, frozen=True):
    """The result of an append: whether it wrote, and the shard's upper after it."""

    upper: Antichain
    wrote: bool
    repeats: frozenset[str] = frozenset()
    """Applications whose transaction numbers were recorded before; if any, nothing was written."""
    done_at: int | None = None
    """The time of the commit that recorded the id of `once=`; if there is one, nothing was written."""

    @property
    def time(self) -> int:
        """A time that includes the append: of the commit that recorded its id, or the last complete one."""
        return last_complete(self.upper) if self.done_at is None else self.done_at


class NoRoom(Error):
    """Too many inline bytes in the state. The caller flushes some to the blob store, and appends again."""


class PartsExpired(BatchExpired):
    """The registration of the writer that uploaded the parts is gone. The caller uploads them under another
    writer, and appends again."""


class RepeatedMark(Error):
    """An id or a number of the append is recorded already."""


class AppendHollow(Struct, frozen=True):
    """Append `batch` at its own bounds; without parts it only moves the upper.

    `replica`: other writers may append the same definite data. Updates that the shard already has are
    truncated: the batch gets the shard's upper as its lower.
    """

    writer: str
    token: str
    batch: HollowBatch
    transactions: Mapping[str, int]
    inline_bytes_max: int
    replica: bool = False
    staged: tuple[Staged, ...] = ()
    transactions_max: float = inf
    """The number of applications that the shard may remember. One more is refused: if the shard forgot an
    application, that could append its last number twice."""
    once: Once = UNMARKED
    ahead_max_s: float = inf
    """How far beyond now the append may move the upper of a shard with a wall clock."""
    is_of_a_table: bool = False
    """Whether it is of a group commit of tables, or of a large put. Then a repeat is refused
    (`RepeatedMark`), so that the rest of the commit is not written either."""
    acks: tuple[Ack, ...] = ()
    """Positions of subscriptions to this shard that move in the same commit. A position that was passed
    before is refused: the append was written with it."""

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (repeat := repeat_of(state, context.now, self)) is not None:
            error = RepeatedMark("it was done before") if self.is_of_a_table else None
            return Keep(result=repeat, error=error)
        moved = acknowledged(state, self.acks, context.now, self.token, is_strict=True) if self.acks else {}
        if isinstance(moved, Error):
            return Keep(error=moved)
        if self.staged and (refusal := refusal_if_consumed(state, self.staged)):
            return Keep(error=refusal)
        lower = self.batch.lower
        if self.replica and self.batch.upper <= state.upper:
            return Keep(result=Appended(state.upper, wrote=False))
        if self.replica and lower <= state.upper <= self.batch.upper:
            lower = state.upper
        if lower != state.upper:
            return Keep(error=UpperMismatch(lower, state.upper))
        return _append(state, context, self, truncate(self.batch, lower), self.staged, moved)

    def happened(self, state: State) -> bool | None:
        return token_is_there(state, self.writer, self.token)


class Write(Struct, frozen=True):
    """Append all of `batch` at one int time: the shard's upper, or now, if its clock is a wall clock."""

    writer: str
    token: str
    batch: HollowBatch
    transactions: Mapping[str, int]
    inline_bytes_max: int
    transactions_max: float = inf
    once: Once = UNMARKED

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (repeat := repeat_of(state, context.now, self)) is not None:
            return Keep(result=repeat)
        if not state.upper.elements:
            return Keep(error=UpperMismatch(self.batch.lower, state.upper))
        batch, time = self.batch, last_complete(self.batch.upper)
        fits = batch.lower == state.upper or (state.is_wall and state.upper <= Antichain(time))
        if not fits or (state.is_wall and time < context.seen):
            time = time_of_write(state.upper, state, context)
            moved = (part.replace(rewrite=Antichain(time)) for part in batch.parts)
            batch = batch.replace(parts=tuple(moved))
        bounds = {"lower": state.upper, "upper": successor(time)}
        return _append(state, context, self, batch.replace(**bounds))

    def happened(self, state: State) -> bool | None:
        return token_is_there(state, self.writer, self.token)


class Marked(Protocol):
    """A command with a transaction number or an id of `once=`, so that a repeat is noticed."""

    @property
    def transactions(self) -> Mapping[str, int]: ...
    @property
    def once(self) -> Once: ...


def repeat_of(state: State, now: float, call: Marked) -> Appended | None:
    """The result of a call that was done before, according to its number or id; else `None`."""
    if not call.transactions and not call.once.hashes:
        return None
    repeats, done_at = repeated(state, call.transactions), call.once.done_at(state.once, now)
    if not repeats and done_at is None:
        return None
    return Appended(state.upper, wrote=False, repeats=repeats, done_at=done_at)


def time_of_write(upper: Antichain, state: State, context: Context) -> int:
    """The time of a `Write` to a shard with that upper: on a wall clock, now; never before the upper."""
    least = upper.time
    assert isinstance(least, int)
    return max(least, context.wall) if state.is_wall else least


def _is_ahead(state: State, now: float, command: AppendHollow | Write) -> InvalidUsage | None:
    """The refusal to move the upper of a wall clock far beyond now: each shard that shares a commit with this
    one would get such times. A single step is allowed: if a wrong clock has moved the upper far ahead,
    appends must still work."""
    if isinstance(command, Write) or command.ahead_max_s == inf:
        return None
    upper, before = int_time(command.batch.upper), int_time(state.upper)
    if upper is None or before is None or upper <= before + 1:
        return None
    if upper - micros(now) <= command.ahead_max_s * 1e6:
        return None
    text = f"upper {upper} is more than {command.ahead_max_s:g} s beyond the clock, which is at {micros(now)}"
    return InvalidUsage(UsageKind.INVALID_CLOCK, text, upper=upper, now=now)


def last_complete(upper: Antichain) -> int:
    """The greatest int time before `upper`; 0 at the minimum."""
    return max(last_before(upper), 0)


def _append(
    state: State,
    context: Context,
    command: AppendHollow | Write,
    batch: HollowBatch,
    staged: tuple[Staged, ...] = (),
    moved: Mapping[str, SubscriptionRecord] = MappingProxyType({}),
) -> Commit | Keep:
    named = {writer_of(part.key) for part in batch.parts if part.key} | {one.writer for one in staged}
    if unregistered := named - state.writers.keys():  # staged batches: see `refusal_if_consumed`
        return Keep(error=PartsExpired(f"writers {sorted(unregistered)} are no longer registered"))
    if command.writer not in state.writers:
        return Keep(error=LeaseExpired(f"writer {command.writer} is no longer registered"))
    if command.transactions and (refusal := too_many(state, command.transactions, command.transactions_max)):
        return Keep(error=refusal)
    if state.is_wall and (refusal := _is_ahead(state, context.now, command)):
        return Keep(error=refusal)
    inline = batch.inline_bytes
    if inline and state.inline_bytes + inline >= command.inline_bytes_max:
        return Keep(error=NoRoom(f"{state.inline_bytes} inline bytes and {inline} more"))
    writers = {writer: state.writers[writer] for writer in named}  # so that this commit expires none
    record = state.writers[command.writer]
    writers[command.writer] = record.replace(heartbeat=context.now, token=command.token, upper=batch.upper)
    numbers = {a: TransactionRecord(number=n, at=context.now) for a, n in command.transactions.items()}
    is_marked = bool(command.once.hashes)  # then times are ints
    consumers = dict(moved)
    if batch.parts and state.subscriptions:
        consumers = with_new_updates(state, moved, context.now)
    return commit(
        state,
        context,
        result=Appended(batch.upper, wrote=True),
        upper=batch.upper,
        writers=writers,
        consumed=consumed_ids(staged) if staged else {},
        transactions=numbers,
        once=command.once.changes(context.now, last_complete(batch.upper)) if is_marked else {},
        subscriptions=consumers,
        **insert(state, batch),
    )


def new_apps(state: State, transactions: Mapping[str, int]) -> list[str]:
    """The applications that the shard does not remember."""
    return [app for app in transactions if app not in state.transactions]


def too_many(state: State, transactions: Mapping[str, int], most: float) -> InvalidUsage | None:
    """The refusal to remember more applications than `most`."""
    new = new_apps(state, transactions)
    if not new or len(state.transactions) + len(new) <= most:
        return None
    text = (
        f"the shard remembers {len(state.transactions)} applications of txn=, and {shown(new[0])} is new: "
        "use one id for each producer that counts, or raise txn_ids_max"
    )
    return InvalidUsage(UsageKind.INVALID_TXN, text, txn=(new[0], transactions[new[0]]))


def repeated(state: State, transactions: Mapping[str, int]) -> frozenset[str]:
    """The applications whose number, or a greater one, is recorded. Numbers never go back."""
    last = state.transactions
    return frozenset(app for app, n in transactions.items() if app in last and n <= last[app].number)


def token_is_there(state: State, writer: str, token: str) -> bool | None:
    """Whether the last append of `writer` has this token. The state has the last token of each writer, and a
    writer makes one append at a time. `None` if the writer is no longer registered."""
    record = state.writers.get(writer)
    return None if record is None else record.token == token


def truncate(batch: HollowBatch, lower: Antichain) -> HollowBatch:
    """`batch` from `lower` on. Its parts are marked: they may have updates outside of the new bounds."""
    if lower is batch.lower or lower == batch.lower:
        return batch
    parts = tuple(part.replace(truncated=(lower, batch.upper)) for part in batch.parts)
    return batch.replace(lower=lower, parts=parts)


def insert(state: State, batch: HollowBatch) -> dict[str, Any]:
    """The changes that put `batch` at the end of the trace. Neighbouring empty batches become one, so a
    million moves of the upper without updates cost one batch."""
    if batch.lower == batch.upper:
        return {}
    if state.batches and not batch.parts:
        ordinal = next(reversed(state.batches))
        last = state.batches[ordinal]
        if not last.parts:
            return {"batches": {ordinal: last.replace(upper=batch.upper)}}
    spine = spine_of(state)
    spine.insert(state.seqno + 1, batch.len)
    drop = {"levels": dropped_levels(state, spine)}
    return {"batches": {state.seqno + 1: batch}, **changed_levels(state, spine), "drop": drop}
