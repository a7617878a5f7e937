"""What the calls of clients were told: events, which a process writes down as they happen, and the operations
that these make up.

Times are those of the monotonic clock, which all processes of a machine share. Vals say whose they are: each
is written by one operation, and in one run of it.
"""

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

Key = tuple[str, Any]
"""A table, and a key of it."""
THERE = "*"
"""In reads: some val."""


class Found(NamedTuple):
    """A range of keys, and the entries that were there."""

    table: str
    start: Any
    stop: Any
    entries: Mapping[Any, Any]


@dataclass(frozen=True)
class Run:
    """What an operation saw, and what it meant to write then; `None` stands for absent."""

    reads: Mapping[Key, Any] = field(default_factory=dict)
    ranges: tuple[Found, ...] = ()
    writes: Mapping[Key, Any] = field(default_factory=dict)

    @property
    def tables(self) -> set[str]:
        return {table for table, _ in (*self.reads, *self.writes)} | {found.table for found in self.ranges}


TRANSACTIONS = ("transact", "transfer", "look")


# --- events -------------------------------------------------------------------------------------------


class Began(NamedTuple):
    """A client makes the call. `run`: what it will write, where that is known before."""

    op: str
    client: str
    at: float
    move: Any
    run: Run | None = None


class Ran(NamedTuple):
    """A function of the call ran."""

    op: str
    run: Run


class Told(NamedTuple):
    """The call was answered. `run`: what it saw, and wrote if it writes; `None`: one of its runs."""

    op: str
    client: str
    at: float
    time: int | None = None
    run: Run | None = None


class Failed(NamedTuple):
    """The call was answered by an error that rests on what it saw, and wrote nothing."""

    op: str
    client: str
    at: float
    run: Run


class Refused(NamedTuple):
    """The call surely did nothing."""

    op: str


class Settled(NamedTuple):
    """By its id: at what time it happened, or that it did not."""

    op: str
    time: int | None


Event = Began | Ran | Told | Failed | Refused | Settled
Note = Callable[[Event], None]


def writes_to(file: int) -> Note:
    """Writes events down at once, so that they survive the process."""

    def note(event: Event) -> None:
        os.write(file, pickle.dumps(event))

    return note


def events_of(path: Path) -> Iterator[Event]:
    """The events of a file, without one that was cut off."""
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except (EOFError, pickle.UnpicklingError):
                return


# --- operations ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Op:
    """One operation, which may have been called several times with one id."""

    name: str
    kind: str
    began: float
    ended: float = inf
    """When it was first answered."""
    client: str = ""
    """The one that was answered first, if what it saw itself tells so."""
    runs: list[Run] = field(default_factory=list)
    """One of these is what it saw and did, if it did anything."""
    time: int | None = None
    """At which it is in, or that of a read at a time."""
    wrong: list[str] = field(default_factory=list)
    """Answers that cannot be."""
    calls: int = 0
    refusals: int = 0
    settled: bool = False
    """Whether `time` is all there is."""

    @property
    def answered(self) -> bool:
        return self.ended < inf

    @property
    def did_nothing(self) -> bool:
        """Surely."""
        return (self.settled and self.time is None) or self.refusals == self.calls > 0

    @property
    def may_write(self) -> bool:
        return any(run.writes for run in self.runs)

    @property
    def tables(self) -> set[str]:
        return {table for run in self.runs for table in run.tables}

    def __repr__(self) -> str:
        span = f"{self.began:.4f}-{self.ended:.4f}"
        return f"<{self.kind} {self.name} of {self.client} {span} at {self.time}: {self.runs[-3:]}>"


def ops_of(events: Iterable[Event]) -> list[Op]:
    """The operations. Events of one client are in their order."""
    ops: dict[str, Op] = {}
    events = list(events)
    for event in events:
        if isinstance(event, Began):
            op = ops.setdefault(event.op, Op(event.op, event.move.kind, event.at))
            op.began = min(op.began, event.at)
            op.calls += 1
            _add(op, event.run)
    asked: dict[tuple[str, str], float] = {}
    failed: list[Op] = []
    for event in events:
        op = ops[event.op]
        if isinstance(event, Began):
            asked[event.op, event.client] = event.at
        elif isinstance(event, Ran):
            _add(op, event.run)
        elif isinstance(event, Told):
            _tell(op, event)
        elif isinstance(event, Failed):
            op.refusals += 1
            began = asked[event.op, event.client]
            failed.append(Op(f"{op.name}!", op.kind, began, event.at, event.client, [event.run]))
        elif isinstance(event, Refused):
            op.refusals += 1
        else:
            _settle(op, event)
    return [*ops.values(), *failed]


def _add(op: Op, run: Run | None) -> None:
    if run is not None and run not in op.runs:
        op.runs.append(run)


def _tell(op: Op, event: Told) -> None:
    if event.at < op.ended:
        op.ended = event.at
        op.client = "" if event.run is None and op.kind in TRANSACTIONS else event.client
    if event.run is not None:
        op.runs = [event.run]
    if None not in (event.time, op.time) and event.time != op.time:
        op.wrong.append(f"told {event.time}, and before {op.time}")
    op.time = event.time if op.time is None else op.time


def _settle(op: Op, event: Settled) -> None:
    if op.answered and event.time is None:
        op.wrong.append("answered, and its id is unknown")
    elif op.time not in (None, event.time):
        op.wrong.append(f"told {op.time}, and its id is of {event.time}")
    op.time, op.settled = event.time, True
