"""The versions that won the races that a handle lost: a creation that is refused reads the version that is
there, and the look at the head that follows need not read it again."""

from aiopersist.storage.objects.bucket import Object

KEYS_MAX = 64
BYTES_MAX = 64 * 1024  # of a version that is kept


class Winners:
    """By key, the version that won the last race, with its name."""

    def __init__(self) -> None:
        self._won: dict[str, tuple[str, Object]] = {}

    def lost(self, key: str, name: str, won: Object) -> None:
        """A race was lost to this version."""
        self.forget(key)
        if len(won.data) <= BYTES_MAX:
            self._won[key] = name, won
        if len(self._won) > KEYS_MAX:
            self._won.pop(next(iter(self._won)))

    def forget(self, key: str) -> None:
        """It is not the head any more."""
        self._won.pop(key, None)

    def find(self, key: str, name: str, tag: str) -> Object | None:
        """The object of that name and tag, if it is known: what has the tag has the bytes."""
        known, won = self._won.get(key, ("", None))
        return won if won is not None and (known, won.tag) == (name, tag) else None
