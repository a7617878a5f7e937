"""Appends to several shards at one moment: all of them, or none."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, Time
from aiopersist.data.updates.inputs import own_copy
from aiopersist.shard.attempt import Attempt
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.subscriptions import Ack
from aiopersist.write.append import append_all
from aiopersist.write.batch import Batch
from aiopersist.write.batches import BatchesAppend
from aiopersist.write.checks import check_bounds
from aiopersist.write.handle import WriteHandle, session_of
from aiopersist.write.pending import PendingAppend


class Append(NamedTuple):
    """One of several appends: staged batches or updates at `[expected_upper, new_upper)`."""

    writer: WriteHandle[Any, Any]
    updates: Any
    """One `Batch`, a sequence of batches, or updates as `compare_and_append` takes them."""
    expected_upper: Antichain | Time
    new_upper: Antichain | Time


def with_copied_updates(append: Append) -> Append:
    """The append with a copy of its updates: their owner may change them while earlier appends run."""
    append = Append(*append)
    return append._replace(updates=own_copy(append.updates))


async def append_to_many(appends: Sequence[Append], stack: Stack) -> None:
    """See `Client.compare_and_append_many`."""
    with _pending_appends(appends, stack) as pending:
        if pending:
            await append_all(pending)


async def append_with(
    appends: Sequence[Append], shard: Shard, acks: tuple[Ack, ...], joined: Attempt
) -> None:
    """Append, and acknowledge in `shard` in the same commit. If an append goes to `shard`, that append
    carries `acks`; else the attempt `joined` does."""
    with _pending_appends(appends, shard.stack) as pending:
        same = [one for one in pending if one.session.shard is shard]
        for one in same:
            one.acks = acks
        await append_all(pending, [] if same else [joined])


@contextmanager
def _pending_appends(appends: Sequence[Append], stack: Stack) -> Iterator[list[PendingAppend]]:
    """The appends, checked, within calls of their writers."""
    appends = [Append(*append) for append in appends]
    _check(appends, stack)
    with ExitStack() as calls:
        for append in appends:
            calls.enter_context(session_of(append.writer).scope.call())
        for append in appends:
            session_of(append.writer).unsettled = None
        yield [_pending(append) for append in appends]


def _pending(append: Append) -> PendingAppend:
    session, updates = session_of(append.writer), append.updates
    bounds = check_bounds(append.expected_upper, append.new_upper, session.schema)
    if isinstance(updates, Batch):
        return BatchesAppend(session, *bounds, [updates])
    if isinstance(updates, list | tuple) and updates and isinstance(updates[0], Batch):
        return BatchesAppend(session, *bounds, updates)
    return PendingAppend(session, *bounds, updates)


def _check(appends: Sequence[Append], stack: Stack) -> None:
    shards = set()
    for append in appends:
        if not isinstance(append.writer, WriteHandle):
            raise InvalidUsage(UsageKind.INVALID_APPEND, f"{shown(append.writer)} is not a write handle")
        shard = append.writer.shard_id
        if session_of(append.writer).shard.stack is not stack:
            text = f"the writer of shard {shard} belongs to another client"
            raise InvalidUsage(UsageKind.INVALID_APPEND, text, shard_id=shard)
        if shard in shards:
            raise InvalidUsage(UsageKind.INVALID_APPEND, f"shard {shard} is named twice", shard_id=shard)
        shards.add(shard)
