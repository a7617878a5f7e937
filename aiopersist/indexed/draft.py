"""A draft of the streams: the effect of a group of commands, before it is durable. Pure.

Commands are applied one after the other, in the order of their calls. `accepted` then has the updates to
write, and `finish` returns the changes of the streams. A seqno is the number of a write, of a seal, or of a
move of sinces, even of a refused one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from aiopersist.base.errors import CodecMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.times import Seen
from aiopersist.indexed import arrangement as rules
from aiopersist.indexed.errors import Refused, UnknownStream
from aiopersist.state.model import State
from aiopersist.state.record import HollowPart
from aiopersist.state.streams import (
    Arrangement,
    Rearrangement,
    Streams,
    StreamsChanges,
    UnsealedBatch,
    difference,
    rearranged,
)


@dataclass(eq=False)
class StreamUpdates:
    """Updates for one stream, converted and checked."""

    stream: str
    schema: Schema[Any, Any, Any]
    pieces: list[tuple[Any, int]] = field(default_factory=list)
    """In order: tables, and hollow parts of updates too large for memory; each with its goodbytes."""
    seen: Seen = field(default_factory=Seen)
    count: int = 0
    goodbytes: int = 0


class StreamCommand(ABC):
    """A command of a caller. A refused one raises, and has changed nothing but the seqno."""

    begun = False
    """Whether a commit of the command has begun: if not, it surely does not happen."""

    is_exclusive: ClassVar[bool] = False
    """Whether it needs a commit of its own."""

    @abstractmethod
    def __call__(self, draft: "Draft") -> Any: ...


class Draft:
    """See the header."""

    def __init__(self, state: State, stored: Callable[[int], Schema[Any, Any, Any]]) -> None:
        """`stored` returns a schema of `state` by its id."""
        assert state.streams is not None
        self.seqno = state.streams.seqno
        self.accepted: dict[str, list[StreamUpdates]] = {}
        """By stream, in the order of the commands."""
        self.schemas: dict[int, dict[str, Any]] = {}
        """New schemas, by id."""
        self._stored_ids = tuple(state.schemas)
        self._stored = stored
        self._streams: Streams = state.streams
        self._touched: dict[str, Arrangement] = {}
        self._names: dict[str, int] = {}
        self._destroyed: list[str] = []

    def consume(self) -> int:
        """The next seqno."""
        self.seqno += 1
        return self.seqno

    # --- streams ---------------------------------------------------------------------------------

    def find(self, name: str) -> Arrangement | None:
        """The stream after the commands so far."""
        if name in self._destroyed:
            return None
        return self._touched.get(name) or self._streams.arrangements.get(name)

    def change(self, name: str, changes: Rearrangement | None) -> None:
        """Apply these changes to an existing stream."""
        if changes is not None:
            now = self.find(name)
            assert now is not None, name
            self._touched[name] = rearranged(changes, now)

    def was_destroyed(self, name: str) -> bool:
        """Whether a stream of that name was destroyed."""
        return name in self._destroyed or name in self._streams.destroyed

    def schema_id(self, name: str) -> int:
        """The id of the schema of an existing stream."""
        created = self._names.get(name)
        return self._streams.names[name] if created is None else created

    def check_schema(self, name: str, schema: Schema[Any, Any, Any]) -> None:
        """`CodecMismatch` unless the stream has the same schema."""
        stored = self._schema(self.schema_id(name))
        if not stored.same_as(schema):
            raise CodecMismatch(schema, stored)

    def _schema(self, schema_id: int) -> Schema[Any, Any, Any]:
        record = self.schemas.get(schema_id)
        return self._stored(schema_id) if record is None else Schema.from_record(record)

    def create(self, name: str, schema: Schema[Any, Any, Any]) -> None:
        """Add a new stream."""
        ids = (*self._stored_ids, *self.schemas)
        schema_id = next((n for n in ids if self._schema(n).same_as(schema)), None)
        if schema_id is None:
            schema_id = max(ids, default=-1) + 1
            self.schemas[schema_id] = schema.to_record()
        self._names[name] = schema_id
        self._touched[name] = Arrangement()

    def destroy(self, name: str) -> None:
        """Remove an existing stream."""
        self._destroyed.append(name)
        self._touched.pop(name, None)
        self.accepted.pop(name, None)

    def accept(self, rows: StreamUpdates) -> None:
        """Add updates that are not refused."""
        if rows.count:
            self.accepted.setdefault(rows.stream, []).append(rows)

    # --- the end ---------------------------------------------------------------------------------

    def finish(self, written: Mapping[str, tuple[HollowPart, ...]]) -> StreamsChanges | None:
        """The changes of the streams, with the accepted updates in the `written` parts; `None` for none."""
        for name, updates in self.accepted.items():
            self.change(name, self._appended(name, updates, written[name]))
        changed = {
            name: change
            for name, after in self._touched.items()
            if (change := difference(self._streams.arrangements.get(name, NEW), after)) is not None
        }
        destroyed = [name for name in self._destroyed if name in self._streams.names]
        if not changed and not self._names and not destroyed and self.seqno == self._streams.seqno:
            return None
        changes: dict[str, Any] = {"revision": self._streams.revision + 1, "seqno": self.seqno}
        if self._names:
            changes["names"] = self._names
        if destroyed:
            changes["destroyed"] = tuple(destroyed)
        if changed:
            changes["arrangements"] = changed
        return StreamsChanges(**changes)

    def _appended(
        self, name: str, updates: Sequence[StreamUpdates], parts: tuple[HollowPart, ...]
    ) -> Rearrangement:
        now = self.find(name)
        assert now is not None, name
        batch = UnsealedBatch(
            seqno_lower=now.seqno,
            seqno_upper=self.seqno,
            time_least=min(rows.seen.least for rows in updates),
            time_greatest=max(rows.seen.greatest for rows in updates),
            parts=parts,
        )
        return rules.appended(now, batch)


NEW = Arrangement()


# --- commands --------------------------------------------------------------------------------------


@dataclass(eq=False)
class WriteStream(StreamCommand):
    """Write all of the updates, or none. The result is the seqno."""

    entries: list[StreamUpdates] = field(default_factory=list)

    def __call__(self, draft: Draft) -> int:
        streams = {rows.stream: draft.find(rows.stream) for rows in self.entries}
        for rows in self.entries:
            if streams[rows.stream] is not None:
                draft.check_schema(rows.stream, rows.schema)
        seqno = draft.consume()
        for rows in self.entries:
            stream = streams[rows.stream]
            if stream is None:
                raise Refused(seqno, rows.stream, None, None)
            if (time := rows.seen.first_below(stream.seal)) is not None:
                raise Refused(seqno, rows.stream, time, Antichain(stream.seal))
        for rows in self.entries:
            draft.accept(rows)
        return seqno


@dataclass(eq=False)
class Seal(StreamCommand):
    """Seal all of these streams, or none. The result is the seqno."""

    streams: tuple[str, ...]
    time: int

    def __call__(self, draft: Draft) -> int:
        seqno = draft.consume()
        for name in self.streams:
            stream = draft.find(name)
            if stream is None:
                raise Refused(seqno, name, None, None)
            if rules.sealed(stream, self.time) is None:
                raise Refused(seqno, name, self.time, Antichain(stream.seal))
        for name in self.streams:
            draft.change(name, Rearrangement(seal=self.time))
        return seqno


@dataclass(eq=False)
class AllowCompaction(StreamCommand):
    """Move the since of all these streams, or of none. The since of a stream that is listed twice does not go
    back either. The result is the seqno."""

    sinces: tuple[tuple[str, int], ...]

    def __call__(self, draft: Draft) -> int:
        seqno, moved = draft.consume(), dict[str, Arrangement]()
        for name, since in self.sinces:
            stream = moved.get(name) or draft.find(name)
            if stream is None:
                raise Refused(seqno, name, None, None)
            if (change := rules.compaction_allowed(stream, since)) is None:
                raise Refused(seqno, name, since, Antichain(stream.since))
            moved[name] = rearranged(change, stream)
        for name, after in moved.items():
            draft.change(name, Rearrangement(since=after.since))
        return seqno


@dataclass(eq=False)
class RegisterStream(StreamCommand):
    """Create the stream, unless it exists."""

    stream: str
    schema: Schema[Any, Any, Any]

    def __call__(self, draft: Draft) -> None:
        if draft.was_destroyed(self.stream):
            raise UnknownStream(f"stream {self.stream!r} was destroyed")
        if draft.find(self.stream) is None:
            draft.create(self.stream, self.schema)
        else:
            draft.check_schema(self.stream, self.schema)


@dataclass(eq=False)
class Destroy(StreamCommand):
    """Forget the stream and its data for ever. The result is `False` if it was destroyed before. It has a
    commit of its own, so that listeners first get all earlier updates."""

    is_exclusive = True
    stream: str

    def __call__(self, draft: Draft) -> bool:
        if draft.was_destroyed(self.stream):
            return False
        if draft.find(self.stream) is None:
            raise UnknownStream(f"stream {self.stream!r} was never registered")
        draft.destroy(self.stream)
        return True


@dataclass(eq=False)
class Barrier(StreamCommand):
    """Change nothing; the result comes once all earlier commands are durable."""

    def __call__(self, draft: Draft) -> None:
        return None


@dataclass(eq=False)
class Maintain(StreamCommand):
    """Apply those results of a maintenance step that still fit. Returns the names of their streams."""

    transitions: Iterable[tuple[str, "Transition"]]

    def __call__(self, draft: Draft) -> set[str]:
        applied: set[str] = set()
        for name, transition in self.transitions:
            now = draft.find(name)
            try:
                changes = transition(now) if now is not None else None
            except ValueError:  # not a result of that plan
                changes = None
            if changes is not None:
                draft.change(name, changes)
                applied.add(name)
        return applied


class Transition(Protocol):
    """The changes that apply a result to the current arrangement; `None` if it no longer fits."""

    def __call__(self, arrangement: Arrangement, /) -> Rearrangement | None: ...
