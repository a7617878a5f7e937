"""An oracle for an `Indexed`: commands on plain lists of updates."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Row = tuple[Any, Any, int, int]
"""Key, val, time, diff."""


class Write(NamedTuple):
    entries: tuple[tuple[str, tuple[Row, ...]], ...]
    slowly: bool = False


class Seal(NamedTuple):
    names: tuple[str, ...]
    time: int


class Allow(NamedTuple):
    sinces: tuple[tuple[str, int], ...]


class Register(NamedTuple):
    name: str
    right: bool = True


class Destroy(NamedTuple):
    name: str


class Look(NamedTuple):
    """A snapshot, taken among commands."""

    name: str


class Told(NamedTuple):
    """What listeners are to be told of one command."""

    segment: int
    seqno: int
    name: str
    what: str
    """`rows`, `seal` or `end`."""
    data: Any


@dataclass
class Kept:
    """One stream."""

    rows: list[Row] = field(default_factory=list)
    seal: int = 0
    since: int = 0
    seqno: int = 0
    """Where its next batch begins, if every command is a commit."""


def summed(rows: Iterable[Row], since: int = 0) -> dict[Any, int]:
    sums: Counter[Any] = Counter()
    for key, val, time, diff in rows:
        sums[key, val, max(time, since)] += diff
    return {at: diff for at, diff in sums.items() if diff}


class Model:
    """What the specification says that commands do."""

    def __init__(self) -> None:
        self.seqno = 0
        self.streams: dict[str, Kept] = {}
        self.destroyed: set[str] = set()
        self.log: list[Told] = []

    def copy(self) -> "Model":
        new = Model()
        new.seqno, new.destroyed, new.log = self.seqno, {*self.destroyed}, [*self.log]
        new.streams = {
            name: Kept([*kept.rows], kept.seal, kept.since, kept.seqno) for name, kept in self.streams.items()
        }
        return new

    def key(self) -> Any:
        """Equal for equal states."""
        streams = {n: (k.seal, k.since) for n, k in self.streams.items()}
        return self.seqno, tuple(sorted(streams.items())), frozenset(self.destroyed), tuple(self.log)

    def look(self, name: str) -> Any:
        """What a snapshot shows."""
        if (kept := self.streams.get(name)) is None:
            return ("UnknownStream",)
        return self.seqno, kept.since, kept.seal, summed(kept.rows, kept.since)

    def run(self, command: Any, segment: int) -> Any:
        """Do it; what its caller is told."""
        if isinstance(command, Register):
            return self._register(command)
        if isinstance(command, Destroy):
            return self._destroy(command, segment)
        self.seqno += 1
        refusal = self._refusal(command)
        if refusal is not None:
            return ("Refused", self.seqno, *refusal)
        if isinstance(command, Write):
            self._write(command, segment)
        elif isinstance(command, Seal):
            for name in command.names:
                self.streams[name].seal = command.time
                self.log.append(Told(segment, self.seqno, name, "seal", command.time))
        else:
            for name, since in command.sinces:
                self.streams[name].since = since
        return ("seqno", self.seqno)

    def _refusal(self, command: Any) -> tuple[str, int | None, int | None] | None:
        sinces = {name: kept.since for name, kept in self.streams.items()}
        for name, time, frontier in self._bounds(command):
            if name not in self.streams:
                return name, None, None
            bound = sinces[name] if frontier == "since" else self.streams[name].seal
            if time is not None and time < bound:
                return name, time, bound
            if frontier == "since" and time is not None:
                sinces[name] = time
        return None

    def _bounds(self, command: Any) -> Iterator[tuple[str, int | None, str]]:
        if isinstance(command, Write):
            for name, rows in command.entries:
                yield name, None, "seal"
                yield from ((name, time, "seal") for _, _, time, _ in rows)
        elif isinstance(command, Seal):
            yield from ((name, command.time, "seal") for name in command.names)
        else:
            yield from ((name, since, "since") for name, since in command.sinces)

    def _write(self, command: Write, segment: int) -> None:
        for name, rows in command.entries:
            self.streams[name].rows += rows
            if rows:
                self.streams[name].seqno = self.seqno
                self.log.append(Told(segment, self.seqno, name, "rows", rows))

    def _register(self, command: Register) -> Any:
        if command.name in self.destroyed:
            return ("UnknownStream",)
        if command.name in self.streams and not command.right:
            return ("CodecMismatch",)
        self.streams.setdefault(command.name, Kept())
        return ("done",)

    def _destroy(self, command: Destroy, segment: int) -> Any:
        if command.name in self.destroyed:
            return ("done", False)
        if command.name not in self.streams:
            return ("UnknownStream",)
        del self.streams[command.name]
        self.destroyed.add(command.name)
        self.log.append(Told(segment, self.seqno, command.name, "end", None))
        return ("done", True)


ANSWERS = ("seqno", "Refused", "done", "UnknownStream", "CodecMismatch")
