"""Staged batches: each is appended, or deleted, once."""

from msgspec import Struct

from aiopersist.base.errors import AlreadyAppended, BatchExpired
from aiopersist.state.command import Commit, Context, Keep, commit, live
from aiopersist.state.model import State


class Staged(Struct, frozen=True):
    """A staged batch that an append consumes."""

    writer: str
    """The writer that built it: once its registration is gone, the blobs may be swept."""
    id: str
    handed_over: bool
    """Whether other processes may have it. Then the state keeps its id, so that it is consumed once."""


def is_consumed(state: State, writer: str, batch: str) -> bool:
    """Whether the state knows that this batch of `writer` was appended or deleted."""
    return writer in state.consumed and batch in state.consumed[writer]


def refusal_if_consumed(state: State, staged: tuple[Staged, ...]) -> AlreadyAppended | BatchExpired | None:
    """The error if one of these batches cannot be appended, else `None`."""
    for batch in staged:
        if is_consumed(state, batch.writer, batch.id):
            return AlreadyAppended(f"batch {batch.id} was appended, or deleted, before")
    for batch in staged:
        if batch.writer not in state.writers:
            text = f"writer {batch.writer} of batch {batch.id} is no longer registered: build it again"
            return BatchExpired(text)
    return None


def consumed_ids(staged: tuple[Staged, ...]) -> dict[str, list[str]]:
    """By writer, the ids of these batches that the state must keep."""
    ids: dict[str, list[str]] = {}
    for batch in staged:
        if batch.handed_over:
            ids.setdefault(batch.writer, []).append(batch.id)
    return ids


class MarkConsumed(Struct, frozen=True):
    """Prevent all further appends of these batches, so that their blobs can be deleted. The
    result is the ids of the batches that were not consumed before."""

    staged: tuple[Staged, ...]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        fresh = tuple(batch for batch in self.staged if refusal_if_consumed(state, (batch,)) is None)
        if not fresh:  # ids stay consumed, and writers that are gone never come back
            return Keep(result=frozenset())
        writers = {batch.writer: state.writers[batch.writer] for batch in fresh}
        result = frozenset(batch.id for batch in fresh)
        return commit(state, context, result=result, writers=writers, consumed=consumed_ids(fresh))

    def happened(self, state: State) -> bool | None:
        """Unknown: an append leaves the same ids."""
        return None
