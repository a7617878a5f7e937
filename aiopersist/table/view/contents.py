"""The contents of a table in memory: all of them, or a part. No I/O.

A view with a part looks keys up in the shard as of a *base*, a frontier at or before its upper. It has

- *recent* keys, which changed at or beyond the base: they are never dropped;
- *cached* keys, which were looked up and have not changed since: the least recently used ones may go.

Any other key has the same value at the upper as at the base. When the base moves forward, recent keys that
did not change beyond it become cached keys.

The sizes of the parts in the state decide how much of a table a view reads into memory.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import filterfalse, islice
from typing import NamedTuple

from aiopersist.base.frontier import Antichain, last_before
from aiopersist.parts.fetch import Named
from aiopersist.state.model import State
from aiopersist.state.record import goodbytes_at_most

ENTRY_BYTES = 200  # of an entry in memory, beside the characters of its texts; an estimate
IN_USE_MAX = 64  # entries in use that one eviction passes over
RECENT_KEYS_MAX = 65_536  # changed keys that are remembered for transactions that read ranges
SLICE_KEYS = 4096  # keys that one turn of the loop compares or applies


def bytes_of(texts: Collection[str]) -> int:
    """An upper bound of the bytes of the characters in memory."""
    joined = "".join(texts)
    return len(joined) if joined.isascii() else sum(map(_bytes, texts))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


class TableView(NamedTuple):
    """The part of a table that this process has in memory."""

    resident: bool
    """Whether all contents are in memory."""
    keys: int
    """The keys in memory, with those that are known to be absent."""
    bytes: int
    """The memory that they take, an estimate."""
    upper: Antichain
    """The contents in memory are those of this frontier: all changes before it are in them."""


class KeysInUse:
    """Keys that callers use. Each may be added several times."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._many: dict[int, Collection[str]] = {}
        """Large collections, by their identity."""

    def __contains__(self, key: str) -> bool:
        return key in self._counts or any(key in keys for keys in self._many.values())

    def add(self, keys: Collection[str]) -> None:
        """Add these until `remove` of the same collection."""
        if len(keys) > SLICE_KEYS and isinstance(keys, Mapping | Set) and id(keys) not in self._many:
            self._many[id(keys)] = keys
        else:
            self._counts.update(iter(keys))  # `Counter` would read the values of a mapping as counts

    def remove(self, keys: Collection[str]) -> None:
        if self._many.pop(id(keys), None) is not None:
            return
        for key in keys:
            self._counts[key] -= 1
            if self._counts[key] <= 0:
                del self._counts[key]


