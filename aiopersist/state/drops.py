"""Which blobs the versions of a shard dropped, as far as this process has seen each of them.

A collection deletes the parts that versions dropped. A process that has followed a shard version by version
knows them, and need not read all versions again (`trail.py`). After a gap it must not use what it knows: if
it deletes a part that a version names, the data is lost.
"""

from aiopersist.state.model import State
from aiopersist.state.names import keys_of, live_parts

KEYS_MAX = 4096  # parts, which take 400 kB; if there are more, versions are read instead


class Drops:
    """The parts that were dropped after version `since`, by the version that dropped them."""

    def __init__(self) -> None:
        self._since: int | None = None
        self._dropped: dict[int, set[str]] = {}
        self._keys = 0

    def begin(self, state: State) -> None:
        """Begin at `state`: versions before it are unknown."""
        self._since, self._dropped, self._keys = state.seqno, {}, 0

    def follow(self, before: State, after: State) -> None:
        """Note the versions from `before` to `after`, which the caller has checked to follow each other."""
        if after.collected > before.collected:
            self._dropped = {at: keys for at, keys in self._dropped.items() if at > after.collected}
            self._keys = sum(map(len, self._dropped.values()))
        if after.dropped_at <= before.seqno:  # none of them dropped a part
            return
        is_next = after.seqno == before.seqno + 1
        if after.streams is not None or not is_next or self._keys > KEYS_MAX:
            self.begin(after)
            return
        self._dropped[after.seqno] = gone = _gone(before, after)
        self._keys += len(gone)

    def between(self, first: int, last: int) -> set[str] | None:
        """The parts that a version from `first` to `last` names and the state at `last` does not; `None` if
        not all of these versions were followed. A newer version than `last` must be known."""
        if self._since is None or self._since > first:
            return None
        return set().union(*(keys for at, keys in self._dropped.items() if first < at <= last))


def _gone(before: State, after: State) -> set[str]:
    """The blobs that `before` names and `after` does not. A batch that is replaced may pass parts on, and a
    tag may name them."""
    old = [batch for at, batch in before.batches.items() if after.batches.get(at) is not batch]
    new = [batch for at, batch in after.batches.items() if before.batches.get(at) is not batch]
    named = keys_of(part for batch in new for part in batch.parts)
    gone = keys_of(part for batch in old for part in batch.parts) - named
    if not before.tags:  # the usual case needs no look at all parts
        return gone
    return gone.union(*(tag.keys for tag in before.tags.values())) - live_parts(after)
