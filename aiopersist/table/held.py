"""What a view has in memory of a table: all of it, or a part. No I/O.

A view that has a part looks keys up in the shard as of a *base*, a frontier at or before its upper. It knows

- *recent* keys, which changed at or beyond the base: they are never dropped;
- *seen* keys, which were looked up and have not changed since: the least recently used ones may go.

So a key that is neither has at the upper the val that it has at the base. When the base moves forward, recent
keys that did not change beyond it become seen ones.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from aiopersist.frontier import Antichain

ENTRY_BYTES = 200  # of an entry in memory beside the characters of its texts, about
KEPT_MAX = 64  # entries in use that one eviction passes over


def bytes_of(texts: Collection[str]) -> int:
    """About the bytes of the characters in memory, at most."""
    joined = "".join(texts)
    return len(joined) if joined.isascii() else sum(map(_bytes, texts))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


class Whole:
    """All vals by key."""

    def __init__(self) -> None:
        self.vals: dict[str, str] = {}
        self.bytes = 0
        """About what it takes in memory."""

    def __len__(self) -> int:
        return len(self.vals)

    def add(self, keys: Sequence[str], vals: Sequence[str]) -> None:
        """Take vals of other keys, none of which comes twice."""
        self.vals.update(zip(keys, vals, strict=True))
        self.bytes += bytes_of(keys) + bytes_of(vals) + ENTRY_BYTES * len(keys)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys that must be looked up."""
        return []

    def val_of(self, key: str) -> str | None:
        """The val of a key that is known."""
        return self.vals.get(key)

    def put(self, changes: Mapping[str, str | None], upper: Antichain) -> None:
        """Take changes before `upper`."""
        for key, val in changes.items():
            old = self.vals.pop(key, None) if val is None else self.vals.get(key)
            if old is not None:
                self.bytes -= _size(key, old)
            if val is not None:
                self.bytes += _size(key, val)
                self.vals[key] = val


class Parted:
    """See the header. Keys in `kept` are not forgotten."""

    def __init__(self, base: Antichain, kept: Counter[str]) -> None:
        self.base = base
        self.bytes = 0
        self.recent_bytes = 0
        self._kept = kept
        self._recent: OrderedDict[str, tuple[Antichain, str | None]] = OrderedDict()
        """With the frontier that their last change is before; in its order."""
        self._seen: OrderedDict[str, str | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent) + len(self._seen)

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys that must be looked up, each once."""
        recent, seen = self._recent, self._seen
        return list(dict.fromkeys(key for key in keys if key not in recent and key not in seen))

    def val_of(self, key: str) -> str | None:
        """The val of a key that is known; `KeyError` for others."""
        if key in self._recent:
            return self._recent[key][1]
        self._seen.move_to_end(key)
        return self._seen[key]

    def put(self, changes: Mapping[str, str | None], upper: Antichain) -> None:
        """Take changes before `upper`."""
        for key, val in changes.items():
            if key in self._seen:
                self.bytes -= _size(key, self._seen.pop(key))
            elif key in self._recent:
                self._count(-_size(key, self._recent.pop(key)[1]))
            self._recent[key] = upper, val
            self._count(_size(key, val))

    def found(self, keys: Iterable[str], vals: Mapping[str, str]) -> None:
        """Take what a look-up at the base found. What was learnt meanwhile is newer."""
        for key in self.unknown(keys):
            self._seen[key] = val = vals.get(key)
            self.bytes += _size(key, val)

    def move(self, base: Antichain) -> None:
        """Look up as of `base` from now on, which is at most the upper."""
        self.base = base
        while self._recent:
            key, (upper, val) = next(iter(self._recent.items()))
            if not upper <= base:
                break
            del self._recent[key]
            self._seen[key] = val
            self.recent_bytes -= _size(key, val)

    def shrink(self, bytes_max: float) -> None:
        """Forget what was not used for the longest time, until the rest takes at most so many bytes."""
        passed = 0
        while self.bytes > bytes_max and self._seen and passed < KEPT_MAX:
            key = next(iter(self._seen))
            if self._kept[key]:
                self._seen.move_to_end(key)
                passed += 1
            else:
                self.bytes -= _size(key, self._seen.pop(key))

    def _count(self, size: int) -> None:
        self.bytes += size
        self.recent_bytes += size


Held = Whole | Parted


def _size(key: str, val: str | None) -> int:
    return ENTRY_BYTES + _bytes(key) + (0 if val is None else _bytes(val))
