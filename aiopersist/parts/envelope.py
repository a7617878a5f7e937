"""Values that travel between processes as bytes.

The first line has the kind of value, its format and the checksum of the rest; the rest is JSON. Within a
trace, the format has the next number, and a line with the context of the trace precedes the JSON, so that the
process that continues the work also continues the trace.
"""

import json
import re
from typing import Any, NamedTuple, TypeVar

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.part.inline import checksum
from aiopersist.measure.providers import carrier
from aiopersist.state.record import Record, decoder, encode

R = TypeVar("R", bound=Record)


class Envelope(NamedTuple):
    """A kind of value: the word for messages (`batch`), and its format."""

    what: str
    format: int
    """The number without a trace; the next number is with a trace."""

    @property
    def magic(self) -> bytes:
        return f"aiopersist-{self.what}".encode()

    def encode(self, value: Record) -> bytes:
        """The value as bytes."""
        body, number, trace = encode(value), self.format, carrier()
        if trace:
            body, number = b"%s\n%s" % (json.dumps(trace).encode(), body), number + 1
        return b"%s %d %s\n%s" % (self.magic, number, checksum(body).encode(), body)

    def decode(self, data: Any, model: type[R], shard_id: str | None = None) -> R:
        """The value of these bytes; `InvalidUpdate` for bytes of another kind or format, or damaged bytes."""
        what = self.what

        def refused(text: str) -> InvalidUpdate:
            return InvalidUpdate(text, shard_id=shard_id)

        if not isinstance(data, bytes | bytearray | memoryview):
            raise refused(f"a transmitted {what} is bytes, not {type(data).__name__}")
        head, _, body = bytes(data).partition(b"\n")
        fields = head.split(b" ")
        if len(fields) != 3 or fields[0] != self.magic or not re.fullmatch(rb"[0-9]+", fields[1]):
            raise refused(f"{bytes(data)[:40]!r}... is no transmitted {what}")
        if fields[1] not in (b"%d" % self.format, b"%d" % (self.format + 1)):
            text = f"a {what} of format {fields[1].decode():.20}; this version reads {self.format}"
            raise refused(f"{text}: upgrade aiopersist")
        if checksum(body).encode() != fields[2]:
            raise refused(f"a transmitted {what} is damaged: it does not have its checksum")
        if fields[1] != b"%d" % self.format:
            _, _, body = body.partition(b"\n")
        try:
            value: R = decoder(model)(body)
        except (ValueError, RecursionError) as error:
            raise refused(f"a transmitted {what} cannot be read: {error}") from error
        return value

    def trace(self, data: bytes) -> dict[str, str]:
        """The context of the trace in which the value was encoded; empty without one, or for other bytes."""
        head, _, body = bytes(data).partition(b"\n")
        if not head.startswith(b"%s %d " % (self.magic, self.format + 1)):
            return {}
        try:
            context = json.loads(body.partition(b"\n")[0])
        except (ValueError, RecursionError):
            return {}
        return {str(name): str(text) for name, text in context.items()} if isinstance(context, dict) else {}
