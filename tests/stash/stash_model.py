"""A model of a stash, on dicts and a plain list of updates; it knows nothing of the package.

A frontier is an int, `EMPTY` above all of them, or `NO_TIME` for what is none. A handle is anything with
`name`, `types` and `id`; ids are the caller's to give. What is refused is `Refused` and changes nothing, but
for writes of typed collections, which may have made an empty append before.
"""

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

EMPTY, NO_TIME = math.inf, -1
MAX, MIN = 2**63 - 1, -(2**63)


class Refused(Exception):
    """The type of error is one of `kinds`, and its message names the collection. `early`: this follows from
    the arguments alone. `after`: what may be there then, if not what the model says."""

    def __init__(self, *kinds: str, name: str = "", early: bool = False, after: Any = ()) -> None:
        super().__init__(*kinds)
        self.kinds, self.name, self.early, self.after = set(kinds), name, early, list(after)


class Kind(NamedTuple):
    """Types of key and val, all the values they are tried with, and what are no such values."""

    key: Any
    val: Any
    keys: list[Any]
    vals: list[Any]
    bad_keys: list[Any]
    bad_vals: list[Any]
    nullable: bool = False


class Batch(NamedTuple):
    id: int
    lower: float
    upper: float
    compact: float
    entries: list[Any]


@dataclass
class Collection:
    name: str
    types: str
    id: int = 0
    since: float = 0
    upper: float = 0
    updates: list[Any] = field(default_factory=list)
    """`((key, val), time, diff)`, all there ever were."""

    def refuse(self, kind: str = "StashError") -> Refused:
        return Refused(kind, name=self.name)


