"""The contract of a consensus store: per key a contiguous log of versions under compare-and-set."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


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
    - Keys are non-empty text without NUL.
    """

    @abstractmethod
    async def head(self, key: str) -> Versioned | None:
        """The newest version, its seqno and data read at one moment; `None` where there is none."""

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

    @abstractmethod
    async def list_keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""

    @abstractmethod
    async def watch(self, key: str) -> None:
        """Return when the key may have moved since this call *began*. A hint: it may return early,
        and a hint may be lost. Reading is the truth."""

    @abstractmethod
    async def now(self) -> float:
        """The store's clock in Unix seconds. Only the moment of an expiry depends on it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections and files; idempotent. The store itself stays."""
