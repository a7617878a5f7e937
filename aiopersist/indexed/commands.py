"""How the streams of an `Indexed` become others in the versioned state: three commands.

Only the owner changes streams, one change after the other, so what a change is made of was decided on the
very streams that it changes; other versions in between are of readers, and touch no stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiopersist.frontier import Antichain
from aiopersist.indexed.errors import Fenced
from aiopersist.state.command import Commit, Context, Keep, commit, live
from aiopersist.state.diff import Changes
from aiopersist.state.model import State
from aiopersist.state.streams import StreamsChanges


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Be the owner from now on; make the `Indexed` if it is not there."""

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


@dataclass(frozen=True, slots=True)
class ChangeStreams:
    """ChangeStreams the streams, if they are still the owner's. The result is the version that does it."""

    owner: str
    changes: StreamsChanges
    """Its revision is one more than that of the streams it was decided on."""
    schemas: Mapping[int, dict[str, Any]]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if _owner(state) != self.owner:
            return Keep(error=Fenced("another instance has taken over"))
        return commit(
            state, context, result=state.seqno + 1, streams=self.changes, schemas=dict(self.schemas)
        )

    def happened(self, state: State) -> bool | None:
        """Revisions are the owner's to give; whether it was before another took over cannot be known."""
        if state.streams is None or _owner(state) != self.owner or self.changes.revision is None:
            return None
        return state.streams.revision >= self.changes.revision


@dataclass(frozen=True, slots=True)
class Leave:
    """There is no owner any more, if it was this one: blobs that it left behind can be swept."""

    owner: str

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.streams is None or _owner(state) != self.owner:
            return Keep()
        changes = StreamsChanges(owner="", revision=state.streams.revision + 1)
        return commit(state, context, streams=changes)


def _owner(state: State) -> str | None:
    return None if state.streams is None else state.streams.owner
