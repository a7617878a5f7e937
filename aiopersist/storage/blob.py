"""The contract of a blob store: whole values under keys that are written once."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from aiopersist.base.errors import StorageUnavailable, Unsupported


class NotDeleted(StorageUnavailable):
    """These `keys` are still there, and waiting does not help; the others were deleted."""

    def __init__(self, message: str, keys: Sequence[str]) -> None:
        super().__init__(message, retry=False)
        self.keys = tuple(keys)


class Blob(ABC):
    """Bytes under keys. The library never reuses a key, so a value never changes once it is there.

    - Reads and lists see every `set` that has returned, whichever process made it.
    - A missing value is `None`, never an exception.
    - A failure that surely changed nothing is `StorageUnavailable`; with `retry=False` if waiting does not
      help. A failure of unknown outcome is `Indeterminate`, and any other exception counts as one.
    - A cancelled call may have happened, or may still happen.
    - Keys are relative paths of printable ASCII without empty, `.` or `..` components. The library uses no
      other keys, and makes no call after `aclose`; a store may refuse both with `InvalidUsage`.
    - The library uses a handle in one event loop.
    """

    @abstractmethod
    async def get(self, key: str) -> bytes | None:
        """Return the whole value, or `None`."""

    @abstractmethod
    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        """Return `value[offset : offset + length]`, shorter at the end of the value, perhaps empty; or
        `None`."""

    @abstractmethod
    async def set(self, key: str, data: bytes | memoryview) -> None:
        """Write a value: atomically, and durably when this returns. Repeating it with the same data is
        harmless. The caller may change `data` once the call has returned; never after a cancellation."""

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Delete these keys; absent ones are fine. If it fails, some may be deleted; after `NotDeleted` all
        but those that it names. Repeating it is harmless."""

    @abstractmethod
    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """Yield `(key, size in bytes)` of all keys that start with `prefix`, each once, in any order. Keys
        that are set or deleted meanwhile may be there or not."""

    async def create(self, key: str, data: bytes) -> bool:
        """Write a value as `set` does, unless the key has one; return whether it was written. Of several
        calls at once exactly one writes. `Unsupported` by this default. A repeat after a lost answer may
        return `False` for a value of its own. Only for keys outside of the folders of shards."""
        raise Unsupported(f"{self!r} cannot write a value only if there is none")

    @property
    def uri(self) -> str:
        """The place of the keys for other programs: `s3://bucket/prefix`, without a slash at the end, and
        without secrets. `Unsupported` by this default: only this library can read the store."""
        raise Unsupported(f"{self!r} is no place that other programs can read")

    async def facts(self) -> dict[str, str]:
        """Return what a person would want to know about this store, by name: its server, its version, what
        makes its writes durable. No secrets. This default knows nothing."""
        return {}

    async def probe(self) -> dict[str, str]:
        """Return facts that only a write shows, for example whether a put can be refused. Leaves nothing
        behind. This default tries nothing."""
        return {}

    @abstractmethod
    async def aclose(self) -> None:
        """Release connections and files; idempotent. The store itself stays."""
