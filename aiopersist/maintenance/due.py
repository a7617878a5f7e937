"""The maintenance that a state needs. Pure: uses only the state in memory."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from typing import NamedTuple

from aiopersist.base.settings import Settings
from aiopersist.gc.rollup import due as rollup_is_due
from aiopersist.gc.rollup import versions_behind
from aiopersist.parts.rewrite import whole_bytes
from aiopersist.state.compaction import is_worth, run_count, weight
from aiopersist.state.model import HollowBatch, Retention, SpineBatch, State
from aiopersist.state.record import goodbytes_at_most
from aiopersist.state.retention import SLACK_SHARE
from aiopersist.state.spine import spine_of

SLACK_TIMES_MIN = 64  # times of slack, at most twice as many as the policy keeps: a move costs a commit
TAIL_MIN = 5  # versions that an idle shard may keep beyond its rollup: more than a collection makes


class Due(NamedTuple):
    """The maintenance that a shard needs while appends come."""

    since: bool
    collection: bool
    large: bool
    """A compaction that needs the memory of one."""
    little: bool
    """Another compaction."""


class _WeighedBatch(NamedTuple):
    """A batch of the state and its weight."""

    batch: HollowBatch
    runs: int
    weight: float
    goodbytes: float


class Weighed(NamedTuple):
    """A spine batch, and the sums over its batches."""

    batch: SpineBatch
    inputs: int
    """Batches or runs, whichever are more."""
    weight: float
    goodbytes: float
    """An upper bound; infinite if a part has none."""


class Weights:
    """The batches and spine batches of a shard, each weighed once: a commit makes few new ones."""

    def __init__(self) -> None:
        self._batches: dict[int, _WeighedBatch] = {}
        """By ordinal."""
        self._spine: dict[int, Weighed] = {}
        """By the `id` of the spine batch, which this keeps alive."""

    def of(self, state: State) -> Collection[Weighed]:
        """The weighed spine batches of `state`."""
        before, batches = self._spine, list(spine_of(state).batches())
        new = [batch for batch in batches if id(batch) not in before]
        added = self._weighed(new, state) if new else {}
        self._spine = {id(batch): added.get(id(batch)) or before[id(batch)] for batch in batches}
        return self._spine.values()

    def _weighed(self, spine: Iterable[SpineBatch], state: State) -> dict[int, Weighed]:
        """By the `id` of the spine batch."""
        before, self._batches = self._batches, {}
        for ordinal, batch in state.batches.items():
            previous = before.get(ordinal)
            is_same = previous is not None and previous.batch is batch
            self._batches[ordinal] = before[ordinal] if is_same else _weighed_batch(batch)
        ordinals, every = list(self._batches), list(self._batches.values())
        weighed = {}
        for one in spine:
            within = every[bisect_left(ordinals, one.first) : bisect_right(ordinals, one.last)]
            _, runs, weights, goodbytes = zip(*within, strict=True)
            inputs = max(len(within), sum(runs))
            weighed[id(one)] = Weighed(one, inputs, sum(weights), sum(goodbytes))
        return weighed


def _weighed_batch(batch: HollowBatch) -> _WeighedBatch:
    return _WeighedBatch(batch, run_count(batch), weight(batch), sum(map(goodbytes_at_most, batch.parts)))


def commits_between(state: State, settings: Settings) -> int:
    """How many commits from one call of `due` to the next: half as many as need a compaction of batches like
    the newest, and few of those that need a rollup. So work begins hardly later, and few commits pay."""
    newest = next(reversed(state.batches.values()), None)
    worth = settings.compaction_inputs_min / (weight(newest) if newest is not None else 1)
    return max(min(int(worth) // 2, settings.rollup_every // 4), 1)


def due(state: State, settings: Settings, weights: Weights) -> Due:
    """The maintenance for the process that has just committed `state`."""
    policy, weighed = state.retention.get(0), weights.of(state)
    inputs_min, whole = settings.compaction_inputs_min, whole_bytes(settings)
    large = [one.goodbytes > whole for one in weighed if is_worth(one.inputs, one.weight, inputs_min)]
    return Due(
        since=policy is not None and _is_overdue(policy, state),
        collection=rollup_is_due(state, settings.rollup_every),
        large=True in large,
        little=False in large,
    )


def has_long_tail(state: State, settings: Settings) -> bool:
    """Whether an idle shard has more versions beyond its rollup than necessary."""
    every = settings.rollup_every
    return versions_behind(state) > max(min(every // 8, every - 1), TAIL_MIN)


def rollup_is_near(state: State, settings: Settings) -> bool:
    """Whether a rollup now is worth its cost: after a compaction the state has few parts."""
    return versions_behind(state) >= settings.rollup_every * 3 // 4


def rollup_is_late(state: State, settings: Settings) -> bool:
    """Whether a rollup was due long ago."""
    return versions_behind(state) >= settings.rollup_every * 3 // 2


def _is_overdue(policy: Retention, state: State) -> bool:
    """Whether the policy keeps an eighth more times than it must, and more than a few. A policy in seconds
    needs a clock, so it moves since only at looks (`next_look` of `maintenance/background.py`)."""
    upper, hold = state.upper.elements, policy.hold.elements
    if policy.times is None or not upper or not hold:
        return False
    slack = max(policy.times // SLACK_SHARE, min(policy.times, SLACK_TIMES_MIN), 1)
    return isinstance(upper[0], int) and upper[0] - hold[0] > policy.times + slack  # type: ignore[operator]
