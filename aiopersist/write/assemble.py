"""Several staged batches as the one hollow batch of an append: what may be appended where, and which
parts are cut by the append's bounds. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from aiopersist.errors import InvalidUsage, UsageKind
from aiopersist.frontier import Antichain
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


class AppendableBatch(NamedTuple):
    """A hollow batch, and the frontier that all its times are advanced to, if it was rewritten."""

    batch: HollowBatch
    rewrite: Antichain | None


def check_append(batches: Sequence[AppendableBatch], lower: Antichain, upper: Antichain) -> None:
    """`InvalidUsage` unless these batches may be appended to `[lower, upper)`.

    One rewritten batch puts all under the stricter rules: its times are at its rewrite frontier or
    beyond, whatever the bounds of the append, so the append must end where they end and begin no later
    than they do; truncation could not tell which of them belong."""
    if any(b.rewrite is not None for b in batches):
        for b in batches:
            _check_rewritten(b.batch, lower, upper)
    for b in batches:
        if not b.batch.lower <= lower or b.batch.upper < upper:
            raise InvalidUsage(
                UsageKind.INVALID_BATCH_BOUNDS,
                f"a batch of [{b.batch.lower}, {b.batch.upper}) does not cover [{lower}, {upper})",
                batch_lower=b.batch.lower,
                batch_upper=b.batch.upper,
                append_lower=lower,
                append_upper=upper,
            )
    if lower == upper and any(b.batch.parts for b in batches):
        text = f"a batch with updates cannot be appended to the empty interval [{lower}, {upper})"
        raise InvalidUsage(UsageKind.INVALID_EMPTY_TIME_INTERVAL, text, lower=lower, upper=upper)


def _check_rewritten(batch: HollowBatch, lower: Antichain, upper: Antichain) -> None:
    if batch.upper != upper:
        raise _rewrite(f"the append ends at {upper}, a batch at {batch.upper}")
    for part in batch.parts:
        if not lower <= _floor(batch, part):
            raise _rewrite(f"the append begins at {lower}, beyond the times of a part, {_floor(batch, part)}")


def _rewrite(reason: str) -> InvalidUsage:
    text = f"with rewritten batches: {reason}"
    return InvalidUsage(UsageKind.INVALID_REWRITE, text, reason=reason)


def _floor(batch: HollowBatch, part: HollowPart) -> Antichain:
    """All times of the part are at or beyond it when they are read."""
    return batch.lower if part.rewrite is None else part.rewrite


def assembled(
    batches: Sequence[AppendableBatch], lower: Antichain, upper: Antichain, since: Antichain
) -> HollowBatch:
    """One batch of `[lower, upper)` with the parts of all. Each batch begins a new run."""
    parts: list[HollowPart] = []
    runs: list[int] = []
    for b in batches:
        if b.batch.parts:
            runs += [len(parts)] if parts else []
            runs += [len(parts) + run for run in b.batch.runs]
            parts += [_truncated(b.batch, part, lower, upper) for part in b.batch.parts]
    return HollowBatch.of(lower=lower, upper=upper, since=since, parts=tuple(parts), runs=tuple(runs))


def _truncated(batch: HollowBatch, part: HollowPart, lower: Antichain, upper: Antichain) -> HollowPart:
    """Marked if it may hold times outside of the bounds."""
    within = lower <= _floor(batch, part) and batch.upper <= upper
    return part if within else part.replace(truncated=(lower, upper))
