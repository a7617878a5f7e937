"""The versions that won the races that a handle lost: a creation that is refused reads the version that is
there, and the look at the head that follows need not read it again. Where it was the head a moment ago, the
loser need not even look."""

from aiopersist.storage.objects.bucket import Object

KEYS_MAX = 64
BYTES_MAX = 64 * 1024  # of a version that is kept


class Winners:
    """By key, the version that won the last race, with its name."""

    def __init__(self) -> None:
        self._won: dict[str, tuple[str, Object]] = {}
        self._heads: dict[str, None] = {}
        """Keys whose winner counts, and was the head a moment ago."""

    def lost(self, key: str, name: str, won: Object, *, is_head: bool) -> None:
        """A race was lost to this version."""
        self.forget(key)
        if len(won.data) <= BYTES_MAX:
            self._won[key] = name, won
            if is_head:
                self._heads[key] = None
        if len(self._won) > KEYS_MAX:
            self.forget(next(iter(self._won)))

    def forget(self, key: str) -> None:
        """It is not the head any more."""
        self._won.pop(key, None)
        self._heads.pop(key, None)

    def take_head(self, key: str, name: str) -> Object | None:
        """The object of that name, if it was the head a moment ago; once."""
        known, won = self._won.get(key, ("", None))
        if known != name or key not in self._heads:
            return None
        del self._heads[key]
        return won

    def find(self, key: str, name: str, tag: str) -> Object | None:
        """The object of that name and tag, if it is known: what has the tag has the bytes."""
        known, won = self._won.get(key, ("", None))
        return won if won is not None and (known, won.tag) == (name, tag) else None
