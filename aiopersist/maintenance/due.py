"""The maintenance that a state asks for. Pure: decided from the state in memory, without I/O."""

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

SLACK_TIMES_MIN = 64  # kept too long, but no more than twice as many as must be: a move is a commit
TAIL_MIN = 5  # versions that an idle shard may keep beyond its rollup: more than a collection itself makes


class Due(NamedTuple):
    """The maintenance that a shard owes while appends come."""

    since: bool
    collection: bool
    large: bool
    """A compaction that takes the memory of one."""
    little: bool
    """Another compaction."""


class _Held(NamedTuple):
    """A batch of the state, weighed."""

    batch: HollowBatch
    runs: int
    weight: float
    goodbytes: float


class Weighed(NamedTuple):
    """A spine batch, and what its batches are together."""

    batch: SpineBatch
    inputs: int
    """Batches or runs, whichever are more."""
    weight: float
    goodbytes: float
    """At most; infinite if a part does not say."""


class Weights:
    """The batches of a shard, each weighed once, and the spine batches: a commit makes few new ones."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        """By ordinal."""
        self._known: dict[int, Weighed] = {}
        """By the identity of the spine batch, which is kept alive."""

    def of(self, state: State) -> Collection[Weighed]:
        """Those of `state`."""
        known, batches = self._known, list(spine_of(state).batches())
        new = [batch for batch in batches if id(batch) not in known]
        found = self._weighed(new, state) if new else {}
        self._known = {id(batch): found.get(id(batch)) or known[id(batch)] for batch in batches}
        return self._known.values()

    def _weighed(self, spine: Iterable[SpineBatch], state: State) -> dict[int, Weighed]:
        """By the identity of the spine batch."""
        before, self._held = self._held, {}
        for ordinal, batch in state.batches.items():
            known = before.get(ordinal)
            self._held[ordinal] = known if known is not None and known.batch is batch else _held(batch)
        ordinals, every = list(self._held), list(self._held.values())
        found = {}
        for one in spine:
            within = every[bisect_left(ordinals, one.first) : bisect_right(ordinals, one.last)]
            _, runs, weights, goodbytes = zip(*within, strict=True)
            inputs = max(len(within), sum(runs))
            found[id(one)] = Weighed(one, inputs, sum(weights), sum(goodbytes))
        return found


def _held(batch: HollowBatch) -> _Held:
    return _Held(batch, run_count(batch), weight(batch), sum(map(goodbytes_at_most, batch.parts)))


def commits_between(state: State, settings: Settings) -> int:
    """From one look at what is due to the next: half as many as are worth a compaction of batches like the
    newest, and few of those that are worth a rollup, so the work begins hardly later, and a commit seldom
    pays for a look."""
    newest = next(reversed(state.batches.values()), None)
    worth = settings.compaction_inputs_min / (weight(newest) if newest is not None else 1)
    return max(min(int(worth) // 2, settings.rollup_every // 4), 1)


def due(state: State, settings: Settings, weights: Weights) -> Due:
    """The maintenance owed by the process that has just committed `state`."""
    policy, weighed = state.retention.get(0), weights.of(state)
    wanted = settings.compaction_inputs_min
    large = [
        one.goodbytes > whole_bytes(settings) for one in weighed if is_worth(one.inputs, one.weight, wanted)
    ]
    return Due(
        since=policy is not None and _is_overdue(policy, state),
        collection=rollup_is_due(state, settings.rollup_every),
        large=True in large,
        little=False in large,
    )


def has_long_tail(state: State, settings: Settings) -> bool:
    """Whether an idle shard has more versions beyond its rollup than it must."""
    every = settings.rollup_every
    return versions_behind(state) > max(min(every // 8, every - 1), TAIL_MIN)


def rollup_is_near(state: State, settings: Settings) -> bool:
    """Whether a rollup now is worth its cost: after a compaction, when few parts lie in the state."""
    return versions_behind(state) >= settings.rollup_every * 3 // 4


def rollup_is_late(state: State, settings: Settings) -> bool:
    """Whether a rollup that was due is still not there, much later."""
    return versions_behind(state) >= settings.rollup_every * 3 // 2


def _is_overdue(policy: Retention, state: State) -> bool:
    """Whether the policy keeps an eighth more history than it must, and not just a few times more, as far as
    a state tells without a clock."""
    upper, hold = state.upper.elements, policy.hold.elements
    if policy.times is None or not upper or not hold:
        return False
    slack = max(policy.times // SLACK_SHARE, min(policy.times, SLACK_TIMES_MIN), 1)
    return isinstance(upper[0], int) and upper[0] - hold[0] > policy.times + slack  # type: ignore[operator]
