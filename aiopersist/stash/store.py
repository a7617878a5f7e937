"""The contract of a backend: a few transactions on the tables of one stash, each atomic and durable when it
returns.

A store knows nothing of time or codecs: it holds rows of text, and compares and sets revisions. It never
repeats anything: a determinate failure is `StorageUnavailable`, one of unknown outcome `Indeterminate`, and
`session` knows what to do about either.

*Fencing.* A change reads the fence locked, in its own transaction, and the take-over updates that row. So a
take-over waits for changes that are under way, and those that come after it see that they are late. A read
needs no lock: it tells the fence of the same moment as the rows, and who compares it knows whether he was
the owner at that moment.
"""

from abc import ABC, abstractmethod

from aiopersist.stash.model import Change, Fence, Loaded, Opener, Select, Tokens, Verdict

OPENER_RETENTION_S = 7 * 24 * 3600.0  # an opener not heard of for longer is forgotten by a later one


class Store(ABC):
    """One stash in one place."""

    @abstractmethod
    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        """Make the stash if it is not there, and enroll an opener with its first token. With a `nonce` take
        the stash over: the fence gets it, and the next epoch. Repeating it is harmless."""

    @abstractmethod
    async def enroll(self, opener_id: str, token: str) -> None:
        """Enroll an opener that was forgotten."""

    @abstractmethod
    async def load(self, select: Select) -> Loaded | None:
        """What is there, at one moment; `None` where there is no stash. Creates nothing."""

    @abstractmethod
    async def commit(self, opener: Opener, change: Change, sending: Tokens) -> Verdict:
        """Apply `change` and set the opener's token, or do neither."""

    @abstractmethod
    async def token(self, opener_id: str) -> str | None:
        """The opener's token, once no transaction is in progress that may set it; `None`: forgotten."""

    @abstractmethod
    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        """Sum rows at equal (key, val, time), times forwarded to since; zeros vanish, a sum beyond 64 bits
        stays as it is. Without a since delete all. The rows that are left; `None` if fenced."""

    @abstractmethod
    async def forget(self, opener_id: str) -> None:
        """Strike the opener off."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let what is under way finish; idempotent."""
