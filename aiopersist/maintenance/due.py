"""The maintenance that a state asks for. Pure: decided from the state in memory, without I/O."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection
from typing import NamedTuple

from aiopersist.gc.rollup import due as rollup_is_due
from aiopersist.parts.rewrite import whole_bytes
from aiopersist.settings import Settings
from aiopersist.state.compaction import ANY, INLINE_SHARE, is_worth, run_count, weight
from aiopersist.state.model import Retention, SpineBatch, State
from aiopersist.state.record import goodbytes_at_most
from aiopersist.state.spine import spine_of

MANY = 1.5  # batches per doubling of the versions
INPUTS_MIN = 4  # fewer are compacted once the shard is idle
TAIL_MIN = 5  # versions that an idle shard may keep beyond its rollup: more than a collection itself makes


class Due(NamedTuple):
    """The maintenance that a shard owes while appends come."""

    since: bool
    collection: bool
    large: bool
    """A compaction that takes the memory of one."""
    little: bool
    """Another compaction."""


class Weighed(NamedTuple):
    """A spine batch, and what its batches are together."""

    batch: SpineBatch
    inputs: int
    """Batches or runs, whichever are more."""
    weight: float
    goodbytes: float
    """At most; infinite if a part does not say."""


class Weights:
    """The spine batches of a shard, each weighed once: a commit makes few new ones."""

    def __init__(self) -> None:
        self._known: dict[int, Weighed] = {}
        """By the identity of the spine batch, which is kept alive."""

    def of(self, state: State) -> Collection[Weighed]:
        """Those of `state`."""
        known, batches = self._known, list(spine_of(state).batches())
        new = [batch for batch in batches if id(batch) not in known]
        found = {id(batch): _weighed(batch, state) for batch in new} if new else {}
        self._known = {id(batch): found.get(id(batch)) or known[id(batch)] for batch in batches}
        return self._known.values()


def commits_between(state: State, settings: Settings) -> int:
    """From one look at what is due to the next: half as many as are worth a compaction of batches like the
    newest, and few of those that are worth a rollup, so the work begins hardly later, and a commit seldom
    pays for a look."""
    newest = next(reversed(state.batches.values()), None)
    lightly = newest is not None and weight(newest) == 1 / INLINE_SHARE
    worth = settings.compaction_inputs_min * (INLINE_SHARE if lightly else 1)
    return max(min(worth // 2, settings.rollup_every // 8), 1)


def due(state: State, settings: Settings, weights: Weights) -> Due:
    """The maintenance owed by the process that has just committed `state`."""
    policy, weighed = state.retention.get(0), weights.of(state)
    wanted = _wanted(state, settings, sum(one.weight for one in weighed))
    large = [
        one.goodbytes > whole_bytes(settings) for one in weighed if is_worth(one.inputs, one.weight, wanted)
    ]
    return Due(
        since=policy is not None and _is_overdue(policy, state),
        collection=rollup_is_due(state, settings.rollup_every),
        large=True in large,
        little=False in large,
    )


def inputs_wanted(state: State, settings: Settings) -> float:
    """The `weight` of batches that is worth a compaction: usually much, since each is written again; less
    when the shard has more than a reader should meet. A reader should meet `2 * log2(n)` batches after `n`
    versions; `MANY` leaves room for those that come while a compaction runs."""
    return _wanted(state, settings, sum(map(weight, state.batches.values())))


def _wanted(state: State, settings: Settings, there: float) -> float:
    many = there > MANY * math.log2(state.seqno + 2)
    return min(settings.compaction_inputs_min, INPUTS_MIN) if many else settings.compaction_inputs_min


def _weighed(batch: SpineBatch, state: State) -> Weighed:
    batches, ordinals = state.batches, [batch.first]
    if batch.first != batch.last:
        every = list(batches)
        ordinals = every[bisect_left(every, batch.first) : bisect_right(every, batch.last)]
    held = [batches[ordinal] for ordinal in ordinals]
    inputs = max(len(held), sum(map(run_count, held)))
    goodbytes = sum(goodbytes_at_most(part) for one in held for part in one.parts)
    return Weighed(batch, inputs, sum(map(weight, held)), goodbytes)


def all_inputs(state: State, settings: Settings) -> float:
    """An idle shard is compacted as far as its spine asks."""
    return ANY


def has_long_tail(state: State, settings: Settings) -> bool:
    """Whether an idle shard has more versions beyond its rollup than it must."""
    every = settings.rollup_every
    return state.seqno - (state.latest_rollup or 0) > max(min(every // 8, every - 1), TAIL_MIN)


def _is_overdue(policy: Retention, state: State) -> bool:
    """Whether the policy keeps more than twice the history that it must, as far as a state tells without a
    clock."""
    upper, hold = state.upper.elements, policy.hold.elements
    if policy.times is None or not upper or not hold:
        return False
    return isinstance(upper[0], int) and upper[0] - hold[0] > max(2 * policy.times, 1)  # type: ignore[operator]
