"""The state of a shard at one version: a frozen value, and its JSON.

The state has some frontiers and ids, and *maps* of small frozen records: readers, writers, batches, ... A
change touches few records, so a version in the consensus store has only the records that it sets or drops
(`diff.py`). From time to time the whole state is written to the blob store (a *rollup*). Both are JSON
(`record.py`).

There are two kinds of contents. A shard has a trace: `since`, `upper`, `batches`. An `Indexed` has `streams`
instead (`streams.py`). Both have readers and writers, and name blobs.

Moments are Unix seconds of the consensus store's clock.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from msgspec import field
from msgspec.structs import force_setattr

from aiopersist.base.errors import ShardFinalized
from aiopersist.base.frontier import Antichain, Description
from aiopersist.state.ids import Ids
from aiopersist.state.once import NO_IDS, OnceIds
from aiopersist.state.position import SubscriptionRecord
from aiopersist.state.record import HollowPart, Record, inline_bytes
from aiopersist.state.streams import Streams, parts_of_streams

FORMAT = 5  # the latest format of diffs and rollups: a reader refuses a later one
FORMAT_OF_TAGS = 5  # of those with tags
FORMAT_OF_SUBSCRIPTIONS = 4  # of those with subscriptions
FORMAT_OF_CLOCKS = 3  # of those with a wall clock, or ids of `once=`
FORMAT_OF_IDS = 2  # of those with consumed ids, or with a hold that keeps no version
FORMAT_OF_MOST = 1  # of those that every version of the library can read


class HollowBatch(Record, frozen=True, kw_only=True):
    """The metadata of a batch: its description and its parts."""

    lower: Antichain
    upper: Antichain
    since: Antichain
    parts: tuple[HollowPart, ...] = ()
    runs: tuple[int, ...] = ()
    """The index of the first part of every run but the first."""
    uncompacted: int | None = field(default=None, name="loose")
    """The number of updates with times beyond since, which may cancel once since passes them; `None`: all."""

    @property
    def description(self) -> Description:
        return Description(self.lower, self.upper, self.since)

    @property
    def len(self) -> int:
        """The number of updates of its parts, including those that a truncation hides."""
        return sum([part.rows for part in self.parts])

    @property
    def inline_bytes(self) -> int:
        return inline_bytes(self.parts)


class SpineBatch(Record, frozen=True, kw_only=True):
    """Neighbouring batches that count as one; see `spine.py`."""

    first: int
    """The ordinal of the oldest batch; `last`: of the newest."""
    last: int
    len: int
    """How many updates the batches have."""


class Level(Record, frozen=True, kw_only=True):
    """One level of the spine: a spine batch, or two neighbours that are being merged, the older first."""

    batches: tuple[SpineBatch, ...]
    due: int | None = None
    """The fuel of the spine at which the merge is finished."""


NULL_LEASE_S = 30 * 24 * 3600.0  # long enough for its owner to take it over; then it ends

if TYPE_CHECKING:
    LeaseSeconds = float
else:
    LeaseSeconds = float | None
"""Seconds. Null is read, not written: earlier versions of the library wrote it for an infinite lease."""


def _end_null_lease(record: "LeasedReader | Writer") -> None:
    lease_s: object = record.lease_s
    if lease_s is None:
        force_setattr(record, "lease_s", NULL_LEASE_S)


class LeasedReader(Record, frozen=True, kw_only=True):
    """A reader that ends after `lease_s` without a heartbeat."""

    since: Antichain
    """The history that it holds; the empty frontier holds none."""
    moving: bool = False
    """Whether its hold was ever moved. Only then it moves the shard's since."""
    seqno_hold: int | None = None
    """The oldest version whose blobs it may still read; `None`: it only holds history, and does not read."""
    heartbeat: float
    lease_s: LeaseSeconds
    name: str | None = None
    owner: str | None = None
    """The owner of a named hold. Only calls with this id succeed; a takeover replaces the id."""

    __post_init__ = _end_null_lease  # type: ignore[misc]  # a method of both


def are_known_earlier(readers: Iterable[LeasedReader]) -> bool:
    """Whether releases with only `FORMAT_OF_MOST` can read these records: each holds a version."""
    return all(reader.seqno_hold is not None for reader in readers)


class CriticalReader(Record, frozen=True, kw_only=True):
    """A hold that never expires, fenced by its opaque."""

    since: Antichain
    opaque: int


class Mark(Record, frozen=True, kw_only=True):
    """The upper that the shard had at a moment."""

    at: float
    upper: Antichain


class Retention(Record, frozen=True, kw_only=True):
    """The history that maintenance keeps: a number of times or of seconds, exactly one of them.

    A new kind of policy changes `state/retention.py` (how far since moves), `maintenance/due.py` (when, after
    commits), `next_look` in `maintenance/background.py` and `_remember` in `maintenance/rounds.py` (when, at
    rest), and `retention_text` in `web/holds.py`."""

    times: int | None = None
    seconds: float | None = None
    hold: Antichain
    """The frontier that the policy holds now."""
    marks: tuple[Mark, ...] = ()
    """Earlier uppers and their moments, oldest first, for the last `seconds`."""


