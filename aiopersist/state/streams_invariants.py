"""The invariants of every arrangement, as named predicates. They are checked before a version is written, and
for every full state that is read."""

from itertools import pairwise

from aiopersist.state.streams import Arrangement, Streams


def seqno_intervals_are_in_order(arrangement: Arrangement) -> bool:
    """No interval is empty, and each begins at the end of the one before, or later (after evictions, or
    commands without updates for this stream). So no update is there twice."""
    batches = list(arrangement.unsealed.values())
    return (
        all(at == batch.seqno_lower < batch.seqno_upper for at, batch in arrangement.unsealed.items())
        and all(a.seqno_upper <= b.seqno_lower for a, b in pairwise(batches))
        and (not batches or batches[-1].seqno_upper <= arrangement.seqno)
    )


def bounds_of_times_are_bounds(arrangement: Arrangement) -> bool:
    """`<=` and not `<`: a batch may hold one time alone."""
    return all(batch.time_least <= batch.time_greatest for batch in arrangement.unsealed.values())


def trace_is_contiguous(arrangement: Arrangement) -> bool:
    """The batches cover the times from 0 on without gap or overlap, and none is empty."""
    batches = list(arrangement.trace.values())
    return (
        all(at == batch.lower < batch.upper for at, batch in arrangement.trace.items())
        and all(a.upper == b.lower for a, b in pairwise(batches))
        and (not batches or batches[0].lower == 0)
    )


def trace_is_sealed(arrangement: Arrangement) -> bool:
    """`<=` and not `<`: the trace may lag behind where there were no updates to drain."""
    return arrangement.trace_upper <= arrangement.seal


def levels_fall(arrangement: Arrangement) -> bool:
    """Levels fall from old batches to new ones, or stay the same. So there are few batches before since."""
    return all(a.level >= b.level for a, b in pairwise(arrangement.trace.values()))


def batches_follow_since(arrangement: Arrangement) -> bool:
    """No batch has forgotten more than since allows."""
    return all(batch.since <= arrangement.since for batch in arrangement.trace.values())


ALL = (
    seqno_intervals_are_in_order,
    bounds_of_times_are_bounds,
    trace_is_contiguous,
    trace_is_sealed,
    levels_fall,
    batches_follow_since,
)


def broken(arrangement: Arrangement) -> list[str]:
    """The names of the invariants that are broken."""
    return [holds.__name__ for holds in ALL if not holds(arrangement)]


def streams_are_arranged(streams: Streams) -> bool:
    """Each existing stream has an arrangement, there are no others, and no destroyed name exists."""
    return (
        streams.names.keys() == streams.arrangements.keys() and not streams.destroyed & streams.names.keys()
    )
