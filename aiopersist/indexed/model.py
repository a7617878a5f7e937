"""What is known of one stream: frozen values, and their JSON (see `state.model`).

Times and seqnos are ints. Batches are kept in maps, by numbers that nothing but their replacement has again:
unsealed ones by the seqno they begin at, those of the trace by the time they begin at. So a change names the
few that it sets and drops, and what a commit writes is proportional to it.
"""

from aiopersist.state.model import HollowPart, Record


class UnsealedBatch(Record):
    """Updates as they came, of the commands with seqnos `n` in `seqno_lower < n <= seqno_upper`."""

    seqno_lower: int
    seqno_upper: int
    time_least: int
    time_greatest: int
    """Of the updates in it, which are in no order of time."""
    parts: tuple[HollowPart, ...]
    runs: tuple[int, ...] = ()


class TraceBatch(Record):
    """All updates at times in `[lower, upper)`, sorted and consolidated, times advanced to `since`. So times
    may reach or pass `upper`, where since does."""

    lower: int
    upper: int
    since: int
    level: int
    updates: int
    """How many are in its parts."""
    parts: tuple[HollowPart, ...] = ()
    runs: tuple[int, ...] = ()


class Arrangement(Record):
    """One stream's data. Logically all that is before `seal` is in the trace; physically what is before the
    trace's upper."""

    seal: int = 0
    """Updates at times before it are complete."""
    since: int = 0
    """History before it is forgotten: every read advances times to it. It may be beyond `seal`."""
    seqno: int = 0
    """Where the next unsealed batch begins."""
    unsealed: dict[int, UnsealedBatch] = {}
    trace: dict[int, TraceBatch] = {}
    """Oldest first, contiguous from 0."""

    @property
    def trace_upper(self) -> int:
        """Updates at times before it are in the trace."""
        return next(reversed(self.trace.values())).upper if self.trace else 0


class Changes(Record):
    """What becomes of an arrangement: what is set, and what is dropped by key. What is unset stays."""

    seal: int | None = None
    since: int | None = None
    seqno: int | None = None
    unsealed: dict[int, UnsealedBatch] = {}
    trace: dict[int, TraceBatch] = {}
    drop_unsealed: tuple[int, ...] = ()
    drop_trace: tuple[int, ...] = ()


def apply(changes: Changes, arrangement: Arrangement) -> Arrangement:
    """The arrangement after the changes: the only way to the next one, for who commits and for who reads."""
    moved = {
        name: value for name in ("seal", "since", "seqno") if (value := getattr(changes, name)) is not None
    }
    unsealed = {**arrangement.unsealed, **changes.unsealed}
    trace = {**arrangement.trace, **changes.trace}
    for key in changes.drop_unsealed:
        del unsealed[key]
    for key in changes.drop_trace:
        del trace[key]
    return arrangement.replace(**moved, unsealed=unsealed, trace=trace)