class Writer(Record, frozen=True, kw_only=True):
    """A registered writer: while this record exists, blob keys with its id may be added to the state."""

    heartbeat: float
    lease_s: LeaseSeconds
    token: str | None = None
    """The token of its last append: after a lost answer it proves that the append happened."""
    upper: Antichain | None = None
    """The upper that its last append left."""
    consumed: tuple[str, ...] = field(default=(), name="spent")
    """Ids from earlier versions of the library. They belong to `State.consumed`; in memory this is empty."""

    __post_init__ = _end_null_lease  # type: ignore[misc]  # a method of both


COLLECTION = -1
"""The claim of rollup and collection has this number instead of an ordinal."""


class Claim(Record, frozen=True, kw_only=True):
    """`writer` is compacting the batches from ordinal `first` to `last`; void once the writer is gone."""

    writer: str
    first: int
    last: int


class TransactionRecord(Record, frozen=True, gc=False):
    """The last transaction number of an application. There may be a million of these records. They have no
    references, so Python's collector skips them."""

    number: int
    at: float


class Rollup(Record, frozen=True, kw_only=True):
    """A full state in the blob store."""

    key: str
    checksum: str
    size: int


class Tag(Record, frozen=True, kw_only=True):
    """The contents at a time of one version, kept whatever since, compactions and collections do."""

    seqno: int
    """The version."""
    as_of: Antichain
    """The time."""
    at: float
    """The moment when it was added."""
    expires_at: float | None = None
    """The first commit after this moment drops it; `None`: somebody drops it."""
    rollup: Rollup
    """What of that version the contents need: batches with their parts, schemas, frontiers."""
    parts: tuple[str, ...] = ()
    """The keys of the blobs of these parts."""
    blob_bytes: int = 0
    """The bytes of these blobs."""

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at < now

    @property
    def keys(self) -> set[str]:
        """The blobs that exist while this tag does."""
        return {self.rollup.key, *self.parts}


class Clock(StrEnum):
    """The meaning of a shard's times."""

    LOGICAL = "logical"
    """Times are numbers without a meaning of their own."""
    WALL = "wall"
    """Microseconds since 1970, by the consensus store's clock."""


class State(Record, frozen=True, kw_only=True):
    """One version of a shard's state."""

    shard: str
    seqno: int
    commit: str
    at: float
    """When this version was written."""
    since: Antichain
    upper: Antichain
    clock: Clock = Clock.LOGICAL
    """Set when the shard is created."""
    table: bool = False
    """Whether it is a table: at most one value per key. Set when the shard is created."""
    finalized: bool = False
    """Nothing can be read or written any more."""
    schemas: dict[int, dict[str, Any]] = {}
    readers: dict[str, LeasedReader] = {}
    critical: dict[str, CriticalReader] = {}
    retention: dict[int, Retention] = {}
    """The policy under key 0, if there is one."""
    subscriptions: dict[str, SubscriptionRecord] = {}
    """By name; with a share, by `name[i/n]`."""
    tags: dict[str, Tag] = {}
    """By name."""
    writers: dict[str, Writer] = {}
    consumed: dict[str, Ids[None]] = field(default_factory=dict, name="spent")
    """By writer, the ids of its handed-over batches that were appended or deleted, which cannot happen again.
    They are dropped with the writer."""
    transactions: Ids[TransactionRecord] = Ids()
    once: OnceIds = NO_IDS
    """The ids of `once=`."""
    batches: dict[int, HollowBatch] = {}
    """The trace, oldest first: ascending ordinals, contiguous descriptions from the minimum."""
    levels: dict[int, Level] = {}
    """The spine: which neighbouring batches count as one."""
    fuel: int = 0
    """The fuel of the spine: rises with every append."""
    claims: dict[int, Claim] = {}
    """By the first claimed ordinal."""
    rollups: dict[int, Rollup] = {}
    """By the version of the state in the rollup."""
    dropped_at: int = 0
    """The newest version that dropped a blob of a part; `apply` keeps it up to date."""
    collected: int = 0
    """The versions before this one are truncated, and the blobs that were dropped up to it are deleted."""
    inline_bytes: int = 0
    """The bytes of all inline parts; `apply` keeps the sum, so that appends need not compute it."""
    streams: Streams | None = None
    """The contents of an `Indexed`."""

    @property
    def parts(self) -> Iterator[HollowPart]:
        """All parts of its batches and streams."""
        for batch in self.batches.values():
            yield from batch.parts
        yield from parts_of_streams(self.streams)

    @property
    def kind(self) -> dict[str, Any]:
        """The kind of the shard, which never changes. A copy has the same kind."""
        return {"clock": self.clock, "table": self.table}

    @property
    def is_wall(self) -> bool:
        """Whether its times are those of the consensus store's clock."""
        return self.clock is Clock.WALL

    @property
    def schema_id(self) -> int:
        """The id of the current schema; `ShardFinalized` if the shard was finalized."""
        if self.finalized:
            raise ShardFinalized("it is finalized", shard_id=self.shard)
        return max(self.schemas)

    @property
    def latest_rollup(self) -> int | None:
        return max(self.rollups, default=None)

    def __repr__(self) -> str:
        return f"<State of {self.shard} at seqno {self.seqno}: since {self.since}, upper {self.upper}>"
