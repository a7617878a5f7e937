"""What a view has in memory of a table: all of it, or a part. No I/O.

A view that has a part looks keys up in the shard as of a *base*, a frontier at or before its upper. It knows

- *recent* keys, which changed at or beyond the base: they are never dropped;
- *seen* keys, which were looked up and have not changed since: the least recently used ones may go.

So a key that is neither has at the upper the value that it has at the base. When the base moves forward,
recent keys that did not change beyond it become seen ones.

How much a view may have is decided by the parts that the state names.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from itertools import filterfalse, islice
from typing import NamedTuple

from aiopersist.base.frontier import Antichain, last_before
from aiopersist.parts.fetch import Named
from aiopersist.state.model import State
from aiopersist.state.record import goodbytes_at_most

ENTRY_BYTES = 200  # of an entry in memory beside the characters of its texts, about
KEPT_MAX = 64  # entries in use that one eviction passes over
RECENT_KEYS_MAX = 65_536  # remembered, for transactions that read ranges
SLICE_KEYS = 4096  # that are compared or taken in one turn of the loop


def bytes_of(texts: Collection[str]) -> int:
    """About the bytes of the characters in memory, at most."""
    joined = "".join(texts)
    return len(joined) if joined.isascii() else sum(map(_bytes, texts))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


class TableView(NamedTuple):
    """What this process holds of a table."""

    resident: bool
    """Whether all contents are in memory."""
    keys: int
    """In memory; those that are known to be absent count, too."""
    bytes: int
    """About the memory that they take."""
    upper: Antichain
    """What is in memory is as of it: everything before it is reckoned with."""


class Kept:
    """Keys that are in use, however often."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._many: dict[int, Collection[str]] = {}
        """Collections of many keys, by their identity."""

    def __contains__(self, key: str) -> bool:
        return key in self._counts or any(key in keys for keys in self._many.values())

    def add(self, keys: Collection[str]) -> None:
        """These are in use once more, until `remove` of the same collection."""
        if len(keys) > SLICE_KEYS and isinstance(keys, Mapping | Set) and id(keys) not in self._many:
            self._many[id(keys)] = keys
        else:
            self._counts.update(iter(keys))  # a mapping would be taken for counts

    def remove(self, keys: Collection[str]) -> None:
        """The opposite of `add`."""
        if self._many.pop(id(keys), None) is not None:
            return
        for key in keys:
            self._counts[key] -= 1
            if self._counts[key] <= 0:
                del self._counts[key]


class ChangedKeys:
    """The keys of the last changes of a view, by its version."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, tuple[str, ...]]] = deque()
        self._count = 0

    def add(self, version: int, keys: Collection[str]) -> None:
        """The next version changed these."""
        self._last.append((version, tuple(keys)))
        self._count += len(keys)
        while self._count > RECENT_KEYS_MAX:
            self._count -= len(self._last.popleft()[1])

    def since(self, version: int) -> set[str] | None:
        """The keys that changed after an older version; `None` if this is not remembered."""
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
        """About what it takes in memory."""

    def __len__(self) -> int:
        return len(self.vals)

    def add(self, keys: Sequence[str], vals: Sequence[str]) -> None:
        """Take values of other keys, none of which comes twice."""
        self.vals.update(zip(keys, vals, strict=True))
        self.bytes += bytes_of(keys) + bytes_of(vals) + ENTRY_BYTES * len(keys)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys that must be looked up."""
        return []

    def val_of(self, key: str) -> str | None:
        """The value of a key that is known."""
        return self.vals.get(key)

    def with_changes(self, changes: Mapping[str, str | None]) -> "FullView":
        """A copy with these changes. On a thread: what changes meanwhile is in it, or is not."""
        copy = FullView()
        copy.bytes, copy.vals = self.bytes, self.vals.copy()
        copy.put(changes)
        return copy

    def put(self, changes: Mapping[str, str | None], upper: Antichain | None = None) -> None:
        """Take changes before `upper`."""
        for key, val in changes.items():
            old = self.vals.pop(key, None) if val is None else self.vals.get(key)
            if val is not None:
                self.vals[key] = val
            if old is None or val is None:
                self.bytes += (val is not None) * _size(key, val) - (old is not None) * _size(key, old)
            else:
                self.bytes += _bytes(val) - _bytes(old)


