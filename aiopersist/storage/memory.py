"""Both stores in memory: the specification one can read, and a backend that passes the same suite.

The data lies in a *place*: private to one handle (`mem://`), or shared by name within the process
and as old as the process (`mem://name`). Each operation is a short step under the place's lock, and
never awaits inside it. So all operations have one order, which is what linearizable means, whatever
threads and loops they come from; and a cancelled call has either happened entirely or not begun.
Before its step each operation lets other tasks run, as one that does I/O does: a loop of operations
starves nobody.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiopersist.runtime import SYSTEM, Runtime
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned, sliced
from aiopersist.storage.keys import check_blob_key, check_consensus_key, check_entries, closed
from aiopersist.storage.waiters import Waiters
from aiopersist.storage.watch import Watch

T = TypeVar("T")

_KEYS_AT_ONCE = 1000  # far below a millisecond


@dataclass
class _Log:
    """The live versions of a key: `data[i]` is version `first + i`; never empty."""

    first: int
    data: list[bytes]

    @property
    def head(self) -> int:
        return self.first + len(self.data) - 1


@dataclass
class _Namespace:
    """What the handles of one name share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    blobs: dict[str, bytes] = field(default_factory=dict)
    logs: dict[str, _Log] = field(default_factory=dict)
    waiters: Waiters = field(default_factory=Waiters)
    tenants: dict[str, Any] = field(default_factory=dict)
    """What else lives as long as the place."""


_places: dict[str, _Namespace] = {}
_places_lock = threading.Lock()


def _place(name: str) -> _Namespace:
    if not name:
        return _Namespace()
    with _places_lock:
        return _places.setdefault(name, _Namespace())


class MemoryBlob(Blob):
    """Blobs in memory; handles of the same non-empty `name` share them. Nothing is durable."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._place = _place(name)
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryBlob mem://{self._name}>"

    async def get(self, key: str) -> bytes | None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check(key)
        with self._place.lock:
            return self._place.blobs.get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        data = await self.get(key)
        return None if data is None else data[offset : offset + length]

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check(key)
        with self._place.lock:
            self._place.blobs[key] = bytes(data)

    async def delete(self, keys: Sequence[str]) -> None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check(*keys)
        with self._place.lock:
            for key in keys:
                self._place.blobs.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check()
        with self._place.lock:
            found = [(key, len(data)) for key, data in self._place.blobs.items() if key.startswith(prefix)]
        for key, size in found:
            yield key, size

    async def aclose(self) -> None:
        self._closed = True

    def _check(self, *keys: str) -> None:
        if self._closed:
            raise closed("blob store")
        for key in keys:
            check_blob_key(key)


class MemoryConsensus(Consensus):
    """Versions in memory; handles of the same non-empty `name` share them. Nothing is durable."""

    def __init__(self, name: str = "", *, runtime: Runtime = SYSTEM) -> None:
        self._name = name
        self._place = _place(name)
        self._runtime = runtime
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryConsensus mem://{self._name}>"

    async def head(self, key: str) -> Versioned | None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([key])
        with self._place.lock:
            log = self._place.logs.get(key)
            return None if log is None else Versioned(log.head, log.data[-1])

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        found: dict[str, Versioned | None] = {}
        for some in sliced(known, _KEYS_AT_ONCE):
            await asyncio.sleep(0)  # noqa: TID251  # no time passes
            self._check(some)
            with self._place.lock:
                for key, seqno in some.items():
                    log = self._place.logs.get(key)
                    if (None if log is None else log.head) != seqno:
                        found[key] = None if log is None else Versioned(log.head, log.data[-1])
        return found

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.compare_and_set_many([Entry(key, expected, data)])

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([])
        check_entries(entries)
        with self._place.lock:
            if any(self._expected(entry.key) != entry.expected for entry in entries):
                return False
            for key, _, data in entries:
                self._place.logs.setdefault(key, _Log(0, [])).data.append(bytes(data))
        self._place.waiters.wake([entry.key for entry in entries])
        return True

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([key])
        with self._place.lock:
            log = self._place.logs.get(key)
            if log is None:
                return []
            begin = max(from_seqno, log.first)
            data = log.data[begin - log.first :][: max(limit, 0)]
        return [Versioned(begin + i, value) for i, value in enumerate(data)]

    async def truncate(self, key: str, seqno: int) -> int:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([key])
        with self._place.lock:
            log = self._place.logs.get(key)
            if log is None or seqno > log.head:
                raise ValueError(f"cannot truncate {key!r} at {seqno}: its head is {log and log.head}")
            dropped = max(seqno - log.first, 0)
            del log.data[:dropped]
            log.first += dropped
            return dropped

    async def remove(self, key: str, expected: Versioned) -> bool:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([key])
        with self._place.lock:
            log = self._place.logs.get(key)
            if log is not None and (log.head, log.data[-1]) != expected:
                return False
            self._place.logs.pop(key, None)
        self._place.waiters.wake([key])
        return True

    async def list_keys(self, prefix: str) -> list[str]:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([])
        with self._place.lock:
            return sorted(key for key in self._place.logs if key.startswith(prefix))

    async def watch(self, key: str) -> None:
        self._check([key])
        await self._place.waiters.wait(key)

    def watch_together(self) -> Watch:
        self._check([])
        return self._place.waiters.watch()

    async def now(self) -> float:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check([])
        return self._runtime.wall()

    def tenant(self, name: str, make: Callable[[], T]) -> T:
        """What else lives in this place under `name`; made by the first who asks."""
        with self._place.lock:
            found: T = self._place.tenants.setdefault(name, make())
            return found

    async def aclose(self) -> None:
        self._closed = True
        self._place.waiters.wake_all()

    def _expected(self, key: str) -> int | None:
        log = self._place.logs.get(key)
        return None if log is None else log.head

    def _check(self, keys: Iterable[str]) -> None:
        if self._closed:
            raise closed("consensus store")
        for key in keys:
            check_consensus_key(key)
