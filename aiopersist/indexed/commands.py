"""The commands that change the streams of an `Indexed` in the versioned state.

Only the owner changes streams, one change after the other. So each change was decided on the very streams
that it changes: the versions in between are made by readers, and touch no stream.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from aiopersist.base.frontier import Antichain
from aiopersist.indexed.errors import Fenced
from aiopersist.state.command import Commit, Context, Keep, commit, live
from aiopersist.state.diff import Changes
from aiopersist.state.model import State
from aiopersist.state.streams import StreamsChanges


class TakeOver(Struct, frozen=True):
    """Become the owner; make the `Indexed` if it does not exist."""

    shard: str
    owner: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None:
            least, streams = Antichain(0), StreamsChanges(owner=self.owner)
            return Commit(Changes(shard=self.shard, since=least, upper=least, streams=streams))
        state = live(state)
        assert state.streams is not None, "ids tell what is an Indexed"
        changes = StreamsChanges(owner=self.owner, revision=state.streams.revision + 1)
        return commit(state, context, streams=changes)

    def happened(self, state: State) -> bool | None:
        return True if _owner(state) == self.owner else None


class ChangeStreams(Struct, frozen=True):
    """Change the streams, if `owner` still owns them. The result is the seqno of the version that does it."""

    owner: str
    changes: StreamsChanges
    """The revision is one more than that of the streams on which the changes were decided."""
    schemas: Mapping[int, dict[str, Any]]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if _owner(state) != self.owner:
            return Keep(error=Fenced("another instance has taken over"))
        return commit(
            state, context, result=state.seqno + 1, streams=self.changes, schemas=dict(self.schemas)
        )

    def happened(self, state: State) -> bool | None:
        """Only the owner gives revisions. After another took over it is unknown: `None`."""
        if state.streams is None or _owner(state) != self.owner or self.changes.revision is None:
            return None
        return state.streams.revision >= self.changes.revision


class Leave(Struct, frozen=True):
    """Give up the ownership, if `owner` has it, so that the blobs it left behind can be swept."""

    owner: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.streams is None or _owner(state) != self.owner:
            return Keep()
        changes = StreamsChanges(owner="", revision=state.streams.revision + 1)
        return commit(state, context, streams=changes)


def _owner(state: State) -> str | None:
    return None if state.streams is None else state.streams.owner
