"""The contract of an object store: whole values under keys that are written once."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence


class Blob(ABC):
    """Bytes under keys. Keys are never reused, so a value never changes once it is there.

    - Reads and lists see every `set` that has returned, from anywhere.
    - Missing is `None`, never an exception.
    - A failure that surely changed nothing is `StorageUnavailable`; one of unknown outcome is
      `Indeterminate`, and so counts any other exception.
    - Keys are relative paths of printable ASCII without empty, `.` or `..` components. The library asks for
      no others, and for nothing once it has called `aclose`; a store may refuse what is not so.
    """

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """The whole value."""

    @abstractmethod
    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        """`value[offset : offset + length]`: shorter where the value ends, perhaps empty."""

    @abstractmethod
    async def set(self, key: str, data: bytes | memoryview) -> None:
        """Atomic, and durable when it returns. Repeating it with the same data is harmless."""

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Absent keys are fine. When it fails some may be deleted; repeating it is harmless."""

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """All `(key, size in bytes)` whose key starts with `prefix`, in any order. What is set or
        deleted meanwhile may be missing or be there."""

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections and files; idempotent. The store itself stays."""
