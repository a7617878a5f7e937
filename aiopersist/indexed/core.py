"""The state that the modules of one `Indexed` share: its shard, feed, owner and counters."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiopersist.base.errors import CodecMismatch, InvalidUsage, UsageKind
from aiopersist.data.types.evolve import differences
from aiopersist.data.types.schema import Schema
from aiopersist.indexed.errors import Fenced, UnknownStream
from aiopersist.indexed.listen import RecordFeed
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State
from aiopersist.state.streams import Arrangement, Streams

COUNTERS = (
    "writes",
    "records",
    "bytes",
    "failed_commands",
    "failed_steps",
    "compactions",
    "compaction_seconds",
    "compaction_bytes",
    "skipped_compactions",
    "failed_compactions",
    "unexpected_responses",
)


K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, repr=False)
class Stream(Generic[K, V]):
    """A stream of an `Indexed`, from `register` or `load`: its name and schema."""

    name: str
    schema: Schema[K, V, int]

    def __repr__(self) -> str:
        return f"Stream({self.name!r}, {self.schema!r})"


class Core:
    """See the header."""

    def __init__(self, shard: Shard, owner: str | None) -> None:
        self.shard = shard
        self.stack = shard.stack
        self.owner = owner
        """The id with which it changes streams; `None` for a reader."""
        self.fenced: Fenced | None = None
        """Set once this instance knows that another one has taken over."""
        self.feed = RecordFeed(shard, follows=owner is None)
        self.counts: Counter[str] = Counter()
        self.large_work = asyncio.Semaphore(shard.stack.settings.compactions_max)
        """Limits work that needs the memory of a compaction."""
        shard.register.on_news = lambda state: self._look_at_owner()

    @property
    def state(self) -> State:
        """The newest durable state of this instance."""
        return self.shard.state

    @property
    def streams(self) -> Streams:
        """All streams of that state."""
        streams = self.state.streams
        assert streams is not None
        return streams

    def arrangement(self, name: str) -> Arrangement:
        """The data of a stream; `UnknownStream`."""
        arrangement = self.streams.arrangements.get(name)
        if arrangement is not None:
            return arrangement
        destroyed = name in self.streams.destroyed
        raise UnknownStream(f"stream {name!r} {'was destroyed' if destroyed else 'was never registered'}")

    def schema(self, name: str) -> Schema[Any, Any, Any]:
        """The stored schema of an existing stream."""
        return self.shard.schema(self.streams.names[name])

    def check_schema(self, stream: Stream[Any, Any]) -> None:
        """`CodecMismatch` unless the stored schema is the same; `UnknownStream`."""
        self.arrangement(stream.name)
        stored = self.schema(stream.name)
        if not stored.same_as(stream.schema):
            text = f"stream {stream.name!r} has another schema: {differences(stored, stream.schema)}"
            raise CodecMismatch(stream.schema, stored, differences=text, shard_id=self.shard.id)

    def check_owner(self) -> str:
        """The owner's id; `Fenced` if this instance knows that another one has taken over."""
        if self.fenced is not None:
            raise Fenced(*self.fenced.args, shard_id=self.shard.id)
        if self.owner is None:
            raise InvalidUsage(UsageKind.INVALID_MODE, "it was opened readonly", shard_id=self.shard.id)
        return self.owner

    def _look_at_owner(self) -> None:
        if self.owner is not None and self.streams.owner != self.owner:
            self.be_fenced(Fenced("another instance has taken over", shard_id=self.shard.id))

    def be_fenced(self, error: Fenced) -> None:
        """Let every later call of this instance raise `error`, and end its listeners with it."""
        if self.fenced is None:
            self.fenced = error
            self.feed.fail(error)

    @property
    def inline_room(self) -> int:
        """Bytes that one version may still store inline."""
        settings = self.stack.settings
        rest = settings.indexed_inline_total_max_bytes - self.state.inline_bytes
        return min(rest, settings.inline_writes_total_max_bytes)

    def counters(self) -> dict[str, int | float]:
        """Counts of the contents, and of the work of this instance since it was opened."""
        arrangements = self.streams.arrangements.values()
        unsealed = [p for a in arrangements for batch in a.unsealed.values() for p in batch.parts]
        trace = [p for a in arrangements for batch in a.trace.values() for p in batch.parts]
        return {
            "streams": len(self.streams.names),
            "unsealed_blobs": sum(part.key is not None for part in unsealed),
            "unsealed_bytes": sum(part.size for part in unsealed),
            "trace_blobs": sum(part.key is not None for part in trace),
            "trace_bytes": sum(part.size for part in trace),
            **{name: self.counts[name] for name in COUNTERS},
        }
