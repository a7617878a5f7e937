"""The invariants of every state, as named predicates. They are checked before a version is written, and for
every full state that is read.

A violation before a write is a bug of the library: nothing is written. A violation after a read is
`Corruption`: nothing is served.
"""

from itertools import chain, pairwise

from aiopersist.base.errors import Corruption
from aiopersist.state.diff import Diff, added_parts, replaced_parts
from aiopersist.state.keys import writer_of
from aiopersist.state.model import State
from aiopersist.state.names import live_parts, registered
from aiopersist.state.record import inline_bytes
from aiopersist.state.spine import is_contiguous
from aiopersist.state.streams import parts_of_streams
from aiopersist.state.streams_invariants import broken, streams_are_arranged


def frontiers_never_go_back(before: State, after: State) -> bool:
    """`<=` and not `<`: most versions move neither."""
    since_stays, upper_stays = before.since is after.since, before.upper is after.upper
    return (since_stays or before.since <= after.since) and (upper_stays or before.upper <= after.upper)


def versions_are_contiguous(before: State, after: State) -> bool:
    """Exactly one more: a gap could hide a version that dropped a record that this one names."""
    return after.seqno == before.seqno + 1


def batches_are_contiguous(state: State) -> bool:
    """Each batch begins where the last one ends, and ordinals rise: no update is missing or repeated."""
    ordinals = list(state.batches)
    batches = list(state.batches.values())
    return all(a < b for a, b in pairwise(ordinals)) and all(a.upper == b.lower for a, b in pairwise(batches))


def spine_covers_batches(state: State) -> bool:
    """Each batch belongs to one spine batch, in order, and no level holds more than two."""
    return not state.levels or is_contiguous(state.levels, list(state.batches))


def trace_ends_at_upper(state: State) -> bool:
    """The last batch ends at the shard's upper; without batches nothing was appended yet."""
    if state.finalized or not state.batches:
        return True
    upper = next(reversed(state.batches.values())).upper
    return upper is state.upper or upper == state.upper


def inline_bytes_add_up(state: State) -> bool:
    """The sum that `apply` keeps up to date is the sum of all inline parts."""
    batches = (part for batch in state.batches.values() for part in batch.parts)
    return state.inline_bytes == inline_bytes(chain(batches, parts_of_streams(state.streams)))


def streams_hold(state: State) -> bool:
    """The invariants of `streams_invariants.py`, of each arrangement and of all together."""
    streams = state.streams
    return streams is None or (
        streams_are_arranged(streams) and not any(map(broken, streams.arrangements.values()))
    )


def subscriptions_hold(state: State) -> bool:
    """Since has passed no position of a subscription: `<=`, since reading on needs since at the hold."""
    records = state.subscriptions.values()
    return not records or all(state.since <= record.hold for record in records)


def new_blobs_are_registered(diff: Diff, before: State | None, after: State) -> bool:
    """Every blob key that this version adds carries the id of a writer that is registered in it: this makes
    the leak sweep safe. Parts that a batch takes over from batches that it replaces are not new."""
    keys = {part.key for part in added_parts(diff.changes) if part.key}
    keys |= {rollup.key for rollup in diff.changes.rollups.values()}
    keys |= {tag.rollup.key for tag in diff.changes.tags.values()}
    if not keys:
        return True
    writers = registered(after)
    if all(writer_of(key) in writers for key in keys):
        return True
    gone = replaced_parts(diff.changes, before) if before is not None else []
    return all(writer_of(key) in writers for key in keys - {part.key for part in gone})


def new_tags_name_live_parts(diff: Diff, before: State | None, after: State) -> bool:
    """A new tag names blobs that the version before it names: others may be deleted already."""
    tags = diff.changes.tags
    return not tags or (
        before is not None and all(live_parts(before).issuperset(tag.parts) for tag in tags.values())
    )


def new_batches_are_last(diff: Diff, before: State | None, after: State) -> bool:
    """A version replaces existing batches, or adds a batch at the end."""
    earlier = () if before is None else before.batches
    new = [at for at in diff.changes.batches if at not in earlier]
    return not new or new == [next(reversed(after.batches))]


def changed_streams_hold(diff: Diff, before: State | None, after: State) -> bool:
    """`streams_hold` for the changed streams only: to check all of them costs too much in each commit."""
    if diff.changes.streams is None or after.streams is None:
        return True
    now = after.streams.arrangements
    changed = (now[name] for name in diff.changes.streams.arrangements.keys() & now.keys())
    return streams_are_arranged(after.streams) and not any(map(broken, changed))


def check_version(diff: Diff, before: State | None, after: State) -> None:
    """`AssertionError`, a bug, if `diff` must not be written. Not by `assert`, which `python -O` removes."""
    if before is not None:
        for follows in (versions_are_contiguous, frontiers_never_go_back):
            if not follows(before, after):
                raise _broken(follows.__name__, before, after)
    for is_so in (trace_ends_at_upper, subscriptions_hold):
        if not is_so(after):
            raise _broken(is_so.__name__, after)
    for holds in (
        new_batches_are_last,
        new_blobs_are_registered,
        new_tags_name_live_parts,
        changed_streams_hold,
    ):
        if not holds(diff, before, after):
            raise _broken(holds.__name__, diff)


def _broken(name: str, *about: object) -> AssertionError:
    return AssertionError(f"a version that must not be written: {name} does not hold", *about)


ALL = (
    batches_are_contiguous,
    spine_covers_batches,
    trace_ends_at_upper,
    inline_bytes_add_up,
    streams_hold,
    subscriptions_hold,
)


def check_state(state: State) -> State:
    """`state` itself, or `Corruption`."""
    for holds in ALL:
        if not holds(state):
            raise Corruption(f"{state!r} breaks the invariant {holds.__name__}", shard_id=state.shard)
    return state
