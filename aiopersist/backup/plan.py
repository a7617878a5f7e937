"""The plan of a copy: the batches of the source from the copy's upper on, as appends. Pure.

The copy must equal the source at each time from its since to its upper. Let `u` be the copy's upper, and `s`
the source's since.

- The batches from `u` on have all updates that the copy lacks. The copier appends them with their times. If
  compaction has moved none of these times, the copy is exact at each of its times. If it has, the times are
  exact from `s` on, so the copy's since moves to `s` in the same version.
- A batch may lie across `u`, if compaction merged copied batches with others. If it moved times only to
  frontiers before `u`, times before `u` are still before it, so times tell which updates are new.
- If it moved them further, nothing tells that. Then the copier *replaces*: it appends all updates of the
  source, and retracts all of the copy, at `s` or later. The copy's since moves to `s` in the same version, so
  no reader sees the times between.

After each append the copy is readable, so a killed copier leaves a usable copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aiopersist.base.frontier import Antichain, Time
from aiopersist.state.model import HollowBatch, State


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One append to the copy: the updates of `batches` at `[lower, upper)`, exact from `since` on."""

    batches: tuple[HollowBatch, ...]
    lower: Antichain
    upper: Antichain
    since: Antichain
    is_exact: bool
    """Whether they are exact at each time from `lower` on."""
    replaces: bool = False

    @property
    def updates_max(self) -> int:
        """An upper bound of its updates."""
        return sum(batch.len for batch in self.batches)


def plan_copy(source: State, upper: Antichain, step_bytes: int) -> list[CopyStep]:
    """The appends that bring a copy with that upper to the upper of `source`, each of about `step_bytes`
    encoded bytes, or of one batch."""
    if source.upper <= upper:
        return []
    new = [batch for batch in source.batches.values() if not batch.upper <= upper]
    replaces = any(not upper <= b.lower and not is_before(b.since, upper) for b in new if b.parts)
    steps: list[CopyStep] = []
    chosen = list(source.batches.values()) if replaces else new
    for group in _groups(chosen, source, upper, step_bytes):
        lower = steps[-1].upper if steps else upper
        again = replaces and not steps
        exact = not again and all(_is_as_written(batch, lower) for batch in group if batch.parts)
        steps.append(CopyStep(tuple(group), lower, group[-1].upper, source.since, exact, again))
    return steps


def _groups(
    batches: Sequence[HollowBatch], source: State, upper: Antichain, step_bytes: int
) -> Iterable[list[HollowBatch]]:
    group: list[HollowBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += sum(part.size for part in batch.parts)
        ends = batch.upper == source.upper
        full = size >= step_bytes and int_of(batch.upper) is not None and not batch.upper <= upper
        if ends or (full and is_readable(source.since, batch.upper)):
            yield group
            group, size = [], 0


def int_of(frontier: Antichain) -> int | None:
    """The time of a frontier of one int; `None` for any other."""
    elements = frontier.elements
    return elements[0] if len(elements) == 1 and isinstance(elements[0], int) else None


def is_readable(since: Antichain, upper: Antichain) -> bool:
    """Whether there is a time at or beyond `since` that `upper` has passed."""
    return any(not upper.less_equal(time) for time in since.elements)


def is_before(since: Antichain, upper: Antichain) -> bool:
    """Whether a time that is not at or beyond `upper` stays so when it is advanced to `since`: each element
    of `upper` has an element of `since` that is less in each component. Equal would not do: a time just
    before would be advanced onto the upper. A component at 0 does not count, since no time is less there."""
    return all(any(_is_less(e, u) for e in since.elements) for u in upper.elements)


def _is_less(time: Time, other: Time) -> bool:
    pairs = zip(_components(time), _components(other), strict=True)
    return all(a < b or b == 0 for a, b in pairs)


def _components(time: Time) -> tuple[int, ...]:
    return (time,) if isinstance(time, int) else time


def _is_as_written(batch: HollowBatch, lower: Antichain) -> bool:
    """Whether no compaction has moved its times at or beyond `lower`: only times before since move."""
    return batch.since <= batch.lower.join(lower)
