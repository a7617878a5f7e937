"""Finds the batches that may hold updates of an interval of a listen. Pure.

With product times an update is delivered at `t' = join(t, as_of)`, in the interval `[lower, upper)` that
contains `t'`. This may be later than the interval in which its batch ends. But many batches can be excluded.
`lower` has an element `e <= t'` only if `t` reaches `e` in each component in which `e` is beyond `as_of`. Let
`m` be the least time that does. Joined with the lower of the batch, `m` is the least time that an update of
the batch can have in the interval. If the batch's upper has passed that time, or `upper` has passed that time
joined with `as_of`, the batch has no update of the interval.

*Compaction* may have advanced `t` to a since `s`, but not beyond the listen's hold. In each component in
which `e` is beyond `as_of`, the hold is before `e`; so `t` had reached `e` there before the compaction. And
an advanced time only makes `t'` later. So the same bounds of the batch still exclude it.
"""

from collections.abc import Iterable
from itertools import takewhile

from aiopersist.base.frontier import Antichain, Time, join, predecessor
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.record import HollowPart


def hold_for(frontier: Antichain, as_of: Time | None) -> Antichain:
    """The hold of a listen at `frontier`: its component-wise predecessor, joined with `as_of`. To read
    changes from `f` on needs `since < f`, or both at the minimum."""
    before = predecessor(frontier)
    if as_of is None:
        return before
    return Antichain(*(e if isinstance(e, int) else join(e, as_of) for e in before.elements))


def batches_of(state: State, lower: Antichain, upper: Antichain, as_of: Time | None) -> list[HollowBatch]:
    """The batches that may hold updates of `[lower, upper)`, oldest first."""
    if isinstance(as_of, tuple):
        return _of_product_times(state.batches.values(), lower, upper, as_of)
    newest_first = takewhile(lambda batch: not batch.upper <= lower, reversed(state.batches.values()))
    return list(newest_first)[::-1]


def parts_since(state: State, lower: Antichain) -> list[tuple[HollowBatch, HollowPart]]:
    """The parts that may hold updates at or beyond `lower`. Int times only."""
    return [(batch, part) for batch in batches_of(state, lower, state.upper, None) for part in batch.parts]


def _of_product_times(
    batches: Iterable[HollowBatch], lower: Antichain, upper: Antichain, as_of: tuple[int, ...]
) -> list[HollowBatch]:
    hold = hold_for(lower, as_of)
    least = [
        tuple(c if c > a else 0 for c, a in zip(element, as_of, strict=True))
        for element in lower.elements
        if isinstance(element, tuple)
    ]

    def may_hold(batch: HollowBatch) -> bool:
        if not batch.since <= hold:
            return True
        starts = (m for m in least if not batch.upper.less_equal(m))
        times = (join(m, first) for m in starts for first in batch.lower.elements)
        return any(
            not batch.upper.less_equal(time) and not upper.less_equal(join(time, as_of)) for time in times
        )

    return [batch for batch in batches if batch.parts and may_hold(batch)]
