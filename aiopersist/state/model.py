"""What is known of a shard at one version: a frozen value, and its JSON.

The state is a handful of frontiers and ids, and *maps* of small frozen records: readers,
writers, batches, ... A change touches few records, so a version in the consensus store holds
only the records that it sets or drops (`diff.py`), and the whole is written now and then to the
blob store (a *rollup*). Both are JSON (`record.py`).

One state serves two kinds of contents. A shard has a trace: `since`, `upper`, `batches`. An `Indexed` has
`streams` instead (`streams.py`); what they share is who reads and writes, and which blobs are named.

Times of the clock are Unix seconds of the consensus store's clock.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict

from aiopersist.frontier import Antichain, Description
from aiopersist.state.ids import Ids
from aiopersist.state.record import HollowPart, Record
from aiopersist.state.streams import Streams

FORMAT = 2  # the latest of diffs and rollups; a reader refuses a later one
FORMAT_OF_MOST = 1  # what says nothing that earlier versions do not know: they read it, too


class HollowBatch(Record):
    """The metadata of a batch: its description and its parts."""

    lower: Antichain
    upper: Antichain
    since: Antichain
    parts: tuple[HollowPart, ...] = ()
    runs: tuple[int, ...] = ()
    """Index of the first part of every run but the first."""
    loose: int | None = None
    """Updates at times beyond its since: they may come to less when since has passed them. `None`: all."""

    @property
    def description(self) -> Description:
        return Description(self.lower, self.upper, self.since)

    @property
    def len(self) -> int:
        """Updates in its parts, those that a truncation hides included."""
        return sum(part.rows for part in self.parts)

    @property
    def inline_bytes(self) -> int:
        return sum(part.size for part in self.parts if part.inline is not None)


class SpineBatch(Record):
    """Neighbouring batches that count as one; see `spine.py`."""

    first: int
    """Ordinals of the oldest and the newest of them."""
    last: int
    len: int
    """Updates in them."""


class Level(Record):
    """One level of the spine: a spine batch, or two neighbours that are being merged, the older first."""

    batches: tuple[SpineBatch, ...]
    due: int | None = None
    """The merge is finished when the fuel of the spine has reached this."""


NULL_LEASE_S = 30 * 24 * 3600.0  # long enough that whoever holds it takes it over; then it ends

LeaseSeconds = Annotated[float, BeforeValidator(lambda value: NULL_LEASE_S if value is None else value)]
"""Seconds. Null is what earlier versions wrote for an infinite lease; it is read, and never written."""


class LeasedReader(Record):
    """A reader that is gone when it was not heard of for `lease_s`."""

    since: Antichain
    """What it holds; the empty frontier holds nothing."""
    moving: bool = False
    """Whether it was ever downgraded: only such a hold moves the shard's since."""
    seqno_hold: int | None = None
    """The oldest version it may still read the blobs of; `None`: it holds history alone, and nothing is read
    under it."""
    heartbeat: float
    lease_s: LeaseSeconds
    name: str | None = None
    owner: str | None = None
    """Of a named hold: whose calls count. A takeover replaces it."""


def are_known_earlier(readers: Iterable[LeasedReader]) -> bool:
    """Whether versions of the library that read `FORMAT_OF_MOST` alone can read these: to them each holds a
    version."""
    return all(reader.seqno_hold is not None for reader in readers)


class CriticalReader(Record):
    """A hold that never expires, fenced by its opaque."""

    since: Antichain
    opaque: int


class Mark(Record):
    """The upper that the shard had at a moment."""

    at: float
    upper: Antichain


class Retention(Record):
    """How much history maintenance keeps: so many times, or so many seconds."""

    times: int | None = None
    seconds: float | None = None
    hold: Antichain
    """What the policy keeps now: one of the holds that since is the meet of."""
    marks: tuple[Mark, ...] = ()
    """Uppers and when they were seen, oldest first: as far back as `seconds` reach."""


class Writer(Record):
    """A registered writer: blob keys with its id may be added to the state while it is here."""

    heartbeat: float
    lease_s: LeaseSeconds
    token: str | None = None
    """Of its last append: proves, after a lost answer, that it happened."""
    upper: Antichain | None = None
    """The upper that its last append left."""
    spent: tuple[str, ...] = ()
    """What `State.spent` says, as earlier versions of the library wrote it; never in a state in memory."""


COLLECTION = -1
"""In place of an ordinal: the claim of who rolls up and collects."""


class Claim(Record):
    """Somebody is compacting the batches from ordinal `first` to `last`; void once the writer is gone."""

    writer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TransactionRecord:
    """The last transaction number of an application. No `Record`, of which a million would take ten times
    the memory."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    number: int
    at: float


class Rollup(Record):
    """A full state in the blob store."""

    key: str
    checksum: str
    size: int


class State(Record):
    """One version of a shard's state."""

    shard: str
    seqno: int
    commit: str
    at: float
    """When this version was made."""
    since: Antichain
    upper: Antichain
    finalized: bool = False
    """Nothing can be read or written any more."""
    schemas: dict[int, dict[str, Any]] = {}
    readers: dict[str, LeasedReader] = {}
    critical: dict[str, CriticalReader] = {}
    retention: dict[int, Retention] = {}
    """The policy under key 0, if there is one."""
    writers: dict[str, Writer] = {}
    spent: dict[str, Ids[None]] = {}
    """By writer, the ids of batches that were built under it and handed over, and that were appended or
    deleted since: neither can happen again. They go with the writer."""
    transactions: Ids[TransactionRecord] = Ids()
    batches: dict[int, HollowBatch] = {}
    """The trace, oldest first: ascending ordinals, contiguous descriptions from the minimum."""
    levels: dict[int, Level] = {}
    """The spine: which neighbouring batches count as one."""
    fuel: int = 0
    """Of the spine: rises with every append."""
    claims: dict[int, Claim] = {}
    """By the first ordinal that is claimed."""
    rollups: dict[int, Rollup] = {}
    """By the seqno they are the state of."""
    dropped_at: int = 0
    """The newest version that dropped a blob of a part: kept up to date by `apply`."""
    collected: int = 0
    """What was dropped up to this version is deleted, and the versions before it are."""
    inline_bytes: int = 0
    """Of all inline parts: kept up to date by `apply`, so that an append need not sum them up."""
    streams: Streams | None = None
    """Of an `Indexed`: all that it holds."""

    @property
    def schema_id(self) -> int:
        """The current schema's."""
        return max(self.schemas)

    @property
    def latest_rollup(self) -> int | None:
        return max(self.rollups, default=None)

    def __repr__(self) -> str:
        return f"<State of {self.shard} at seqno {self.seqno}: since {self.since}, upper {self.upper}>"