class ChangedKeys:
    """The keys of the last changes of a view, by the version of the view."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, tuple[str, ...]]] = deque()
        self._count = 0

    def add(self, version: int, keys: Collection[str]) -> None:
        """Add the keys that the next version changed."""
        self._last.append((version, tuple(keys)))
        self._count += len(keys)
        while self._count > RECENT_KEYS_MAX:
            self._count -= len(self._last.popleft()[1])

    def since(self, version: int) -> set[str] | None:
        """The keys that changed after an older version; `None` if they are forgotten."""
        if not self._last or self._last[0][0] > version + 1:
            return None
        return {key for at, keys in self._last if at > version for key in keys}

    def clear(self) -> None:
        self._last.clear()
        self._count = 0


class FullView:
    """All values by key."""

    def __init__(self) -> None:
        self.vals: dict[str, str] = {}
        self.bytes = 0
        """The memory that it takes, an estimate."""

    def __len__(self) -> int:
        return len(self.vals)

    def add(self, keys: Sequence[str], vals: Sequence[str]) -> None:
        """Add entries of new keys. No key comes twice."""
        self.vals.update(zip(keys, vals, strict=True))
        self.bytes += bytes_of(keys) + bytes_of(vals) + ENTRY_BYTES * len(keys)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """The keys that must be looked up: none."""
        return []

    def val_of(self, key: str) -> str | None:
        """The value of a key."""
        return self.vals.get(key)

    def with_changes(self, changes: Mapping[str, str | None]) -> "FullView":
        """A copy with these changes, made on a thread: it may contain changes that are made meanwhile."""
        copy = FullView()
        copy.bytes, copy.vals = self.bytes, self.vals.copy()
        copy.put(changes)
        return copy

    def put(self, changes: Mapping[str, str | None], upper: Antichain | None = None) -> None:
        """Apply changes."""
        for key, val in changes.items():
            old = self.vals.pop(key, None) if val is None else self.vals.get(key)
            if val is not None:
                self.vals[key] = val
            if old is None or val is None:
                self.bytes += (val is not None) * _size(key, val) - (old is not None) * _size(key, old)
            else:
                self.bytes += _bytes(val) - _bytes(old)


class PartialView:
    """See the header. Keys in `in_use` are not evicted."""

    def __init__(self, base: Antichain, in_use: KeysInUse) -> None:
        self.base = base
        self._incoming: Mapping[str, str | None] = {}
        """The changes of the last `put`, until all are merged. They override other values."""
        self._incoming_before = base
        self._unmerged: Iterator[tuple[str, str | None]] = iter(())
        self.bytes = 0
        self.recent_bytes = 0
        self._in_use = in_use
        self._recent: OrderedDict[str, tuple[Antichain, str | None]] = OrderedDict()
        """Each with a frontier beyond its last change, in the order of these frontiers."""
        self._cached: OrderedDict[str, str | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent.keys() | self._incoming.keys()) + len(self._cached)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """The keys that must be looked up, each once."""
        missing: Iterable[str] = keys if isinstance(keys, Mapping | Set) else dict.fromkeys(keys)
        for part in (self._recent, self._cached, self._incoming):
            missing = filterfalse(part.__contains__, missing)
        return list(missing)

    def val_of(self, key: str) -> str | None:
        """The value of a key; `KeyError` if it must be looked up."""
        if key in self._incoming:
            return self._incoming[key]
        if key in self._recent:
            return self._recent[key][1]
        self._cached.move_to_end(key)
        return self._cached[key]

    def put(self, changes: Mapping[str, str | None], upper: Antichain) -> None:
        """Apply changes before `upper`. Reads see them at once; `tidy` merges the rest of many."""
        self._merge(len(self._incoming) + 1)
        self._incoming, self._incoming_before, self._unmerged = changes, upper, iter(changes.items())
        self._merge(SLICE_KEYS)

    def _merge(self, count: int) -> None:
        """Merge this many of the incoming changes."""
        upper, entries = self._incoming_before, list(islice(self._unmerged, count))
        for key, val in entries:
            if key in self._cached:
                self.bytes -= _size(key, self._cached.pop(key))
            elif key in self._recent:
                self._count(-_size(key, self._recent.pop(key)[1]))
            self._recent[key] = upper, val
            self._count(_size(key, val))
        if len(entries) < count:
            self._incoming = {}

    def cache(self, keys: Iterable[str], vals: Mapping[str, str]) -> None:
        """Add the values that a look-up at the base read. Values that came meanwhile are newer, and stay."""
        for key in self.unknown(keys):
            self._cached[key] = val = vals.get(key)
            self.bytes += _size(key, val)

    def move(self, base: Antichain) -> None:
        """Look up as of `base`, at most the upper, from now on. `tidy` caches the recent keys before it."""
        self.base = base

    def tidy(self, bytes_max: float) -> bool:
        """Merge changes, and evict the least recently used keys until the rest takes at most `bytes_max`.
        Handles a slice of the keys, and returns `False` if there is more to do."""
        self._merge(SLICE_KEYS)
        return self._cache_recent() and self._evict(bytes_max) and not self._incoming

    def _cache_recent(self) -> bool:
        for _ in range(SLICE_KEYS):
            key, (upper, val) = next(iter(self._recent.items()), ("", (self.base, None)))
            if not self._recent or not upper <= self.base:
                return True
            del self._recent[key]
            self._cached[key] = val
            self.recent_bytes -= _size(key, val)
        return False

    def _evict(self, bytes_max: float) -> bool:
        passed = 0
        for _ in range(SLICE_KEYS):
            if self.bytes <= bytes_max or not self._cached or passed == IN_USE_MAX:
                return True
            key = next(iter(self._cached))
            if key in self._in_use:
                self._cached.move_to_end(key)
                passed += 1
            else:
                self.bytes -= _size(key, self._cached.pop(key))
        return False

    def _count(self, size: int) -> None:
        self.bytes += size
        self.recent_bytes += size


Contents = FullView | PartialView


def _size(key: str, val: str | None) -> int:
    return ENTRY_BYTES + _bytes(key) + (0 if val is None else _bytes(val))


BASE_AGE_US = 600_000_000
RECENT_SHARE = 2  # recent changes may take 1/2 of the memory
RETURN_SHARE = 2  # a view becomes resident again once the contents take less than 1/2 of the memory


def size_of(named: Iterable[Named]) -> float:
    """An upper bound of the goodbytes of parts."""
    return sum(goodbytes_at_most(part) for _, part in named)


def contents_at_most(state: State) -> float:
    """An upper bound of the memory for the contents of a state, unless values have many small fields."""
    parts = [part for batch in state.batches.values() for part in batch.parts]
    return sum(goodbytes_at_most(part) + ENTRY_BYTES * part.rows for part in parts)


def may_fit(state: State, bytes_max: int) -> bool:
    """Whether the contents may fit into this much memory, so that a try is worth it."""
    encoded = sum(part.size for batch in state.batches.values() for part in batch.parts)
    return encoded <= bytes_max or contents_at_most(state) <= bytes_max


def surely_fits(state: State, bytes_max: float) -> bool:
    """Whether the contents are well below this much memory."""
    return contents_at_most(state) <= bytes_max / RETURN_SHARE


def is_too_large(named: Iterable[Named], bytes_max: int, *, resident: bool) -> bool:
    """Whether new parts are too large for a view to read."""
    return size_of(named) > (bytes_max if resident else bytes_max / RECENT_SHARE)


def next_base(
    state: State, base: Antichain, upper: Antichain, recent_bytes: int, bytes_max: int
) -> Antichain:
    """The frontier at which to look keys up from now on: behind the batches that have updates before `base`,
    since a look-up reads their parts in any case. It is `upper` if recent changes take much memory, or if
    `base` is old, since a hold there would keep since from moving for long."""
    is_old = last_before(upper) - last_before(base) > BASE_AGE_US
    if is_old or recent_bytes > bytes_max / RECENT_SHARE:
        return upper
    for batch in state.batches.values():
        if batch.parts and not base <= batch.lower:
            base = base.join(batch.upper)
    return base.meet(upper)
