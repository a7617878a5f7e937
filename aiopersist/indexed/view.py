"""A view of the batches and frontiers of a stream, for people, dashboards and tests."""

from pydantic import BaseModel

from aiopersist.state.streams import Arrangement


class StreamView(BaseModel, frozen=True):
    """The durable state of one stream. Times are ints."""

    seal: int
    since: int
    trace_upper: int
    """Updates at times before this one are in the trace."""
    unsealed: list[tuple[int, int, int, int]]
    """`(seqno_lower, seqno_upper, least, greatest)` of each batch, oldest first. A batch has the commands `n`
    with `seqno_lower < n <= seqno_upper`; the last two are its least and greatest times."""
    trace: list[tuple[int, int, int, int, int]]
    """`(lower, upper, since, level, updates)` of each batch, oldest first."""
    in_flight: bool
    """Whether a compaction was requested, and its response is not applied yet."""


def view_of(arrangement: Arrangement, *, in_flight: bool) -> StreamView:
    """The view of a stream with this arrangement."""
    return StreamView(
        seal=arrangement.seal,
        since=arrangement.since,
        trace_upper=arrangement.trace_upper,
        unsealed=[
            (batch.seqno_lower, batch.seqno_upper, batch.time_least, batch.time_greatest)
            for batch in arrangement.unsealed.values()
        ],
        trace=[
            (batch.lower, batch.upper, batch.since, batch.level, batch.updates)
            for batch in arrangement.trace.values()
        ],
        in_flight=in_flight,
    )
