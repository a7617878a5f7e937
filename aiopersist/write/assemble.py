"""Makes one hollow batch of the staged ones of an append: checks bounds, and truncates parts. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


class AppendableBatch(NamedTuple):
    """A hollow batch, and the frontier to which all its times are advanced, if it was rewritten."""

    batch: HollowBatch
    rewrite: Antichain | None


def check_append(batches: Sequence[AppendableBatch], lower: Antichain, upper: Antichain) -> None:
    """`InvalidUsage` unless these batches may be appended to `[lower, upper)`.

    If one batch was rewritten, stricter rules hold for all. Its times are at or beyond its rewrite frontier,
    whatever the bounds of the append, so truncation cannot select the right ones. Therefore the append must
    end where every batch ends, and begin no later than their times."""
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
        raise _invalid_rewrite(f"the append ends at {upper}, a batch at {batch.upper}")
    for part in batch.parts:
        if not lower <= (floor := _floor(batch, part)):
            raise _invalid_rewrite(f"the append begins at {lower}, beyond the times of a part, {floor}")


def _invalid_rewrite(reason: str) -> InvalidUsage:
    text = f"with rewritten batches: {reason}"
    return InvalidUsage(UsageKind.INVALID_REWRITE, text, reason=reason)


def _floor(batch: HollowBatch, part: HollowPart) -> Antichain:
    """A frontier that all times of the part are at or beyond, as they are read."""
    return batch.lower if part.rewrite is None else part.rewrite


def assembled(
    batches: Sequence[AppendableBatch], lower: Antichain, upper: Antichain, since: Antichain
) -> HollowBatch:
    """One batch of `[lower, upper)` with the parts of all batches. Each batch begins a new run."""
    parts: list[HollowPart] = []
    runs: list[int] = []
    for b in batches:
        if b.batch.parts:
            runs += [len(parts)] if parts else []
            runs += [len(parts) + run for run in b.batch.runs]
            parts += [_truncated(b.batch, part, lower, upper) for part in b.batch.parts]
    return HollowBatch(lower=lower, upper=upper, since=since, parts=tuple(parts), runs=tuple(runs))


def _truncated(batch: HollowBatch, part: HollowPart, lower: Antichain, upper: Antichain) -> HollowPart:
    """The part, marked as truncated if it may have times outside of the bounds."""
    within = lower <= _floor(batch, part) and batch.upper <= upper
    return part if within else part.replace(truncated=(lower, upper))
