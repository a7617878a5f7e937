"""The refusals of a stash. The type says what the caller can do; the text names the collection, and writes
frontiers as `{3}`, `{}`."""

from aiopersist.base.errors import Error
from aiopersist.base.frontier import Antichain


class StashError(Error):
    """A stash refused: nothing was changed."""

    @property
    def is_unrecoverable(self) -> bool:
        """Whether another opener took the stash over, so that this one can do nothing any more: stop."""
        return False


class Fenced(StashError):
    """Another opener took the stash over."""

    @property
    def is_unrecoverable(self) -> bool:
        return True


class NothingSealed(StashError):
    """No time of the collection is complete yet: seal it first."""

    def __init__(self, collection: str, since: Antichain, upper: Antichain) -> None:
        super().__init__(f"collection {collection!r}: nothing is sealed: since is {since}, upper is {upper}")
        self.collection = collection
        self.since = since
        self.upper = upper


class StaleLower(StashError):
    """Another append came first: read again, and make the batch again."""

    def __init__(self, collection: str, lower: Antichain, upper: Antichain) -> None:
        super().__init__(f"collection {collection!r}: lower is {lower}, but upper is {upper}")
        self.collection = collection
        self.lower = lower
        self.upper = upper
