"""Both stores in memory: a specification to read, and stores that pass the same suite as all others.

The data lies in a *namespace*: private to one handle (`mem://`), or shared by name and kept until the process
ends (`mem://name`). Each operation is a short step under the lock of the namespace, and never awaits inside
it. So all operations have one order, whichever threads and event loops they come from, which is the
meaning of linearizable; and a cancelled call has either happened entirely or not begun. Before its step each
operation lets other tasks run, as one with I/O does: a loop of operations starves no other task.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned, seqnos_of, sliced
from aiopersist.storage.keys import check_blob_key, check_consensus_key, check_entries, closed
from aiopersist.storage.waiters import Waiters
from aiopersist.storage.watch import Watch
from aiopersist.storage.wishes import HeardWishes, Wish

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
    """The data that the handles of one name share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    blobs: dict[str, bytes] = field(default_factory=dict)
    logs: dict[str, _Log] = field(default_factory=dict)
    waiters: Waiters = field(default_factory=Waiters)
    wishes: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """By key, until when each client wishes to go first, and since when it waits."""
    others: dict[str, Any] = field(default_factory=dict)
    """Data of other packages that lives as long as the namespace."""


_namespaces: dict[str, _Namespace] = {}
_namespaces_lock = threading.Lock()


def _namespace(name: str) -> _Namespace:
    if not name:
        return _Namespace()
    with _namespaces_lock:
        return _namespaces.setdefault(name, _Namespace())


class MemoryBlob(Blob):
    """Blobs in memory; handles of the same non-empty `name` share them. Nothing is durable."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._shared = _namespace(name)
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryBlob mem://{self._name}>"

    async def get(self, key: str) -> bytes | None:
        await self._begin(key)
        with self._shared.lock:
            return self._shared.blobs.get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        data = await self.get(key)
        return None if data is None else data[offset : offset + length]

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await self._begin(key)
        with self._shared.lock:
            self._shared.blobs[key] = bytes(data)

    async def create(self, key: str, data: bytes) -> bool:
        await self._begin(key)
        with self._shared.lock:
            return self._shared.blobs.setdefault(key, data) is data

    async def delete(self, keys: Sequence[str]) -> None:
        await self._begin(*keys)
        with self._shared.lock:
            for key in keys:
                self._shared.blobs.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        await self._begin()
        with self._shared.lock:
            items = [(key, len(data)) for key, data in self._shared.blobs.items() if key.startswith(prefix)]
        for key, size in items:
            yield key, size

    async def aclose(self) -> None:
        self._closed = True

    async def _begin(self, *keys: str) -> None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        if self._closed:
            raise closed("blob store")
        for key in keys:
            check_blob_key(key)


class MemoryConsensus(Consensus):
    """Versions in memory; handles of the same non-empty `name` share them. Nothing is durable."""

    def __init__(self, name: str = "", *, runtime: Runtime = SYSTEM) -> None:
        self._name = name
        self._shared = _namespace(name)
        self._runtime = runtime
        self._heard = HeardWishes(runtime)
        self._newer: dict[str, Versioned] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<MemoryConsensus mem://{self._name}>"

    async def head(self, key: str) -> Versioned | None:
        await self._begin([key])
        with self._shared.lock:
            log = self._shared.logs.get(key)
            return None if log is None else Versioned(log.head, log.data[-1])

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        moved: dict[str, Versioned | None] = {}
        for chunk in sliced(known, _KEYS_AT_ONCE):
            await self._begin(chunk)
            with self._shared.lock:
                for key, seqno in chunk.items():
                    log = self._shared.logs.get(key)
                    if (None if log is None else log.head) != seqno:
                        moved[key] = None if log is None else Versioned(log.head, log.data[-1])
        return moved

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.compare_and_set_many([Entry(key, expected, data)])

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        await self._begin()
        check_entries(entries)
        for entry in entries if self._newer else ():
            self._newer.pop(entry.key, None)
        with self._shared.lock:
            self._heard.hear([entry.key for entry in entries], self._wished([entry.key for entry in entries]))
            if lost := [entry.key for entry in entries if self._expected(entry.key) != entry.expected]:
                for key in lost:
                    if (log := self._shared.logs.get(key)) is not None:
                        self._newer[key] = Versioned(log.head, log.data[-1])
                return False
            for key, _, data in entries:
                self._shared.logs.setdefault(key, _Log(0, [])).data.append(bytes(data))
        self._shared.waiters.wake(seqnos := seqnos_of(entries), seqnos)
        return True

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        await self._begin(keys)
        now = self._runtime.monotonic()
        with self._shared.lock:
            for key in keys:
                self._shared.wishes.setdefault(key, {})[who] = now + for_s, now - waited_s
            self._heard.hear(keys, self._wished(keys))

    def stand_back_s(self, key: str, who: str, waited_s: float) -> float:
        return self._heard.stand_back_s(key, who, waited_s)

    def newer(self, key: str) -> Versioned | None:
        return self._newer.pop(key, None)

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        await self._begin([key])
        with self._shared.lock:
            log = self._shared.logs.get(key)
            if log is None:
                return []
            begin = max(from_seqno, log.first)
            data = log.data[begin - log.first :][: max(limit, 0)]
        return [Versioned(begin + i, value) for i, value in enumerate(data)]

    async def truncate(self, key: str, seqno: int) -> int:
        await self._begin([key])
        with self._shared.lock:
            log = self._shared.logs.get(key)
            if log is None or seqno > log.head:
                raise ValueError(f"cannot truncate {key!r} at {seqno}: its head is {log and log.head}")
            dropped = max(seqno - log.first, 0)
            del log.data[:dropped]
            log.first += dropped
            return dropped

    async def remove(self, key: str, expected: Versioned) -> bool:
        await self._begin([key])
        with self._shared.lock:
            log = self._shared.logs.get(key)
            if log is not None and (log.head, log.data[-1]) != expected:
                return False
            self._shared.logs.pop(key, None)
        self._shared.waiters.wake([key])
        return True

    async def list_keys(self, prefix: str) -> list[str]:
        await self._begin()
        with self._shared.lock:
            return sorted(key for key in self._shared.logs if key.startswith(prefix))

    async def watch(self, key: str) -> None:
        self._check([key])
        await self._shared.waiters.wait(key)

    def watch_together(self) -> Watch:
        self._check()
        return self._shared.waiters.watch()

    async def now(self) -> float:
        self._check()
        return self._runtime.wall()

    def attached(self, name: str, make: Callable[[], T]) -> T:
        """The data that another package keeps in this namespace under `name`; made by the first call."""
        with self._shared.lock:
            value: T = self._shared.others.setdefault(name, make())
            return value

    async def aclose(self) -> None:
        self._closed = True
        self._shared.waiters.wake_all()

    def _wished(self, keys: Sequence[str]) -> list[Wish]:
        """The wishes for these keys; those that are over are dropped."""
        lasting: list[Wish] = []
        for key in [key for key in keys if key in self._shared.wishes]:
            now, wishes = self._runtime.monotonic(), self._shared.wishes.pop(key)
            if current := {who: wish for who, wish in wishes.items() if wish[0] > now}:
                self._shared.wishes[key] = current
            lasting += [Wish(key, who, until - now, now - since) for who, (until, since) in current.items()]
        return lasting

    def _expected(self, key: str) -> int | None:
        log = self._shared.logs.get(key)
        return None if log is None else log.head

    async def _begin(self, keys: Iterable[str] = ()) -> None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        self._check(keys)

    def _check(self, keys: Iterable[str] = ()) -> None:
        if self._closed:
            raise closed("consensus store")
        for key in keys:
            check_consensus_key(key)
