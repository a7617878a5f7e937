"""The errors of an `Indexed`. Messages name the stream, the time and the frontier."""

from aiopersist.base.errors import Error, InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain


class IndexedError(Error):
    """An `Indexed` refused a call and changed nothing."""


class Fenced(IndexedError):
    """Another instance has taken over: every later call of this instance fails."""


class UnknownStream(IndexedError, LookupError):
    """The stream was never registered, or was destroyed. Or a reader found no `Indexed` of that name."""


class Refused(IndexedError):
    """A whole command was refused because of one entry, the first that is not possible. The `time` of this
    entry is before the `frontier` of its `stream`; both are `None` if the stream does not exist. `seqno` is
    the seqno that the command has consumed."""

    def __init__(self, seqno: int, stream: str, time: int | None, frontier: Antichain | None) -> None:
        text = f"time {time} is before {frontier} of stream {stream!r}"
        reason = f"stream {stream!r} does not exist" if frontier is None else text
        super().__init__(f"command {seqno} was refused: {reason}")
        self.seqno = seqno
        self.stream = stream
        self.time = time
        self.frontier = frontier


class Stopped(IndexedError, InvalidUsage):
    """The `Indexed` was stopped: it and its snapshots can no longer be used."""

    def __init__(self, message: str, *, shard_id: str | None = None) -> None:
        InvalidUsage.__init__(self, UsageKind.CLOSED, message, shard_id=shard_id)
