"""The objects that a handle read or created last: an object of the same tag has the same bytes, and is not
read again. (A refused creation reads the existing version, and then looks for the head; a client that opens
and reads a shard looks for its head several times.)

A failed read of many objects begins again. The objects that it got are kept for that: if one request of five
fails, twenty in a row hardly ever succeed."""

from aiopersist.storage.objects.bucket import Object, Tagged

KEYS_MAX = 64
VERSION_BYTES_MAX = 64 * 1024  # of a version that is kept


class RecentObjects:
    """By key, the object of its newest version as one handle knows it. It may be an orphan."""

    def __init__(self) -> None:
        self._recent: dict[str, tuple[str, Object]] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def saw(self, key: str, name: str, stored: Object) -> None:
        """The object of that name was read, or created."""
        self.forget(key)
        if stored.tag and len(stored.data) <= VERSION_BYTES_MAX:
            self._recent[key] = name, stored
        if len(self._recent) > KEYS_MAX:
            del self._recent[next(iter(self._recent))]

    def forget(self, key: str) -> None:
        """Its bucket went back to an earlier state."""
        self._recent.pop(key, None)

    def find(self, key: str, listed: Tagged) -> Object | None:
        """The listed object, if it is known."""
        name, stored = self._recent.get(key, ("", None))
        return stored if stored is not None and Tagged(name, stored.tag) == listed else None


KEPT_BYTES_MAX = 4 * 1024 * 1024  # of all keys


class UnfinishedReads:
    """By key, the objects that unfinished reads have got."""

    def __init__(self) -> None:
        self._unfinished: dict[str, dict[str, Object]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._unfinished.values()))

    def add(self, key: str, name: str, stored: Object) -> None:
        """The object of that name was read."""
        if self._bytes + len(stored.data) <= KEPT_BYTES_MAX and name not in self._unfinished.get(key, ()):
            self._unfinished.setdefault(key, {})[name] = stored
            self._bytes += len(stored.data)

    def find(self, key: str, name: str) -> Object | None:
        """What was read."""
        return self._unfinished.get(key, {}).get(name)

    def forget(self, key: str) -> None:
        """The read has succeeded, or the bucket of the key went back."""
        self._bytes -= sum(len(stored.data) for stored in self._unfinished.pop(key, {}).values())
