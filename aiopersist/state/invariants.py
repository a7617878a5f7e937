"""What holds of every state, as named predicates: checked before a version is written, and of every
full state that is read.

A violation before the write is a bug of ours, and nothing is written; after the read it is
`Corruption`, and nothing is served.
"""

from itertools import pairwise

from aiopersist.errors import Corruption
from aiopersist.state.diff import Diff
from aiopersist.state.keys import writer_of
from aiopersist.state.model import State
from aiopersist.state.spine import is_contiguous


def frontiers_never_go_back(before: State, after: State) -> bool:
    """`<=` and not `<`: most versions move neither."""
    return before.since <= after.since and before.upper <= after.upper


def versions_are_contiguous(before: State, after: State) -> bool:
    """Exactly one more: a gap could hide a version that deleted what this one names."""
    return after.seqno == before.seqno + 1


def batches_are_contiguous(state: State) -> bool:
    """Each batch begins where the one before ends, and ordinals rise: so no update is counted twice
    and none is missing."""
    ordinals = list(state.batches)
    batches = list(state.batches.values())
    return all(a < b for a, b in pairwise(ordinals)) and all(a.upper == b.lower for a, b in pairwise(batches))


def spine_covers_batches(state: State) -> bool:
    """Each batch belongs to one spine batch, in order, and no level holds more than two."""
    return not state.levels or is_contiguous(state.levels, list(state.batches))


def trace_ends_at_upper(state: State) -> bool:
    """The last batch ends where the shard's upper is; without batches nothing was appended yet."""
    if state.finalized or not state.batches:
        return True
    return next(reversed(state.batches.values())).upper == state.upper


def inline_bytes_add_up(state: State) -> bool:
    """The sum that `apply` keeps is the sum."""
    return state.inline_bytes == sum(batch.inline_bytes for batch in state.batches.values())


def new_blobs_are_registered(diff: Diff, before: State | None, after: State) -> bool:
    """Every blob key that this version adds carries the id of a writer that is registered in it:
    what makes the leak sweep safe. Parts that a batch takes over from those it replaces are not new."""
    keys = {part.key for batch in diff.changes.batches.values() for part in batch.parts if part.key}
    keys |= {rollup.key for rollup in diff.changes.rollups.values()}
    if all(writer_of(key) in after.writers for key in keys):
        return True
    replaced = {*diff.changes.batches, *map(int, diff.changes.drop.get("batches", ()))}
    gone = [before.batches[o] for o in replaced if o in before.batches] if before is not None else []
    keys -= {part.key for batch in gone for part in batch.parts if part.key}
    return all(writer_of(key) in after.writers for key in keys)


def check_version(diff: Diff, before: State | None, after: State) -> None:
    """Raise `AssertionError`, our bug, if `diff` must not be written."""
    if before is not None:
        assert versions_are_contiguous(before, after), (before, after)
        assert frontiers_never_go_back(before, after), (before, after)
    for ordinal in diff.changes.batches:
        known = before is not None and ordinal in before.batches
        assert known or ordinal == next(reversed(after.batches)), diff
    assert trace_ends_at_upper(after), after
    assert new_blobs_are_registered(diff, before, after), diff


def check_state(state: State) -> State:
    """`state` itself, or `Corruption`."""
    for holds in (batches_are_contiguous, spine_covers_batches, trace_ends_at_upper, inline_bytes_add_up):
        if not holds(state):
            raise Corruption(f"of {state!r} it does not hold that {holds.__name__}", shard_id=state.shard)
    return state
