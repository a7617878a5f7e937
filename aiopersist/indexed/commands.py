"""The commands that change the streams of an `Indexed` in the versioned state.

Only the owner changes streams, one change after the other. Versions in between come from readers, and change
no stream. So each change is decided on the same streams that it changes.
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
    """Become the owner; create the `Indexed` if it does not exist."""

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
    """Change the streams, if `owner` still owns them. The result is the seqno of the new version."""

    owner: str
    changes: StreamsChanges
    """Their revision is one more than that of the streams before."""
    schemas: Mapping[int, dict[str, Any]]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if _owner(state) != self.owner:
            return Keep(error=Fenced("another instance has taken over"))
        return commit(
            state, context, result=state.seqno + 1, streams=self.changes, schemas=dict(self.schemas)
        )

    def happened(self, state: State) -> bool | None:
        """Only the owner sets revisions. Unknown (`None`) after another has taken over."""
        if state.streams is None or _owner(state) != self.owner or self.changes.revision is None:
            return None
        return state.streams.revision >= self.changes.revision


class Leave(Struct, frozen=True):
    """Give up the ownership, if `owner` has it: then the sweep can delete its unused blobs."""

    owner: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.streams is None or _owner(state) != self.owner:
            return Keep()
        changes = StreamsChanges(owner="", revision=state.streams.revision + 1)
        return commit(state, context, streams=changes)


def _owner(state: State) -> str | None:
    return None if state.streams is None else state.streams.owner
