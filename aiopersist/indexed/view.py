"""What a stream looks like from within: a view for people, dashboards and tests."""

from pydantic import BaseModel, ConfigDict

from aiopersist.state.streams import Arrangement


class StreamView(BaseModel):
    """One stream, by what is durable. Times are ints."""

    model_config = ConfigDict(frozen=True)

    seal: int
    since: int
    trace_upper: int
    """Updates at times before it are in the trace."""
    unsealed: list[tuple[int, int, int, int]]
    """`(seqno_lower, seqno_upper, time_lower, time_upper)` of each batch, oldest first: it holds the commands
    `n` in `seqno_lower < n <= seqno_upper`, and its least and greatest times are the other two."""
    trace: list[tuple[int, int, int, int, int]]
    """`(lower, upper, since, level, updates)` of each batch, oldest first."""
    in_flight: bool
    """Whether a compaction was asked for, and not answered yet."""


def view_of(arrangement: Arrangement, *, in_flight: bool) -> StreamView:
    """The stream that has this data."""
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
