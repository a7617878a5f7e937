"""What an `Indexed` refuses. Messages name the stream, the time and the frontier."""

from aiopersist.errors import Error, InvalidUsage, UsageKind
from aiopersist.frontier import Antichain


class IndexedError(Error):
    """An `Indexed` refused: nothing was changed."""


class Fenced(IndexedError):
    """Another instance has taken over: this one can do nothing any more."""


class UnknownStream(IndexedError, LookupError):
    """No stream of that name is there: it was never registered, or it was destroyed; or nothing of the
    name of the `Indexed` is there to be read."""


class Refused(IndexedError):
    """A command was refused as a whole, by the first of its entries that cannot be: `stream` is its name;
    `time` is not at or beyond `frontier`, or both are `None`: there is no such stream. `seqno` is the one
    that the command has consumed."""

    def __init__(self, seqno: int, stream: str, time: int | None, frontier: Antichain | None) -> None:
        why = "is not there" if frontier is None else f"has {frontier}, which time {time} is before"
        super().__init__(f"command {seqno} was refused: stream {stream!r} {why}")
        self.seqno = seqno
        self.stream = stream
        self.time = time
        self.frontier = frontier


class Stopped(IndexedError, InvalidUsage):
    """The `Indexed`, or what was opened of it, was stopped."""

    def __init__(self, message: str, *, shard_id: str | None = None) -> None:
        InvalidUsage.__init__(self, UsageKind.CLOSED, message, shard_id=shard_id)
