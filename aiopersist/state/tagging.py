"""Commands of tags. A tag keeps the contents at one time as one version has them: its record names a rollup
of these contents, and their blobs. Collections delete no blob that a tag names."""

from msgspec import Struct

from aiopersist.base.errors import TagExists, UnknownTag
from aiopersist.base.frontier import Time
from aiopersist.state.command import Commit, Context, Keep, commit, live, refusal_if_gone, renewed
from aiopersist.state.diff import Changes
from aiopersist.state.model import Rollup, State, Tag
from aiopersist.state.names import live_parts


def tagged(state: State, as_of: Time) -> State:
    """The part of the state that the contents at `as_of` need: the batches that may have updates at or before
    it. Their upper is that of the last one, or of the state."""
    batches = dict(state.batches)
    if isinstance(as_of, int):
        batches = {at: batch for at, batch in batches.items() if batch.lower.less_equal(as_of)}
    upper = next(reversed(batches.values())).upper if batches else state.upper
    return State(
        shard=state.shard,
        seqno=state.seqno,
        commit=state.commit,
        at=state.at,
        since=state.since,
        upper=upper,
        schemas=state.schemas,
        batches=batches,
        inline_bytes=sum(batch.inline_bytes for batch in batches.values()),
        **state.kind,
    )


class AddTag(Struct, frozen=True):
    """Add the tag, whose rollup `writer` has written, under a name that no other tag has. The result is
    whether the state still has all its parts, and its version is not collected: what an erasure has removed
    must not come back. If not, the caller makes a tag of the newest state."""

    writer: str
    name: str
    tag: Tag

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (refusal := refusal_if_gone(state, self.writer)) is not None:
            return refusal
        present = state.tags.get(self.name)
        if present is not None and not present.has_expired(context.now):
            return Keep(error=TagExists(self.name, shard_id=state.shard))
        if self.tag.seqno < state.collected or not live_parts(state).issuperset(self.tag.parts):
            return Keep(result=False)
        writers = {self.writer: renewed(state, self.writer, context)}
        return commit(state, context, result=True, tags={self.name: self.tag}, writers=writers)

    def happened(self, state: State) -> bool | None:
        """The key of its rollup is its own. Somebody may have dropped the tag since."""
        present = state.tags.get(self.name)
        return True if present is not None and present.rollup == self.tag.rollup else None


class DropTag(Struct, frozen=True):
    """Drop the tag of that name. The next collection deletes the blobs that nobody else names. With `rollup`,
    only a tag with that rollup, and no later one of the same name; the result is whether it was dropped."""

    name: str
    rollup: Rollup | None = None

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        tag = state.tags.get(self.name)
        if self.rollup is not None and (tag is None or tag.rollup != self.rollup):
            return Keep(result=False)
        if tag is None:
            return Keep(error=UnknownTag(self.name, shard_id=state.shard))
        return Commit(Changes(drop={"tags": (self.name,)}), True)

    def happened(self, state: State) -> bool | None:
        """Another process may have dropped it, or added another one of that name."""
        return None
