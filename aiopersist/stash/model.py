"""The values that a stash is made of. No I/O, no SQL.

A collection is *stored* as its frontiers, its codecs and rows of text; a *change* says what is to become
of which collections, and on what it depends: a store applies it whole if nothing it depends on has moved,
and else not at all. So all rules are decided by pure functions on what was read (`rules`), and the
stores compare and set.

Each collection has a *revision*, one more with every change: that it is still the expected one means that
nobody has changed the collection since it was read.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import Any, NamedTuple

from aiopersist.frontier import Antichain

FORMAT = 1  # of the tables


class Frontiers(NamedTuple):
    """`since <= upper`."""

    since: Antichain = Antichain(0)
    upper: Antichain = Antichain(0)


START = Frontiers()


@dataclass(frozen=True)
class StoredRows:
    """Updates as columns of one length; keys and vals are JSON texts (`data.jsonable`)."""

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

    def where(self, held: Sequence[bool]) -> "StoredRows":
        """The rows for which `held` says so."""
        return StoredRows(*(list(compress(column, held)) for column in self.columns))


class Codecs(NamedTuple):
    """The identities of key and val; see `codecs`."""

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
    loose: int = 0
    """StoredRows added since the last consolidation."""
    settled: int = 0
    """StoredRows that the last consolidation left."""
    rows: StoredRows = StoredRows()
    """Those that were asked for."""


class Fence(NamedTuple):
    """Who took the stash over last; equal to the one seen at opening as long as nobody has since."""

    epoch: int
    nonce: str


@dataclass(frozen=True)
class Loaded:
    """What one read found, at one moment."""

    fence: Fence
    version: int
    """Migrations that were done."""
    collections: tuple[Stored, ...]


class Select(NamedTuple):
    """What to read: collections by id or name (`None`: all), and which of their rows."""

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
class Change:
    """All of it happens or nothing: only if each collection of `expected` still has that revision."""

    expected: Mapping[int, int]
    moves: Mapping[int, Move]
    created: tuple[Stored, ...] = ()
    """With the frontiers and rows they begin with; refused where the id or name is there already."""
    version: tuple[int, int] | None = None
    """The number of migrations that were done, and that are done then. Such a change expects to know every
    collection there is."""

    @property
    def rows(self) -> Iterable[tuple[int, StoredRows]]:
        """All rows that are added, by collection."""
        yield from ((cid, move.rows) for cid, move in self.moves.items() if move.rows)
        yield from ((made.id, made.rows) for made in self.created if made.rows)


class Opener(NamedTuple):
    """Whoever opened a stash to write: its name, and the fence it holds."""

    id: str
    fence: Fence


class Tokens(NamedTuple):
    """Of all transactions that expect the same token at most one happens."""

    expected: str
    token: str


class Verdict(Enum):
    """What came of a change."""

    APPLIED = "applied"
    CONFLICT = "something it depends on has moved"
    FENCED = "another opener took over"
    FORGOTTEN = "the opener's token is another one, or gone"


def judge(opener: Opener, fence: Fence, sending: Tokens, token: str | None, expected: bool) -> Verdict:
    """What is to become of a change, given the fence and the opener's token as they are, both locked, and
    whether all that it expects still holds."""
    if token == sending.token:
        return Verdict.APPLIED  # by an earlier sending
    if fence != opener.fence:
        return Verdict.FENCED
    if token != sending.expected:
        return Verdict.FORGOTTEN
    return Verdict.APPLIED if expected else Verdict.CONFLICT