class PartialView:
    """See the header. Keys in `kept` are not forgotten."""

    def __init__(self, base: Antichain, kept: Kept) -> None:
        self.base = base
        self._incoming: Mapping[str, str | None] = {}
        """Changes of the last `put` that are not all merged yet. They come before what is known of their
        keys."""
        self._incoming_before = base
        self._unmerged: Iterator[tuple[str, str | None]] = iter(())
        self.bytes = 0
        self.recent_bytes = 0
        self._kept = kept
        self._recent: OrderedDict[str, tuple[Antichain, str | None]] = OrderedDict()
        """With the frontier that their last change is before; in its order."""
        self._seen: OrderedDict[str, str | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent.keys() | self._incoming.keys()) + len(self._seen)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys that must be looked up, each once."""
        missing: Iterable[str] = keys if isinstance(keys, Mapping | Set) else dict.fromkeys(keys)
        for known in (self._recent, self._seen, self._incoming):
            missing = filterfalse(known.__contains__, missing)
        return list(missing)

    def val_of(self, key: str) -> str | None:
        """The value of a key that is known; `KeyError` for others."""
        if key in self._incoming:
            return self._incoming[key]
        if key in self._recent:
            return self._recent[key][1]
        self._seen.move_to_end(key)
        return self._seen[key]

    def put(self, changes: Mapping[str, str | None], upper: Antichain) -> None:
        """Take changes before `upper`. They are known at once; `settle` merges many with the others."""
        self._merge(len(self._incoming) + 1)
        self._incoming, self._incoming_before, self._unmerged = changes, upper, iter(changes.items())
        self._merge(SLICE_KEYS)

    def _merge(self, count: int) -> None:
        """Merge so many of the incoming changes with the others."""
        upper, some = self._incoming_before, list(islice(self._unmerged, count))
        for key, val in some:
            if key in self._seen:
                self.bytes -= _size(key, self._seen.pop(key))
            elif key in self._recent:
                self._count(-_size(key, self._recent.pop(key)[1]))
            self._recent[key] = upper, val
            self._count(_size(key, val))
        if len(some) < count:
            self._incoming = {}

    def found(self, keys: Iterable[str], vals: Mapping[str, str]) -> None:
        """Take what a look-up at the base found. What was learnt meanwhile is newer."""
        for key in self.unknown(keys):
            self._seen[key] = val = vals.get(key)
            self.bytes += _size(key, val)

    def move(self, base: Antichain) -> None:
        """Look up as of `base` from now on, which is at most the upper. `settle` makes seen ones of the keys
        before it."""
        self.base = base

    def settle(self, bytes_max: float) -> bool:
        """Put in order what it holds, and forget what was not used for the longest time, until the rest takes
        at most so many bytes. Of many keys some, then it says `False`: there is more to do."""
        self._merge(SLICE_KEYS)
        return self._pass() and self._shrink(bytes_max) and not self._incoming

    def _pass(self) -> bool:
        for _ in range(SLICE_KEYS):
            key, (upper, val) = next(iter(self._recent.items()), ("", (self.base, None)))
            if not self._recent or not upper <= self.base:
                return True
            del self._recent[key]
            self._seen[key] = val
            self.recent_bytes -= _size(key, val)
        return False

    def _shrink(self, bytes_max: float) -> bool:
        passed = 0
        for _ in range(SLICE_KEYS):
            if self.bytes <= bytes_max or not self._seen or passed == KEPT_MAX:
                return True
            key = next(iter(self._seen))
            if key in self._kept:
                self._seen.move_to_end(key)
                passed += 1
            else:
                self.bytes -= _size(key, self._seen.pop(key))
        return False

    def _count(self, size: int) -> None:
        self.bytes += size
        self.recent_bytes += size


Held = FullView | PartialView


def _size(key: str, val: str | None) -> int:
    return ENTRY_BYTES + _bytes(key) + (0 if val is None else _bytes(val))


BASE_AGE_US = 600_000_000
RECENT_SHARE = 2  # recent changes may take one in so many bytes of the memory
RETURN_SHARE = 2  # a view becomes resident again below one in so many bytes of what it may have


def size_of(named: Iterable[Named]) -> float:
    """The goodbytes of parts, at most."""
    return sum(goodbytes_at_most(part) for _, part in named)


def contents_at_most(state: State) -> float:
    """About the bytes in memory of the contents of a state, at most, unless values have many small fields."""
    parts = [part for batch in state.batches.values() for part in batch.parts]
    return sum(goodbytes_at_most(part) + ENTRY_BYTES * part.rows for part in parts)


def may_fit(state: State, bytes_max: int) -> bool:
    """Whether it is worth a try to read the contents into so much memory."""
    encoded = sum(part.size for batch in state.batches.values() for part in batch.parts)
    return encoded <= bytes_max or contents_at_most(state) <= bytes_max


def surely_fits(state: State, bytes_max: float) -> bool:
    """Whether the contents are well below so much memory."""
    return contents_at_most(state) <= bytes_max / RETURN_SHARE


def is_too_large(named: Iterable[Named], bytes_max: int, *, resident: bool) -> bool:
    """Whether new parts are too large to be read by a view."""
    return size_of(named) > (bytes_max if resident else bytes_max / RECENT_SHARE)


def next_base(
    state: State, base: Antichain, upper: Antichain, recent_bytes: int, bytes_max: int
) -> Antichain:
    """Where to look keys up from now on. Behind the batches that have something before `base`: a look-up
    reads their parts in any case. At `upper`, if recent changes take much memory, or if `base` is old: then
    since would be held back for long."""
    is_old = last_before(upper) - last_before(base) > BASE_AGE_US
    if is_old or recent_bytes > bytes_max / RECENT_SHARE:
        return upper
    for batch in state.batches.values():
        if batch.parts and not base <= batch.lower:
            base = base.join(batch.upper)
    return base.meet(upper)
