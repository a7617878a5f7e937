"""The user's handle of a collection: a small value with an id, a name and codecs; and a batch for it."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.frontier import frontier as as_frontier
from aiopersist.data.types.codec import Field
from aiopersist.data.types.nested import Instances, Lists, Structs
from aiopersist.data.types.schema import Schema
from aiopersist.stash import rules
from aiopersist.stash.errors import StashError
from aiopersist.stash.model import Codecs, Frontiers, Stored, StoredRows
from aiopersist.stash.rows import check_codecs

K = TypeVar("K")
V = TypeVar("V")

Entry = tuple[tuple[K, V], int, int]
"""`((key, val), time, diff)`"""

NAME_BYTES_MAX = 512  # an index entry of Postgres holds some more


class MakesBatches(Protocol):
    """A stash."""

    async def make_batch(
        self, c: "StashCollection[Any, Any]", upper: Antichain | Time | None = None
    ) -> "AppendBatch": ...


class StashCollection(Generic[K, V]):
    """A collection of `(key, val, time, diff)`; works with every opener of its stash."""

    __slots__ = ("codecs", "id", "is_table", "name", "schema")

    def __init__(
        self, id: int, name: str, schema: Schema[K, V, int], codecs: Codecs, *, is_table: bool = False
    ) -> None:
        self.id = id
        self.name = name
        self.schema = schema
        self.codecs = codecs
        """The stored texts of the codecs."""
        self.is_table = is_table
        """Whether `TypedCollection.get` gave it: then its batches must leave one value per key."""

    def __repr__(self) -> str:
        key, val = (self.schema.arrow_schema.field(name).type for name in ("key", "val"))
        return f"<StashCollection {self.id} {self.name!r}: {key} -> {val}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StashCollection) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash((self.id, self.name))

    @property
    def _identity(self) -> tuple[Hashable, ...]:
        return self.id, self.name, self.schema

    async def make_batch(self, stash: MakesBatches, upper: Antichain | Time | None = None) -> "AppendBatch":
        """An empty batch at the current upper, which seals that time and compacts to it; `StashError` if
        upper is empty or the greatest time. One request.

        For changes that follow from a read, read `upper` first, then the contents, and give that `upper`: if
        another append came in between, this one is `StaleLower`. Without `upper` the batch begins at the
        current upper, which may be later than the read. (`transact` does all of this.)

        `append` refuses, as a `StashError`, a batch of a table (`TypedCollection.get`) that would leave a key
        with several values, or a diff other than 1."""
        return await stash.make_batch(self, upper)

    def append_to_batch(self, batch: "AppendBatch", key: K, val: V, diff: int) -> None:
        """Add an update at `batch.timestamp`; `append` checks it."""
        batch.entries.append(((key, val), batch.timestamp, diff))


@dataclass
class AppendBatch:
    """Updates for a collection whose upper is `lower`, and the frontiers that the collection gets."""

    collection_id: int
    lower: Antichain | Time
    upper: Antichain | Time
    compact: Antichain | Time
    timestamp: int
    entries: list[Any] = field(default_factory=list)
    """`((key, val), time, diff)`, as `iter` gives them."""
    _collection: StashCollection[Any, Any] | None = field(default=None, repr=False, compare=False)
    """Its types are those of the entries; without it, the types that the stash was last asked for."""
    _base: Stored | None = field(default=None, repr=False, compare=False)
    """The table as it was read: the append is checked against it, unless the table has changed by then."""


Ready = Mapping[StashCollection[Any, Any], tuple[tuple[Antichain, ...], StoredRows]]
"""The append to each collection: `lower`, `upper` and `compact`, and rows."""


class TableChanged(Exception):
    """A table has changed since its append was checked."""


def batch_at(c: StashCollection[Any, Any], now: Stored, upper: Antichain | Time | None = None) -> AppendBatch:
    """An empty batch at `upper`, or at the upper that `now` has."""
    since, current = now.frontiers
    time = rules.next_time(c.name, Frontiers(since, current if upper is None else int_frontier(upper)))
    at, beyond = Antichain(time), Antichain(time + 1)
    return AppendBatch(c.id, at, beyond, at, time, _collection=c, _base=now if c.is_table else None)


def int_frontier(time: Antichain | Time) -> Antichain:
    """The frontier; `InvalidUsage` for product times, which a stash does not have."""
    frontier = as_frontier(time)
    if any(isinstance(element, tuple) for element in frontier.elements):
        raise InvalidUsage(UsageKind.INVALID_TIME, f"{frontier}: the times of a stash are ints", time=time)
    return frontier


def check_name(name: object) -> str:
    """`name`, if a collection may have it; else `InvalidUsage` of kind `INVALID_NAME`."""
    if isinstance(name, str) and "\0" not in name:
        with suppress(UnicodeEncodeError):
            if 0 < len(name.encode()) <= NAME_BYTES_MAX:
                return name
    what = f"{shown(name)} is not a name: text of up to {NAME_BYTES_MAX} bytes in UTF-8, without NUL"
    raise InvalidUsage(UsageKind.INVALID_NAME, what, name=name)


def check_keys(name: str, schema: Schema[Any, Any, Any]) -> None:
    """`InvalidUsage` for a type of keys that a dict cannot have."""
    if not _is_hashable(schema.key):
        what = f"collection {name!r}: a dict cannot have its keys, which are or hold lists or dicts"
        raise InvalidUsage(UsageKind.INVALID_TYPE, what)


def _is_hashable(field: Field) -> bool:
    codec = field.codec
    if isinstance(codec, Instances):
        return all(map(_is_hashable, codec.fields.values()))
    return not isinstance(codec, Lists | Structs)


def check_absence(name: str, schema: Schema[Any, Any, Any]) -> None:
    """`InvalidUsage` if `None` is a val: calls that return `None` for "absent" would be ambiguous."""
    if schema.val.nullable:
        what = f"collection {name!r}: its vals admit None, which stands for an absent val here"
        raise InvalidUsage(UsageKind.INVALID_TYPE, what)


def advance_of(step: Any) -> tuple[StashCollection[Any, Any], Antichain]:
    """A pair of a collection and the frontier to advance it to, checked."""
    if not isinstance(step, tuple | list) or len(step) != 2:
        raise TypeError(f"{shown(step)} is not a pair of a collection and a frontier")
    return checked(step[0]), int_frontier(step[1])


def listed(entries: Any) -> Any:
    """A copy of the entries: their owner may change them while a thread works on the copy, and a generator
    may fill one list anew for each entry."""
    is_iterable = isinstance(entries, Iterable) and not isinstance(entries, str | bytes)
    return list(map(_own, entries)) if is_iterable else entries


def _own(entry: Any) -> Any:
    """The entry, and its pair, as tuples."""
    entry = as_tuple(entry)
    if isinstance(entry, tuple) and entry and isinstance(entry[0], list):
        return tuple(entry[0]), *entry[1:]
    return entry


def as_tuple(value: Any) -> Any:
    """A list as a tuple; all else as it is."""
    return tuple(value) if isinstance(value, list) else value


def stored_of(c: StashCollection[Any, Any], collections: Sequence[Stored]) -> Stored:
    """The collection as it was read, in `collections`; `StashError` if it is not in this stash."""
    if not collections or collections[0].name != c.name:
        raise StashError(f"collection {c.name!r}: this stash has none with id {c.id}")
    if collections[0].codecs != c.codecs:
        check_codecs(c.name, collections[0].codecs, c.schema)
    return collections[0]


def checked(c: StashCollection[K, V]) -> StashCollection[K, V]:
    """`c` itself; `TypeError` for anything else."""
    if not isinstance(c, StashCollection):
        raise TypeError(f"{shown(c)} is not a StashCollection")
    return c