class Model:
    """`rank` sorts values as collections do, `canonical` is equal and hashable for equal ones."""

    def __init__(self, kinds: dict[str, Kind], rank: Callable[[Any], Any], canonical: Any) -> None:
        self.kinds, self.rank, self.canonical = kinds, rank, canonical
        self.valid = {
            types: ({self.exact(k) for k in kind.keys}, {self.exact(v) for v in kind.vals})
            for types, kind in kinds.items()
        }
        self.collections: dict[str, Collection] = {}
        self.version = 0

    def copy(self) -> "Model":
        other = Model.__new__(Model)
        other.__dict__.update(self.__dict__)
        other.collections = {n: replace(c, updates=[*c.updates]) for n, c in self.collections.items()}
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Model) and self.collections == other.collections

    __hash__ = None  # type: ignore[assignment]  # it changes

    # --- collections -----------------------------------------------------------------------------

    def open(self, name: str, types: str) -> None:
        """Whoever made it gives it an id."""
        if self.collections.setdefault(name, Collection(name, types)).types != types:
            raise Refused("CodecMismatch")

    def at(self, h: Any) -> Collection:
        c = self.collections.get(h.name)
        if c is None or c.id != h.id:
            raise Refused("StashError", name=h.name)
        if c.types != h.types:
            raise Refused("CodecMismatch")
        return c

    def since(self, h: Any) -> float:
        return self.at(h).since

    def upper(self, h: Any) -> float:
        return self.at(h).upper

    # --- reading ---------------------------------------------------------------------------------

    def iter(self, h: Any) -> list[Any]:
        c = self.at(h)
        if c.since == EMPTY:
            raise c.refuse()
        return self.iterated(c, c.updates)

    def iter_key(self, h: Any, key: Any) -> list[Any]:
        c = self.keyed(h, key, "StashError" if h.name in self.collections else "")
        if c.since == EMPTY:
            raise c.refuse()
        return [(v, t, d) for (_, v), t, d in self.iterated(c, self.of_key(c, key))]

    def iterated(self, c: Collection, updates: Iterable[Any]) -> list[Any]:
        sums = self.sums(((k, v, max(t, c.since)), d) for (k, v), t, d in updates)
        return [((k, v), t, d) for (k, v, t), d in sums]

    def peek_timestamp(self, h: Any) -> float:
        return self.last_sealed(self.at(h))

    def peek(self, h: Any) -> list[Any]:
        c = self.at(h)
        return self.peeked(c, c.updates)

    def peek_one(self, h: Any) -> list[Any]:
        """As the items of a dict."""
        return self.one_per_key(self.at(h), self.peek(h))

    def peek_key_one(self, h: Any, key: Any) -> Any:
        if self.kinds[h.types].nullable:
            raise Refused("InvalidUsage", "StashError", early=True)
        c = self.keyed(h, key, "NothingSealed")
        items = self.one_per_key(c, self.peeked(c, self.of_key(c, key)))
        return items[0][1] if items else None

    def peeked(self, c: Collection, updates: Iterable[Any]) -> list[Any]:
        time = self.last_sealed(c)
        return [(k, v, d) for (k, v), d in self.sums((data, d) for data, t, d in updates if t <= time)]

    def last_sealed(self, c: Collection) -> float:
        if c.upper <= c.since:
            raise c.refuse("NothingSealed")
        return MAX if c.upper == EMPTY else c.upper - 1

    def one_per_key(self, c: Collection, contents: list[Any]) -> list[Any]:
        if any(d != 1 for *_, d in contents) or len({self.canonical(k) for k, *_ in contents}) < len(
            contents
        ):
            raise c.refuse()
        return [(k, v) for k, v, _ in contents]

    def keyed(self, h: Any, key: Any, other: str) -> Collection:
        if not self.is_key(h.types, key):
            raise Refused("InvalidUpdate", *filter(None, [other]))
        return self.at(h)

    def of_key(self, c: Collection, key: Any) -> list[Any]:
        wanted = self.canonical(key)
        return [update for update in c.updates if self.canonical(update[0][0]) == wanted]

    def sums(self, updates: Iterable[tuple[Any, int]]) -> list[Any]:
        """In order, without zeros."""
        found: dict[Hashable, list[Any]] = {}
        for data, diff in updates:
            found.setdefault(self.canonical(data), [data, 0])[1] += diff
        if not all(MIN <= total <= MAX for _, total in found.values()):
            raise Refused("DiffOverflow")
        return sorted(
            ((data, total) for data, total in found.values() if total), key=lambda s: self.rank(s[0])
        )

    def exact(self, value: Any) -> Hashable:
        return type(value), self.canonical(value)

    def is_key(self, types: str, key: Any) -> bool:
        return self.exact(key) in self.valid[types][0]

    # --- writing ---------------------------------------------------------------------------------

    def bad(self, types: str, entries: list[Any]) -> bool:
        keys, vals = self.valid[types]
        return not all(
            self.exact(k) in keys
            and self.exact(v) in vals
            and (type(t), type(d)) == (int, int)
            and 0 <= t <= MAX
            and MIN <= d <= MAX
            for (k, v), t, d in entries
        )

    def update_many(self, h: Any, entries: list[Any]) -> None:
        if self.bad(h.types, entries):
            raise Refused("InvalidUpdate", "StashError", "CodecMismatch", early=True)
        c = self.at(h)
        if any(t < c.upper for _, t, _ in entries):
            raise c.refuse()
        c.updates += entries

    def seal(self, h: Any, upper: float) -> None:
        c = self.timed(h, upper)
        if upper < c.upper:
            raise c.refuse()
        c.upper = upper

    def compact(self, h: Any, since: float) -> None:
        c = self.timed(h, since)
        if not c.since <= since <= c.upper:
            raise c.refuse()
        c.since = since

    def timed(self, h: Any, time: float) -> Collection:
        if time == NO_TIME:
            raise Refused("InvalidUsage", early=True)
        return self.at(h)

    def consolidate(self, h: Any) -> None:
        self.at(h)

    def several(self, one: str, steps: list[Any]) -> None:
        """`seal`, `compact` or `consolidate` several: those before the one that fails may be applied."""
        trial = self.copy()
        states = [self.copy()]
        for step in steps:
            try:
                getattr(trial, one)(*step)
            except Refused as error:
                if any(NO_TIME in step for step in steps):
                    error.kinds.add("InvalidUsage")
                error.early = False
                error.name = ""  # any of those that fail
                error.after = states
                raise
            states.append(trial.copy())
        self.collections = trial.collections

    def append(self, batches: list[Batch], known: dict[int, Any]) -> None:
        """All that is wrong with any of them may be told."""
        kinds = set()
        early = len({b.id for b in batches}) < len(batches) or any(b.id not in known for b in batches)
        if early:
            kinds.add("StashError")
        for b in batches:
            if b.id in known:
                kinds |= self.faults(self.at(known[b.id]), b)
        if kinds:
            raise Refused(*kinds, early=early)
        for b in batches:
            c = self.at(known[b.id])
            c.updates += b.entries
            c.since, c.upper = b.compact, b.upper

    def faults(self, c: Collection, b: Batch) -> set[str]:
        kinds = set()
        if self.bad(c.types, b.entries):
            kinds.add("InvalidUpdate")
        if NO_TIME in (b.lower, b.upper, b.compact):
            kinds.add("InvalidUsage")
        if b.lower != c.upper:
            kinds.add("StaleLower")
        late = not self.bad(c.types, b.entries) and any(t < b.lower for _, t, _ in b.entries)
        if late or not c.upper <= b.upper or not c.since <= b.compact <= b.upper:
            kinds.add("StashError")
        return kinds

    def make_batch(self, h: Any) -> tuple[Any, ...]:
        """lower, upper, compact and timestamp."""
        c = self.at(h)
        if c.upper in (MAX, EMPTY):
            raise c.refuse()
        return c.upper, c.upper + 1, c.upper, c.upper

    # --- typed collections -----------------------------------------------------------------------

    def insert_without_overwrite(self, h: Any, key: Any, val: Any) -> Any:
        self.check(h, [(key, val)])
        there = self.sealed(h, lambda: self.peek_key_one(h, key))
        if there is None:
            self.put(h, [(key, val, 1)])
        return val if there is None else there

    def insert_many_without_overwrite(self, h: Any, entries: list[Any]) -> list[Any]:
        self.check(h, entries)
        wanted: dict[Hashable, Any] = {}
        for key, val in entries:
            wanted.setdefault(self.canonical(key), (key, val))
        there = self.table(h)
        new = [(*wanted[key], 1) for key in wanted if key not in there]
        if new:
            self.put(h, new)
        return [there.get(key, wanted[key]) for key in wanted]

    def upsert_key(self, h: Any, key: Any, val: Any) -> None:
        self.check(h, [(key, val)])
        there = self.sealed(h, lambda: self.peek_key_one(h, key))
        self.put(h, [] if there is None else [(key, there, -1)], [(key, val, 1)])

    def upsert(self, h: Any, entries: list[Any]) -> None:
        self.check(h, entries)
        wanted = {self.canonical(key): (key, val) for key, val in entries}
        there = self.table(h)
        self.put(h, [(*there[k], -1) for k in wanted if k in there], [(*new, 1) for new in wanted.values()])

    def delete(self, h: Any, predicate: Callable[[Any, Any], bool]) -> list[Any]:
        gone = [(k, v) for k, v in self.table(h).values() if predicate(k, v)]
        if gone:
            self.put(h, [(k, v, -1) for k, v in gone])
        return gone

    def check(self, h: Any, entries: list[Any]) -> None:
        if self.bad(h.types, [(entry, 0, 1) for entry in entries]):
            raise Refused("InvalidUpdate", "StashError", "DiffOverflow", "CodecMismatch", early=True)

    def table(self, h: Any) -> dict[Hashable, Any]:
        return {self.canonical(k): (k, v) for k, v in self.sealed(h, lambda: self.peek_one(h))}

    def sealed(self, h: Any, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Refused as error:
            if error.kinds != {"NothingSealed"}:
                raise
            self.put(h)
            return read()

    def put(self, h: Any, *changes: list[Any]) -> None:
        lower, upper, compact, time = self.make_batch(h)
        entries = [((k, v), time, d) for some in changes for k, v, d in some]
        if self.bad(h.types, entries):
            raise Refused("InvalidUpdate")
        self.append([Batch(h.id, lower, upper, compact, entries)], {h.id: h})
