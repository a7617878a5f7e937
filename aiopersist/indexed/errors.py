"""The errors of an `Indexed`. Messages name the stream, the time and the frontier."""

from aiopersist.base.errors import Error, InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain


class IndexedError(Error):
    """An `Indexed` refused a call: nothing was changed."""


class Fenced(IndexedError):
    """Another instance has taken over: every call of this instance fails from now on."""


class UnknownStream(IndexedError, LookupError):
    """No stream of that name exists: it was never registered, or it was destroyed. Or no `Indexed` of that
    name exists to be read."""


class Refused(IndexedError):
    """A command was refused as a whole, because of its first entry that is not possible. The `time` of that
    entry is before the `frontier` of its `stream`; both are `None` if there is no such stream.
    `seqno` is the seqno that the command has consumed."""

    def __init__(self, seqno: int, stream: str, time: int | None, frontier: Antichain | None) -> None:
        why = "is not there" if frontier is None else f"has {frontier}, which time {time} is before"
        super().__init__(f"command {seqno} was refused: stream {stream!r} {why}")
        self.seqno = seqno
        self.stream = stream
        self.time = time
        self.frontier = frontier


class Stopped(IndexedError, InvalidUsage):
    """The `Indexed` was stopped: neither it nor its snapshots can be used any more."""

    def __init__(self, message: str, *, shard_id: str | None = None) -> None:
        InvalidUsage.__init__(self, UsageKind.CLOSED, message, shard_id=shard_id)
