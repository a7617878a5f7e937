"""An oracle for an `Indexed`: plain lists of updates. Where the answer to a command was lost several
*worlds* are possible, until a read decides."""

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


@dataclass
class World:
    """A state that is possible, and what may become durable yet."""

    model: Model
    late: tuple[tuple[Any, int, int], ...] = ()
    """Commands, their segments, and their commits: of one commit all of them, or none."""
    past: tuple[Model, ...] = ()
    """Of the commands that are judged: the states on the way."""
    chosen: tuple[tuple[int, bool], ...] = ()
    """Of commands that share an unknown outcome, what it is here."""
    ended: bool = False
    """The process was killed before the rest."""

    def expanded(self) -> list["World"]:
        """This one, and those in which some of what is late has happened: in order."""
        worlds = [self]
        for group in dict.fromkeys(group for _, _, group in self.late):
            worlds += [each.landed(group) for each in worlds if any(late[2] == group for late in each.late)]
        return worlds

    def landed(self, group: int) -> "World":
        """That commit has happened; those before it never will."""
        model, at = self.model.copy(), max(n for n, late in enumerate(self.late) if late[2] == group)
        for command, segment, of in self.late:
            if of == group:
                model.run(command, segment)
        return World(model, self.late[at + 1 :])

    def after(self, command: Any, result: Any, segment: int) -> list["World"]:
        """The worlds in which a caller is told that."""
        what = result[0]
        if isinstance(command, Look) or what in ("failed", "Fenced", "Stopped"):
            return [self]
        did = self.model.copy()
        told = did.run(command, segment)
        if what in ANSWERS:
            late = () if told == result else self.late
            return [World(did, late, (*self.past, did), self.chosen)] if told == result else []
        with_it = World(did, self.late, (*self.past, did), self.chosen)
        if what == "gone":
            without = World(self.model, self.late, self.past, self.chosen, ended=True)
            return [self] if self.ended else [with_it, without]
        group = id(result[1]) if what == "unknown" else id(result)
        late = World(self.model, (*self.late, (command, segment, group)), self.past, self.chosen)
        if what == "cancelled":
            return [with_it, late]
        assert what == "unknown", result
        worlds = self._by_group(group, with_it, late)
        if isinstance(command, Destroy) and self._told(group):
            return [self]  # it stands alone: what it had to wait for failed, so it did nothing
        return [*worlds, self] if isinstance(command, Register) and self._told(group) else worlds

    def _told(self, group: int) -> bool:
        """Whether an earlier call has the same error."""
        return group in dict(self.chosen)

    def _by_group(self, group: int, with_it: "World", late: "World") -> list["World"]:
        """Those of one commit happened all, or none did."""
        chosen = dict(self.chosen).get(group)
        with_it.chosen = late.chosen = (*self.chosen, (group, True))
        late.chosen = (*self.chosen, (group, False))
        return [with_it, late] if chosen is None else [with_it] if chosen else [late]
