"""The little that consensus needs of an object store."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class Tagged(NamedTuple):
    """An object as a list shows it."""

    name: str
    tag: str
    """Differs for objects of different bytes."""


class Object(NamedTuple):
    """An object as it is read."""

    data: bytes
    tag: str


class Bucket(ABC):
    """Objects by name, in one place of an object store.

    - An object that a call has written is seen by every read and list that begins after the call has
      returned; one that was deleted is not.
    - A list need not be of one moment: it passes the names in their order, and shows what is there when it
      passes them.
    - Errors are those of `Consensus`: `StorageUnavailable` where surely nothing was changed, `Indeterminate`
      where a write may have happened, or may still happen.
    """

    seeks = True
    """Whether a list begins at `after` without passing what is before it."""

    @abstractmethod
    async def create(self, name: str, data: bytes) -> str | None:
        """Write the object unless there is one of that name; its tag. `None`: there is one."""

    @abstractmethod
    async def get(self, name: str) -> Object | None:
        """The object; `None` if there is none."""

    @abstractmethod
    async def find(self, prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        """The objects whose names begin with `prefix` and are greater than `after`, by name; at most `limit`.
        One request for each thousand."""

    @abstractmethod
    async def folders(self, prefix: str) -> list[str]:
        """What follows `prefix` up to the next slash in the names that have one, each once."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Delete the objects; those that are absent are fine, and some may be deleted if it fails."""

    @abstractmethod
    async def now(self) -> float:
        """The store's clock in Unix seconds, within a second. No request, or one if no answer told it yet."""

    @abstractmethod
    async def clock(self) -> float:
        """The store's clock as it says during this call."""

    @property
    @abstractmethod
    def clock_error_s(self) -> float:
        """See `Consensus.clock_error_s`."""

    def limit_clock(self, ahead_max_s: float) -> None:
        """See `Consensus.limit_clock`."""
        return

    async def facts(self) -> dict[str, str]:
        """See `Consensus.facts`."""
        return {}

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections; idempotent."""
