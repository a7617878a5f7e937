"""The values that a stash is made of. No I/O, no SQL.

A collection is *stored* as its frontiers, its codecs and rows of text. A *change* says how
collections change, and what it expects of them: a store applies all of it if everything is as expected, else
nothing. So `rules` decides everything, by pure functions of the collections that were read; a store only
compares and sets.

Each change adds one to the *revision* of a collection: the same revision tells that nothing has changed it
since it was read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, NamedTuple

from aiopersist.base.errors import Corruption, shown
from aiopersist.base.frontier import TIME_MAX, Antichain

FORMAT = 1  # of the tables
NEWER = "a newer version of aiopersist wrote the stash: use that version"


class Frontiers(NamedTuple):
    """`since <= upper`."""

    since: Antichain = Antichain(0)
    upper: Antichain = Antichain(0)


START = Frontiers()


@dataclass(frozen=True)
class StoredRows:
    """Updates as columns of equal length; keys and values are JSON texts (`data.jsonable`)."""

    keys: Sequence[str] = ()
    vals: Sequence[str] = ()
    times: Sequence[int] = ()
    diffs: Sequence[int] = ()

    @classmethod
    def of(cls, rows: Iterable[tuple[str, str, int, int]]) -> "StoredRows":
        """The rows `(key, val, time, diff)` as columns."""
        columns: list[Any] = list(zip(*rows, strict=True))
        return cls(*columns)

    @property
    def columns(self) -> tuple[Sequence[Any], ...]:
        return self.keys, self.vals, self.times, self.diffs

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[tuple[str, str, int, int]]:
        return zip(*self.columns, strict=True)

    def __add__(self, other: "StoredRows") -> "StoredRows":
        if not self or not other:
            return self or other
        return StoredRows(*([*mine, *its] for mine, its in zip(self.columns, other.columns, strict=True)))

    def where(self, is_kept: Sequence[bool]) -> "StoredRows":
        """The rows for which `is_kept` is true."""
        return StoredRows(*(list(compress(column, is_kept)) for column in self.columns))


class Codecs(NamedTuple):
    """The identities of key and val (`rows.codecs`)."""

    key: str
    val: str


@dataclass(frozen=True)
class Stored:
    """A collection as it was read."""

    id: int
    name: str
    codecs: Codecs
    frontiers: Frontiers = START
    revision: int = 0
    added: int = 0
    """How many rows were added since the last consolidation."""
    summed: int = 0
    """How many rows the last consolidation left."""
    rows: StoredRows = StoredRows()
    """The rows that the read asked for."""


class Fence(NamedTuple):
    """The last take-over: equal to the fence seen at opening until another opener takes over."""

    epoch: int
    nonce: str


@dataclass(frozen=True)
class Loaded:
    """The result of one read, at one moment."""

    fence: Fence
    version: int
    """How many migration steps were done."""
    collections: tuple[Stored, ...]


class Select(NamedTuple):
    """The selection of a read: collections by id or name (`None`: all), and which of their rows."""

    ids: tuple[int, ...] | None = None
    name: str | None = None
    rows: bool = True
    key: str | None = None
    """Only the rows of this key."""


class Move(NamedTuple):
    """The frontiers that a collection gets, and the rows that are added to it."""

    frontiers: Frontiers
    rows: StoredRows = StoredRows()


@dataclass(frozen=True)
class StoreChange:
    """All of it happens, if each collection of `expected` still has that revision; else nothing."""

    expected: Mapping[int, int]
    moves: Mapping[int, Move]
    created: tuple[Stored, ...] = ()
    """New collections, with their first frontiers and rows; refused if an id or a name exists."""
    version: tuple[int, int] | None = None
    """How many migration steps were done before, and after. Such a change must name every collection of
    the stash."""

    @property
    def rows(self) -> Iterable[tuple[int, StoredRows]]:
        """All rows to add, by collection."""
        yield from ((cid, move.rows) for cid, move in self.moves.items() if move.rows)
        yield from ((created.id, created.rows) for created in self.created if created.rows)


class Opener(NamedTuple):
    """A program that opened a stash to write: its id, and the fence that it saw at opening."""

    id: str
    fence: Fence


class Sending(NamedTuple):
    """One sending of a change. Of all sendings that expect the same token, at most one happens."""

    expected: str
    """The opener's token before."""
    token: str
    """The opener's token after."""


class Verdict(Enum):
    """The outcome of a change."""

    APPLIED = "applied"
    CONFLICT = "something is not as the change expects"
    FENCED = "another opener took over"
    FORGOTTEN = "the opener's token is another one, or gone"


def holds(change: StoreChange, now: Mapping[int, Stored], version: int) -> bool:
    """Whether everything is as the change expects. `now` has the collections that the change names; all of
    the stash, if it creates some or moves the version."""
    names = {stored.name for stored in now.values()}
    return (
        all(cid in now and now[cid].revision == revision for cid, revision in change.expected.items())
        and not any(created.id in now or created.name in names for created in change.created)
        and (change.version is None or (change.version[0], len(change.expected)) == (version, len(now)))
    )


def frontiers_of(where: str, since: int | None, upper: int | None) -> Frontiers:
    """The frontiers of two columns of the tables; null is the empty one. `Corruption`, whose text begins with
    `where`, for values that are no frontiers."""
    for name, time in (("since", since), ("upper", upper)):
        if time is not None and (type(time) is not int or not 0 <= time <= TIME_MAX):
            raise Corruption(f"{where}: {name} is {shown(time)}, and no time")
    frontiers = Frontiers(*(Antichain() if time is None else Antichain(time) for time in (since, upper)))
    if not frontiers.since <= frontiers.upper:
        raise Corruption(f"{where}: since {frontiers.since} is beyond upper {frontiers.upper}")
    return frontiers


def judge(opener: Opener, fence: Fence, sending: Sending, token: str | None, expected: bool) -> Verdict:
    """The outcome of a change, from the current fence and token of the opener, both locked, and whether
    everything is as the change expects."""
    if token == sending.token:
        return Verdict.APPLIED  # by an earlier sending
    if fence != opener.fence:
        return Verdict.FENCED
    if token != sending.expected:
        return Verdict.FORGOTTEN
    return Verdict.APPLIED if expected else Verdict.CONFLICT
