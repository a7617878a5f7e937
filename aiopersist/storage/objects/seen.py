"""The objects that a handle has read, or created, last: what has the tag has the bytes, and need not be read
again. A creation that is refused reads the version that is there, and a look at the head follows; who opens
a shard and reads it looks at its head several times.

A read of many objects that fails in the end is made again from its beginning. What it has got is kept until
then: where one request of five fails, twenty of them in a row would hardly ever succeed."""

from aiopersist.storage.objects.bucket import Object, Tagged

KEYS_MAX = 64
BYTES_MAX = 64 * 1024  # of a version that is kept


class SeenObjects:
    """By key, the object of its newest version as one handle knows it. It may be an orphan."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, Object]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def saw(self, key: str, name: str, stored: Object) -> None:
        """The object of that name was read, or created."""
        self.forget(key)
        if stored.tag and len(stored.data) <= BYTES_MAX:
            self._seen[key] = name, stored
        if len(self._seen) > KEYS_MAX:
            del self._seen[next(iter(self._seen))]

    def forget(self, key: str) -> None:
        """Its bucket went back to what was before it."""
        self._seen.pop(key, None)

    def find(self, key: str, listed: Tagged) -> Object | None:
        """The object that is listed so, if it is known."""
        name, stored = self._seen.get(key, ("", None))
        return stored if stored is not None and Tagged(name, stored.tag) == listed else None


KEPT_BYTES_MAX = 4 * 1024 * 1024  # of all keys


class KeptReads:
    """By key, the objects that reads have got that have not succeeded yet."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Object]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def add(self, key: str, name: str, stored: Object) -> None:
        """The object of that name was read."""
        if self._bytes + len(stored.data) <= KEPT_BYTES_MAX and name not in self._kept.get(key, ()):
            self._kept.setdefault(key, {})[name] = stored
            self._bytes += len(stored.data)

    def find(self, key: str, name: str) -> Object | None:
        """What was read."""
        return self._kept.get(key, {}).get(name)

    def forget(self, key: str) -> None:
        """The read has succeeded, or the bucket of the key went back."""
        self._bytes -= sum(len(stored.data) for stored in self._kept.pop(key, {}).values())
