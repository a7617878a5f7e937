"""The contents of an `Indexed`: many streams, each with an arrangement of its data, under one owner.

Times and seqnos are ints. Batches are in maps by a key that only their replacement has again: unsealed
batches by their first seqno, batches of the trace by their first time. So a change names the few batches that
it sets and drops, and the size of a commit depends on its changes only.

*Owner.* Only one instance at a time changes streams. The state has its id; every change checks the id, and an
opening replaces it. The keys of the instance's blobs also have the id: it is their registered writer as long
as it is the owner.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

from aiopersist.state.record import HollowPart, Record

B = TypeVar("B", "UnsealedBatch", "TraceBatch")


class UnsealedBatch(Record, frozen=True, kw_only=True):
    """Updates in the order of their arrival, of the commands with seqnos `n` in
    `seqno_lower < n <= seqno_upper`."""

    seqno_lower: int
    seqno_upper: int
    time_least: int
    time_greatest: int
    """The least and the greatest time of its updates, which are not sorted by time."""
    parts: tuple[HollowPart, ...]


class TraceBatch(Record, frozen=True, kw_only=True):
    """All updates at times in `[lower, upper)`, sorted and consolidated, times advanced to `since`. So times
    may reach or pass `upper` where since does."""

    lower: int
    upper: int
    since: int
    level: int
    updates: int
    """The number of updates of its parts."""
    parts: tuple[HollowPart, ...] = ()


class Arrangement(Record, frozen=True, kw_only=True):
    """One stream's data. Logically the trace has all updates before `seal`; the batches of the trace have
    those before its upper."""

    seal: int = 0
    """Updates at times before it are complete."""
    since: int = 0
    """History before it is forgotten: all reads advance times to it. It may be beyond `seal`."""
    seqno: int = 0
    """The lower seqno of the next unsealed batch."""
    unsealed: dict[int, UnsealedBatch] = {}
    trace: dict[int, TraceBatch] = {}
    """Oldest first, contiguous from 0."""

    @property
    def trace_upper(self) -> int:
        """Updates at times before it are in the trace."""
        return next(reversed(self.trace.values())).upper if self.trace else 0

    @property
    def parts(self) -> Iterator[HollowPart]:
        """All parts of its batches."""
        return _parts_of(self.unsealed.values(), self.trace.values())


class Rearrangement(Record, frozen=True, kw_only=True):
    """The changes of an arrangement: the values that they set, and the keys that they drop."""

    seal: int | None = None
    since: int | None = None
    seqno: int | None = None
    unsealed: dict[int, UnsealedBatch] = {}
    trace: dict[int, TraceBatch] = {}
    drop_unsealed: tuple[int, ...] = ()
    drop_trace: tuple[int, ...] = ()


class Streams(Record, frozen=True, kw_only=True):
    """All streams of an `Indexed`."""

    owner: str
    """The id of the instance that may change the streams; empty after the last one has closed."""
    revision: int = 0
    """Rises with every change of an owner: after a lost answer it proves that the change happened."""
    seqno: int = 0
    """The number of the last command."""
    names: dict[str, int] = {}
    """The existing streams, with the ids of their schemas."""
    destroyed: frozenset[str] = frozenset()
    """Names that are never used again."""
    arrangements: dict[str, Arrangement] = {}


class StreamsChanges(Record, frozen=True, kw_only=True):
    """The changes of the streams."""

    owner: str | None = None
    revision: int | None = None
    seqno: int | None = None
    names: dict[str, int] = {}
    """New streams, with the ids of their schemas."""
    destroyed: tuple[str, ...] = ()
    """Streams that are destroyed, with their data."""
    arrangements: dict[str, Rearrangement] = {}


def rearranged(changes: Rearrangement, arrangement: Arrangement) -> Arrangement:
    """The arrangement after the changes. All processes use this function, after commits and reads."""
    return arrangement.replace(
        **_set(changes, "seal", "since", "seqno"),
        unsealed=_changed(arrangement.unsealed, changes.unsealed, changes.drop_unsealed),
        trace=_changed(arrangement.trace, changes.trace, changes.drop_trace),
    )


def _changed(now: dict[int, B], changed: dict[int, B], dropped: tuple[int, ...]) -> dict[int, B]:
    if not changed and not dropped:
        return now
    after = {**now, **changed}
    for key in dropped:
        del after[key]
    return after


def _set(changes: Rearrangement | StreamsChanges, *names: str) -> dict[str, object]:
    return {name: value for name in names if (value := getattr(changes, name)) is not None}


def difference(before: Arrangement, after: Arrangement) -> Rearrangement | None:
    """The changes from `before` to `after`; `None` without any. The cost grows with their batches."""
    changes = {
        **{
            name: getattr(after, name)
            for name in ("seal", "since", "seqno")
            if getattr(after, name) != getattr(before, name)
        },
        **_map_difference("unsealed", before.unsealed, after.unsealed),
        **_map_difference("trace", before.trace, after.trace),
    }
    return Rearrangement(**changes) if changes else None


def _map_difference(
    name: str, before: Mapping[int, object], after: Mapping[int, object]
) -> dict[str, object]:
    if before is after:
        return {}
    changed = {key: batch for key, batch in after.items() if before.get(key) is not batch}
    dropped = tuple(key for key in before if key not in after)
    changes = {name: changed, f"drop_{name}": dropped}
    return {name: value for name, value in changes.items() if value}


def changed_streams(changes: StreamsChanges, streams: Streams | None) -> Streams:
    """The streams after the changes; `streams` is `None` before the first change."""
    streams = Streams(owner="") if streams is None else streams
    names, arrangements = streams.names, streams.arrangements
    if changes.names or changes.destroyed:
        names = {**names, **changes.names}
    if changes.names or changes.destroyed or changes.arrangements:
        arrangements = {**arrangements, **{name: Arrangement() for name in changes.names}}
    for name, change in changes.arrangements.items():
        arrangements[name] = rearranged(change, arrangements[name])
    for name in changes.destroyed:
        del names[name], arrangements[name]
    return streams.replace(
        **_set(changes, "owner", "revision", "seqno"),
        names=names,
        destroyed=streams.destroyed.union(changes.destroyed) if changes.destroyed else streams.destroyed,
        arrangements=arrangements,
    )


# --- blobs -----------------------------------------------------------------------------------------


def parts_of_streams(streams: Streams | None) -> Iterator[HollowPart]:
    """All parts that the streams name."""
    for arrangement in streams.arrangements.values() if streams is not None else ():
        yield from arrangement.parts


def new_parts(changes: StreamsChanges | None) -> list[HollowPart]:
    """The parts of the batches that `changes` sets."""
    every = changes.arrangements.values() if changes is not None else ()
    return [part for change in every for part in _parts_of(change.unsealed.values(), change.trace.values())]


def gone_parts(changes: StreamsChanges | None, streams: Streams | None) -> list[HollowPart]:
    """The parts of the batches of `streams` that `changes` replaces or drops."""
    if changes is None or streams is None:
        return []
    parts: list[HollowPart] = []
    for name in changes.destroyed:
        parts += streams.arrangements[name].parts
    for name, change in changes.arrangements.items():
        if (now := streams.arrangements.get(name)) is not None and name not in changes.destroyed:
            unsealed = (now.unsealed.get(key) for key in (*change.unsealed, *change.drop_unsealed))
            trace = (now.trace.get(key) for key in (*change.trace, *change.drop_trace))
            parts += _parts_of(filter(None, unsealed), filter(None, trace))
    return parts


def _parts_of(unsealed: Iterable[UnsealedBatch], trace: Iterable[TraceBatch]) -> Iterator[HollowPart]:
    batches: Iterable[UnsealedBatch | TraceBatch] = chain(unsealed, trace)
    return (part for batch in batches for part in batch.parts)
