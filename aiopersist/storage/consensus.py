"""The contract of a consensus store: per key a contiguous log of versions under compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from aiopersist.errors import Unsupported
from aiopersist.resource import run_bounded
from aiopersist.storage.watch import TaskWatch, Watch

HEADS_AT_ONCE = 16  # of a store that reads them one by one


class Versioned(NamedTuple):
    """One version of a key."""

    seqno: int
    data: bytes


class Entry(NamedTuple):
    """One compare-and-set of several: version `expected + 1` of `key`, or 0 where it is `None`."""

    key: str
    expected: int | None
    data: bytes


class Consensus(ABC):
    """Per key a contiguous sequence of versions `(seqno, data)` from 0.

    - `head` and `scan` are linearizable: they see every write that returned before they began.
    - A failure that surely changed nothing is `StorageUnavailable` (*determinate*); one of unknown
      outcome is `Indeterminate`: it may have happened or *may still happen*. Any other exception
      counts as the latter. A cancelled call is of unknown outcome, too.
    - Keys are non-empty text without NUL. The library asks for no others, and for nothing once it has called
      `aclose`; a store may refuse what is not so.
    """

    @abstractmethod
    async def head(self, key: str) -> Versioned | None:
        """The newest version, its seqno and data read at one moment; `None` where there is none."""

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        """What is new: the head of each key whose seqno is another than `known` says (`None`: no version).
        So nothing for a key that stands where it stood; `None` for one that had versions and has none;
        and with `dict.fromkeys(keys)` all heads that are there.

        Each is read at a moment of its own after the call began, as by `head`: linearizable for its key,
        and nothing is promised over several. The caller names what it knows because most of what is asked
        for many keys at once is whether they moved, and heads may be large. A store that was restored to
        another version of the same seqno looks unmoved: `head` tells.

        One request where the store can, a few for thousands of keys. This one, for stores that define
        none, reads them one by one, `HEADS_AT_ONCE` at a time."""
        read = await run_bounded(HEADS_AT_ONCE, [partial(self.head, key) for key in known])
        found = zip(known.items(), read, strict=True)
        return {key: head for (key, seqno), head in found if (None if head is None else head.seqno) != seqno}

    @abstractmethod
    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        """Write version `expected + 1` (0 for `None`) iff `expected` is the head. `False` only when a
        head was read and differs."""

    @abstractmethod
    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        """All of them or none, at one moment; keys differ. `Unsupported` before anything is written
        where the store cannot."""

    @abstractmethod
    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        """Versions with seqno `>= from_seqno`, ascending, at most `limit`; empty when there are none."""

    @abstractmethod
    async def truncate(self, key: str, seqno: int) -> int:
        """Drop versions `< seqno` and return how many; the head always stays. `ValueError` if `seqno`
        is beyond the head (or the key is not there). Repeating it is harmless."""

    async def remove(self, key: str, expected: Versioned) -> bool:
        """Take away the key with all its versions, iff `expected` is the head, number and data; whether it is
        away now, also where it was before. `False` only when a head was read and differs. After it the key is
        as one that never had a version: the next one is 0, made with `expected=None`. So who removes a key
        must know that no such statement of old can be on its way. Numbers come again, data that is unique
        does not: so repeating a removal is harmless, however late, though the key was made anew.

        `Unsupported` where the store cannot, as this one: then what nobody needs any more stays."""
        raise Unsupported("this consensus store removes no keys")

    @abstractmethod
    async def list_keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""

    @abstractmethod
    async def watch(self, key: str) -> None:
        """Return when the key may have moved since this call *began*. A hint: it may return early,
        and a hint may be lost. Reading is the truth."""

    def watch_together(self) -> Watch:
        """Many keys watched by one task. Call it in the event loop that waits; the store outlives it. This
        one, for stores that define none, calls `watch` for each key, in a task of its own."""
        return TaskWatch(self.watch)

    @abstractmethod
    async def now(self) -> float:
        """The store's clock in Unix seconds. Only the moment of an expiry depends on it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections and files; idempotent. The store itself stays."""


def sliced(known: Mapping[str, int | None], size: int) -> Iterator[dict[str, int | None]]:
    """`known` in slices of at most `size`: what a store answers at once stays small."""
    items = iter(known.items())
    while part := dict(islice(items, size)):
        yield part
