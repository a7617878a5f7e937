"""The contract of a consensus store: per key a contiguous log of versions under compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from aiopersist.base.errors import Unsupported
from aiopersist.base.resource import run_bounded
from aiopersist.storage.watch import TaskWatch, Watch

HEADS_AT_ONCE = 16  # requests under way of a store that reads heads one by one


class Versioned(NamedTuple):
    """One version of a key."""

    seqno: int
    data: bytes


class Entry(NamedTuple):
    """One compare-and-set of several: write version `expected + 1` of `key`, or 0 if `expected` is `None`."""

    key: str
    expected: int | None
    data: bytes

    @property
    def seqno(self) -> int:
        """The version that it writes."""
        return 0 if self.expected is None else self.expected + 1


def seqnos_of(entries: Iterable[Entry]) -> dict[str, int]:
    """The versions that they write, by key."""
    return {entry.key: entry.seqno for entry in entries}


class Consensus(ABC):
    """Per key a contiguous sequence of versions `(seqno, data)` from 0.

    - Reads are linearizable: they see every write that returned before they began, whichever process made
      it.
    - A compare-and-set is durable when it returns.
    - A failure that surely changed nothing is `StorageUnavailable` (*determinate*); with `retry=False` if
      waiting does not help. A failure of unknown outcome is `Indeterminate`: the write may have happened, or
      *may still happen*. Any other exception counts as `Indeterminate`. A cancelled call is of unknown
      outcome, too.
    - Keys are non-empty text without NUL, of at most 2048 bytes as UTF-8. The library uses no other keys, and
      makes no call after `aclose`; a store may refuse both with `InvalidUsage`.
    - The library uses a handle in one event loop.

    A store must define the abstract methods; the others have defaults.
    """

    @abstractmethod
    async def head(self, key: str) -> Versioned | None:
        """Return the newest version, its seqno and data read at one moment; `None` if the key has none."""

    async def likely_head(self, key: str, seqno: int) -> Versioned | None:
        """Return the head, which probably is version `seqno`. This default is `head`; a store that looks for
        the head before it reads it may read that version meanwhile."""
        return await self.head(key)

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        """Return the heads that moved: for each key whose head is not at the seqno that `known` gives
        (`None`: the key has no version), its head, or `None` if the key had versions and has none. A key at
        its known seqno is left out. `heads(dict.fromkeys(keys))` returns all heads of `keys`.

        The caller gives the seqnos that it knows because most keys have not moved, and heads may be large.
        Each head is read at a moment of its own after the call began, so the result is linearizable per key,
        and not over several keys. A store restored from a backup to another version of the same seqno looks
        unmoved: `head` tells.

        A store should answer with one request, or a few for thousands of keys. This default reads the heads
        one by one, `HEADS_AT_ONCE` at a time."""
        read = await run_bounded(HEADS_AT_ONCE, [partial(self.head, key) for key in known])
        pairs = zip(known.items(), read, strict=True)
        return {key: head for (key, seqno), head in pairs if (None if head is None else head.seqno) != seqno}

    @abstractmethod
    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        """Write version `expected + 1` (0 for `None`) if and only if `expected` is the seqno of the head
        (`None`: the key has no version). `False` says that a head was read and differs, and nothing else."""

    @abstractmethod
    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        """Write all entries or none, at one moment, and answer as `compare_and_set`; the keys differ; no
        entries are a success. A store that cannot do so raises `Unsupported` and writes nothing."""

    def newer(self, key: str) -> Versioned | None:
        """Return, once, the head because of which the last compare-and-set of this handle lost `key`. No
        request: that answer has the heads of all keys that moved, or none. `None`: `key` has not moved, or
        only a read tells. This default knows none."""
        return None

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        """Ask all clients but `who` (letters and digits) to commit nothing to these keys for the next `for_s`
        seconds: `who` has lost races for them for `waited_s`. This replaces its earlier wish; 0 withdraws it.

        A store keeps wishes beside the versions while they last. The answer to each compare-and-set of a key
        shows its wishes, and so does the answer to a wish where that costs no further request; `stand_back_s`
        tells them. Wishes decide nothing: they may be lost, and no compare-and-set fails because of one. This
        default keeps none: then a client far from the store may wait for as long as a near one has work."""
        return

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        """Return for how many seconds `who` should commit nothing to `key`, because others that have waited
        for longer than `waited_s` wish it, by the answers to compare-and-sets of this handle. No request."""
        return 0.0

    @abstractmethod
    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        """Return the versions with seqno `>= from_seqno` in ascending order, at most `limit`."""

    async def versions(self, key: str, first: int, last: int) -> list[Versioned]:
        """Return the versions from `first` to `last`, both included, in ascending order. The caller has read
        a head at or beyond `last`. Those that were truncated may be left out. This default is a `scan`; a
        store that knows some versions need not look whether they are still there."""
        scanned = await self.scan(key, first, last + 1 - first)
        return [version for version in scanned if version.seqno <= last]

    @abstractmethod
    async def truncate(self, key: str, seqno: int) -> int:
        """Drop the versions `< seqno` and return how many this call dropped; the head always stays.
        `ValueError` if `seqno` is beyond the head or the key has no version. Repeating it is harmless."""

    async def leftovers(self, key: str) -> list[Versioned]:
        """Return the versions of the key that no `scan` shows any more but whose data the store still has:
        what an interrupted truncation has left, or what is stored beside a newer version. Some may never have
        been the head; in any order, perhaps several times. Erasure asks for them. This default is for stores
        whose `truncate` deletes data at once."""
        return []

    async def remove(self, key: str, expected: Versioned) -> bool:
        """Delete the key with all its versions if and only if `expected` is the head, seqno and data. Return
        `True` if the key has no version now, also if it had none before; `False` says that a head was read
        and differs. The next version of the key is 0 again, so the caller must know that no older
        compare-and-set on the key can still be on its way. Seqnos come again but unique data does not, so
        repeating a removal is harmless, however late, even if the key was made anew.

        A store that removes no keys raises `Unsupported`, as this default does: unused keys stay."""
        raise Unsupported("this consensus store removes no keys: unused ones stay")

    @property
    def keeps_keys(self) -> bool:
        """Whether unused keys stay for ever, because `remove` raises `Unsupported`; so no seqno of a key
        comes again. The library then remembers the unused keys, instead of reading them at each listing."""
        return False

    @abstractmethod
    async def list_keys(self, prefix: str) -> list[str]:
        """Return all keys that start with `prefix`, sorted by code point."""

    @abstractmethod
    async def watch(self, key: str) -> None:
        """Return when the key may have moved since this call *began*: at its first step, before any await.
        This is a hint: it may come early, and it may be lost. Only a read is reliable."""

    def watch_together(self) -> Watch:
        """Return a watch of many keys, for the event loop that calls this. Close it before the store. This
        default calls `watch` for each key, in a task of its own."""
        return TaskWatch(self.watch)

    @abstractmethod
    async def now(self) -> float:
        """Return the store's clock in Unix seconds, the same for all processes. The ends of leases and the
        times of shards with a wall clock depend on it."""

    async def clock(self) -> float:
        """Return `now()` as the store's clock says it during this call. This default is for stores whose
        `now` looks at the clock each time; one that computes it from an earlier answer asks again here."""
        return await self.now()

    @property
    def clock_error_s(self) -> float:
        """By how much `clock` may be wrong, besides the time that its answer takes: half of its grain."""
        return 0.0

    def limit_clock(self, ahead_max_s: float) -> None:
        """Ignore a step of the store's clock by more than `ahead_max_s`, unless the clock of this machine
        says the same. This default is for stores whose clock nobody else can set."""
        return

    async def check(self) -> None:
        """Raise `InvalidLocation` if the store turns out not to keep this contract. A client that may write
        calls it before it first writes. This default trusts the store."""
        return

    async def facts(self) -> dict[str, str]:
        """Return what a person would want to know about this store, by name: its server, its version, what
        makes its writes durable. No secrets. This default knows nothing."""
        return {}

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections and files; idempotent. The store itself stays."""


def sliced(seqnos: Mapping[str, int | None], size: int) -> Iterator[dict[str, int | None]]:
    """Yield `seqnos` in slices of at most `size`, so that each answer of a store stays small."""
    items = iter(seqnos.items())
    while chunk := dict(islice(items, size)):
        yield chunk
