"""The maintenance that a state asks for. Pure: decided from the state in memory, without I/O."""

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from aiopersist.gc.rollup import due as rollup_is_due
from aiopersist.settings import Settings
from aiopersist.state.model import Retention, State

MANY = 1.5  # batches per doubling of the versions
INPUTS_MIN = 4  # fewer are compacted once the shard is idle
TAIL_MIN = 5  # versions that an idle shard may keep beyond its rollup: more than a collection itself makes


class Due(NamedTuple):
    """The maintenance that a shard owes while appends come."""

    since: bool
    collection: bool
    compaction: bool


def due(state: State, settings: Settings) -> Due:
    """The maintenance owed by the process that has just committed `state`."""
    policy = state.retention.get(0)
    return Due(
        since=policy is not None and _is_overdue(policy, state),
        collection=rollup_is_due(state, settings.rollup_every),
        compaction=_most_inputs(state, wanted := inputs_wanted(state, settings)) >= wanted,
    )


def inputs_wanted(state: State, settings: Settings) -> int:
    """How many batches are worth a compaction: usually many, since each is written again; fewer when the
    shard has more than a reader should meet. A reader should meet `2 * log2(n)` batches after `n` versions;
    `MANY` leaves room for those that come while a compaction runs."""
    many = len(state.batches) > MANY * math.log2(state.seqno + 2)
    return min(settings.compaction_inputs_min, INPUTS_MIN) if many else settings.compaction_inputs_min


def all_inputs(state: State, settings: Settings) -> int:
    """Two: an idle shard is compacted as far as its spine asks."""
    return 2


def has_long_tail(state: State, settings: Settings) -> bool:
    """Whether an idle shard has more versions beyond its rollup than it must."""
    every = settings.rollup_every
    return state.seqno - (state.latest_rollup or 0) > max(min(every // 8, every - 1), TAIL_MIN)


def _most_inputs(state: State, enough: int) -> int:
    """The most batches that one spine batch holds; 0 if these cannot be `enough`."""
    if len(state.batches) - sum(len(level.batches) for level in state.levels.values()) < enough - 1:
        return 0
    ordinals = list(state.batches)
    return max(
        (
            bisect_right(ordinals, batch.last) - bisect_left(ordinals, batch.first)
            for level in state.levels.values()
            for batch in level.batches
        ),
        default=0,
    )


def _is_overdue(policy: Retention, state: State) -> bool:
    """Whether the policy keeps more than twice the history that it must, as far as a state tells without a
    clock."""
    upper, hold = state.upper.elements, policy.hold.elements
    if policy.times is None or not upper or not hold:
        return False
    return isinstance(upper[0], int) and upper[0] - hold[0] > max(2 * policy.times, 1)  # type: ignore[operator]
