"""All transitions of one stream's arrangement, in pairs of a plan and its application. Pure.

1. *Append*: a batch of updates, at any times that are not sealed, becomes the newest unsealed batch.
2. *Seal* moves updates to the trace logically; no data moves.
3. *Drain* moves them physically: the unsealed updates before `seal`, sorted and consolidated, become one
   batch of the trace. Then unsealed batches wholly before the trace's upper are *evicted*, and those partly
   before it are *trimmed*, one at a time.
4. *Compact*: two neighbours of the trace of equal level become one batch.

A plan (`Drain`, `Trim`, `Compaction`) says what to read and write. Its executor returns a batch, and gets the
`Rearrangement` to apply, or `None` if the plan no longer fits. This module reads no data, so it cannot check
the contents of the batch; `streams_invariants` checks its description.

*Why the work is O(n log n).* A merge costs as much as its parents hold. If nothing cancels, the result holds
as much and is a level higher, so an update is rewritten once per level. Updates that cancel are never
rewritten again, and a result that is no larger than a parent does not rise. Levels fall from old to young,
and two neighbours of one level are merged as soon as since has passed them, so there are few batches.
"""

from dataclasses import dataclass
from itertools import pairwise

from aiopersist.state.streams import Arrangement, Rearrangement, TraceBatch, UnsealedBatch

# --- unsealed --------------------------------------------------------------------------------------


def appended(arrangement: Arrangement, batch: UnsealedBatch) -> Rearrangement:
    """Makes `batch` the newest. `ValueError` unless it has updates, begins at the stream's seqno, covers at
    least one seqno, and has no time before the trace's upper."""
    if not any(part.rows for part in batch.parts):
        raise ValueError(f"unsealed batch {_interval(batch)} is empty")
    if batch.seqno_lower != arrangement.seqno or batch.seqno_upper <= batch.seqno_lower:
        raise ValueError(f"unsealed batch {_interval(batch)} does not begin at seqno {arrangement.seqno}")
    if batch.time_least < arrangement.trace_upper:
        raise ValueError(
            f"unsealed batch {_interval(batch)} holds time {batch.time_least}, "
            f"but the trace's upper is {{{arrangement.trace_upper}}}"
        )
    return Rearrangement(unsealed={batch.seqno_lower: batch}, seqno=batch.seqno_upper)


def unsealed_between(arrangement: Arrangement, lower: int, upper: int | None = None) -> list[UnsealedBatch]:
    """The batches that may have updates at times in `[lower, upper)`, or from `lower` on without an `upper`.
    The caller filters their other updates. `ValueError` if `upper` is before `lower`."""
    if upper is not None and upper < lower:
        raise ValueError(f"upper {{{upper}}} is before lower {{{lower}}}")
    return [
        batch
        for batch in arrangement.unsealed.values()
        if lower <= batch.time_greatest and (upper is None or max(lower, batch.time_least) < upper)
    ]


def evicted(arrangement: Arrangement) -> Rearrangement | None:
    """Drops the batches wholly before the trace's upper; `None` if there are none."""
    upper = arrangement.trace_upper
    dropped = tuple(at for at, batch in arrangement.unsealed.items() if batch.time_greatest < upper)
    return Rearrangement(drop_unsealed=dropped) if dropped else None


@dataclass(frozen=True)
class Trim:
    """Write `batch` again, with only its updates at times `>= lower`."""

    batch: UnsealedBatch
    lower: int


def to_trim(arrangement: Arrangement) -> Trim | None:
    """The oldest batch partly before the trace's upper."""
    upper = arrangement.trace_upper
    for batch in arrangement.unsealed.values():
        if batch.time_least < upper <= batch.time_greatest:
            return Trim(batch, upper)
    return None


def trimmed(arrangement: Arrangement, trim: Trim, batch: UnsealedBatch) -> Rearrangement | None:
    """Replaces the batch of the plan by `batch`; `None` if the arrangement no longer has it."""
    if arrangement.unsealed.get(trim.batch.seqno_lower) != trim.batch:
        return None
    return Rearrangement(unsealed={trim.batch.seqno_lower: batch})


