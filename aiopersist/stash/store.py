"""The contract of a backend: a few transactions on the tables of one stash, each atomic and durable when it
returns.

A store knows nothing of time or codecs: it holds rows of text, and compares and sets revisions. It repeats
nothing: a definite failure is `StorageUnavailable`, a failure with an unknown outcome `Indeterminate`, and
`session` handles both.

*Fencing.* A change locks the fence and reads it, in its own transaction; a take-over updates that row. So a
take-over waits for changes under way, and later changes see that they are fenced. A read needs no lock: it
returns the fence of the same moment as the rows, and the session compares it with its own.

*Wishes* of openers that lose races are kept beside the openers, and the answer to each change shows them.
"""

from abc import ABC, abstractmethod

from aiopersist.stash.model import Fence, Loaded, Opener, Select, Sending, StoreChange, Verdict
from aiopersist.storage.wishes import HeardWishes

STASH = ""  # the key of its wishes
WISH = "~"  # before the id of an opener: the row of its wish
OPENER_RETENTION_S = 7 * 24 * 3600.0  # a later opener forgets one that has written nothing for longer


class Store(ABC):
    """One stash in one database."""

    _heard: HeardWishes
    """Wishes, as the answers to `commit` tell them."""

    @abstractmethod
    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        """Create the stash if it is not there, and enroll an opener with its first token. With a `nonce` take
        the stash over: the fence gets the nonce and the next epoch. Repeated, however late, it changes
        nothing of an opener that is enrolled."""

    @abstractmethod
    async def enroll(self, opener_id: str, token: str) -> None:
        """Enroll an opener again that was forgotten. An opener that is there keeps its token."""

    @abstractmethod
    async def load(self, select: Select) -> Loaded | None:
        """The selected collections, at one moment; `None` if there is no stash. Creates nothing."""

    @abstractmethod
    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        """Apply `change` and set the opener's token, or do neither."""

    @abstractmethod
    async def token(self, opener_id: str) -> str | None:
        """The opener's token, after any transaction in progress that may set it; `None`: forgotten."""

    @abstractmethod
    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        """Sum rows of equal (key, value, time), with times advanced to since. Zeros vanish; rows whose sum
        needs more than 64 bits stay as they are. If since is empty, delete all rows. Returns how many rows
        are left, or `None` if fenced."""

    @abstractmethod
    async def forget(self, opener_id: str) -> None:
        """Remove the opener's row."""

    @abstractmethod
    async def wish(self, opener_id: str, for_s: float, waited_s: float) -> None:
        """Ask all other openers to change nothing for so long from now; see `Consensus.wish`."""

    def stand_back_s(self, opener_id: str, waited_s: float) -> float:
        """How long others wish this opener to wait, as the answers to `commit` tell; see
        `Consensus.stand_back_s`."""
        return self._heard.stand_back_s(STASH, opener_id, waited_s)

    @abstractmethod
    async def aclose(self) -> None:
        """Wait for transactions under way, then close; idempotent."""