# --- frontiers -------------------------------------------------------------------------------------


def sealed(arrangement: Arrangement, time: int) -> Rearrangement | None:
    """Seals the times before `time`; `None` if a later time was sealed before."""
    return Rearrangement(seal=time) if arrangement.seal <= time else None


def compaction_allowed(arrangement: Arrangement, since: int) -> Rearrangement | None:
    """Moves since to `since`; `None` if it would go back."""
    return Rearrangement(since=since) if arrangement.since <= since else None


# --- the trace -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drain:
    """Read these unsealed batches at times in `[lower, upper)`, and make one batch of the trace."""

    lower: int
    upper: int
    batches: tuple[UnsealedBatch, ...]


def to_drain(arrangement: Arrangement) -> Drain | None:
    """Drain the updates that were sealed since the last drain; `None` if no batch has any of them."""
    lower, upper = arrangement.trace_upper, arrangement.seal
    if lower == upper:
        return None
    batches = tuple(unsealed_between(arrangement, lower, upper))
    return Drain(lower, upper, batches) if batches else None


def drained(arrangement: Arrangement, drain: Drain, batch: TraceBatch) -> Rearrangement | None:
    """Makes `batch` the youngest of the trace; `None` if the trace has moved on. In a batch without updates
    all updates cancelled out; then the unsealed batches can be evicted."""
    if arrangement.trace_upper != drain.lower:
        return None
    if (batch.lower, batch.upper, batch.since, batch.level) != (drain.lower, drain.upper, 0, 0):
        raise ValueError(f"{batch!r} is not what {drain!r} asks for")
    return Rearrangement(trace={batch.lower: batch})


@dataclass(frozen=True)
class Compaction:
    """Make one batch of two neighbours, with times advanced to `since`."""

    older: TraceBatch
    younger: TraceBatch
    since: int


def to_compact(arrangement: Arrangement) -> Compaction | None:
    """The oldest two neighbours of equal level, if since has passed the younger one."""
    for older, younger in pairwise(arrangement.trace.values()):
        if younger.upper > arrangement.since:
            return None
        if older.level == younger.level:
            return Compaction(older, younger, arrangement.since)
    return None


def level_after(compaction: Compaction, updates: int) -> int:
    """The level of a result with that many updates."""
    older, younger = compaction.older, compaction.younger
    return older.level + (updates > older.updates and updates > younger.updates)


def compacted(arrangement: Arrangement, compaction: Compaction, batch: TraceBatch) -> Rearrangement | None:
    """Replaces the two batches by `batch`; `None` if one of them has changed or is gone."""
    older, younger = compaction.older, compaction.younger
    if arrangement.trace.get(older.lower) != older or arrangement.trace.get(younger.lower) != younger:
        return None
    level = level_after(compaction, batch.updates)
    expected = (older.lower, younger.upper, compaction.since, level)
    if (batch.lower, batch.upper, batch.since, batch.level) != expected:
        raise ValueError(f"{batch!r} is not what {compaction!r} asks for")
    return Rearrangement(trace={older.lower: batch}, drop_trace=(younger.lower,))


# --- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """The data of a snapshot: the trace, and the updates of these unsealed batches at or beyond
    `trace_upper`. Their other updates are in the trace. All times are advanced to `since`."""

    trace: tuple[TraceBatch, ...]
    unsealed: tuple[UnsealedBatch, ...]
    trace_upper: int
    since: int


def contents(arrangement: Arrangement) -> Contents:
    """All updates, each once."""
    upper = arrangement.trace_upper
    unsealed = tuple(unsealed_between(arrangement, upper))
    return Contents(tuple(arrangement.trace.values()), unsealed, upper, arrangement.since)


def _interval(batch: UnsealedBatch) -> str:
    return f"[{batch.seqno_lower}, {batch.seqno_upper})"
