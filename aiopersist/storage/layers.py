"""What every store is wrapped in, stacked in one place: cache over retry over metrics over the backend.

Metrics are below the retries, so they count requests. The cache is above them, so what it holds
costs none.

*Retries* repeat what is harmless to repeat: reads, blob writes and deletes, truncates. A compare-and-set
is repeated only when it surely did not happen; after `Indeterminate` a repetition would take its own
success for a mismatch, so it is left to those who can settle it. An exception that is not of this
library comes from a store of the application: it counts as `Indeterminate`.
"""

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiopersist.errors import Error, Indeterminate, StorageUnavailable
from aiopersist.runtime import Runtime
from aiopersist.settings import Settings
from aiopersist.storage.blob import Blob
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.stall import LOG_AFTER_S
from aiopersist.storage.watch import Watch

T = TypeVar("T")
Attempt = Callable[[], Awaitable[T]]

log = logging.getLogger("aiopersist")


@dataclass
class OpMetrics:
    """One operation's requests. `bytes` are those of values, sent or received."""

    count: int = 0
    errors: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Metrics(Mapping[str, OpMetrics]):
    """What was asked of the two stores, by `blob.<method>` and `consensus.<method>`."""

    def __init__(self) -> None:
        self._ops: defaultdict[str, OpMetrics] = defaultdict(OpMetrics)

    def __getitem__(self, op: str) -> OpMetrics:
        return self._ops[op] if op in self._ops else OpMetrics()

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    async def measure(self, op: str, attempt: Attempt[T], size: Callable[[T], int], runtime: Runtime) -> T:
        """Make the request and count it; `size` gives the bytes of a result."""
        metrics, began = self._ops[op], runtime.monotonic()
        metrics.count += 1
        try:
            result = await attempt()
        except BaseException:
            metrics.errors += 1
            raise
        finally:
            metrics.seconds += runtime.monotonic() - began
        metrics.bytes += size(result)
        return result


def wrap_stores(
    blob: Blob, consensus: Consensus, settings: Settings, runtime: Runtime
) -> tuple[CacheBlob, Consensus, Metrics]:
    """The two stores in their wrappers, and the counts of their requests. Closing a wrapper closes
    what it wraps."""
    metrics = Metrics()
    retry = Retry(settings.retry_timeout_s, runtime)
    wrapped_blob = RetryBlob(MetricsBlob(blob, metrics, runtime), retry)
    wrapped_consensus = RetryConsensus(MetricsConsensus(consensus, metrics, runtime), retry)
    return (CacheBlob(wrapped_blob, settings.blob_cache_bytes), wrapped_consensus, metrics)


def _nothing(result: object) -> int:
    return 0


def _length(result: bytes | None) -> int:
    return len(result or b"")


async def _following(items: AsyncIterator[tuple[str, int]]) -> tuple[str, int] | None:
    try:
        return await anext(items)
    except StopAsyncIteration:
        return None


class MetricsBlob(Blob):
    """Counts the requests to `inner`."""

    def __init__(self, inner: Blob, metrics: Metrics, runtime: Runtime) -> None:
        self.inner = inner
        self._metrics = metrics
        self._runtime = runtime

    async def get(self, key: str) -> bytes | None:
        return await self._measure("get", lambda: self.inner.get(key), _length)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self._measure("get_range", lambda: self.inner.get_range(key, offset, length), _length)

    async def set(self, key: str, data: bytes | memoryview) -> None:
        size = memoryview(data).nbytes
        await self._measure("set", lambda: self.inner.set(key, data), lambda _: size)

    async def delete(self, keys: Sequence[str]) -> None:
        await self._measure("delete", lambda: self.inner.delete(keys), _nothing)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        items = self.inner.list(prefix)
        item = await self._measure("list", lambda: _following(items), _nothing)
        while item is not None:
            yield item
            item = await _following(items)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _measure(self, op: str, attempt: Attempt[T], size: Callable[[T], int]) -> T:
        return await self._metrics.measure(f"blob.{op}", attempt, size, self._runtime)


class MetricsConsensus(Consensus):
    """Counts the requests to `inner`."""

    def __init__(self, inner: Consensus, metrics: Metrics, runtime: Runtime) -> None:
        self.inner = inner
        self._metrics = metrics
        self._runtime = runtime

    async def head(self, key: str) -> Versioned | None:
        return await self._measure("head", lambda: self.inner.head(key), lambda v: len(v.data) if v else 0)

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        return await self._measure(
            "heads",
            lambda: self.inner.heads(known),
            lambda found: sum(len(v.data) for v in found.values() if v),
        )

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self._measure(
            "compare_and_set", lambda: self.inner.compare_and_set(key, expected, data), lambda _: len(data)
        )

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        size = sum(len(entry.data) for entry in entries)
        return await self._measure(
            "compare_and_set_many", lambda: self.inner.compare_and_set_many(entries), lambda _: size
        )

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        return await self._measure(
            "scan", lambda: self.inner.scan(key, from_seqno, limit), lambda vs: sum(len(v.data) for v in vs)
        )

    async def truncate(self, key: str, seqno: int) -> int:
        return await self._measure("truncate", lambda: self.inner.truncate(key, seqno), _nothing)

    async def remove(self, key: str, expected: Versioned) -> bool:
        return await self._measure("remove", lambda: self.inner.remove(key, expected), _nothing)

    async def list_keys(self, prefix: str) -> list[str]:
        return await self._measure("list_keys", lambda: self.inner.list_keys(prefix), _nothing)

    async def watch(self, key: str) -> None:
        await self.inner.watch(key)  # waits for others: its seconds would say nothing about the store

    def watch_together(self) -> Watch:
        return self.inner.watch_together()

    async def now(self) -> float:
        return await self.inner.now()  # a look at a clock, as a rule, and no request

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _measure(self, op: str, attempt: Attempt[T], size: Callable[[T], int]) -> T:
        return await self._metrics.measure(f"consensus.{op}", attempt, size, self._runtime)


READS = frozenset({"head", "heads", "scan", "list_keys", "watch", "now", "get", "get_range", "list"})


class Retry:
    """Repeats attempts until `timeout_s` has passed (`None`: without end). It notes an outage of more
    than `LOG_AFTER_S` in the log, once until a request of the same kind succeeds again."""

    def __init__(self, timeout_s: float | None, runtime: Runtime) -> None:
        self._timeout_s = timeout_s
        self._runtime = runtime
        self._logged: set[str] = set()

    async def repeat(self, op: str, attempt: Attempt[T], *, idempotent: bool = True) -> T:
        """Make the request; again after failures that waiting may heal. One that is not `idempotent`
        only when it surely did not happen."""
        began, delays = self._runtime.monotonic(), None
        while True:
            try:
                result = await attempt()
            except Exception as error:  # a foreign store may raise anything
                failure = classified(op, error)
                delays = delays or self._runtime.delays()
                delay = next(delays)
                self._check(op, failure, idempotent, self._runtime.monotonic() - began, delay)
            else:
                self._logged.discard(op)
                return result
            await self._runtime.sleep(delay)

    def _check(self, op: str, failure: Exception, idempotent: bool, elapsed_s: float, delay_s: float) -> None:
        """Raise `failure` unless the request is to be made again after `delay_s`."""
        determinate = isinstance(failure, StorageUnavailable) and failure.retry
        if not determinate and not (idempotent and isinstance(failure, Indeterminate)):
            raise failure
        if self._timeout_s is not None and elapsed_s + delay_s > self._timeout_s:
            if op in READS and isinstance(failure, Indeterminate):  # of a read nothing is in doubt
                raise StorageUnavailable(str(failure)) from failure.__cause__
            raise failure
        if elapsed_s > LOG_AFTER_S and op not in self._logged:
            self._logged.add(op)
            log.warning("%s has failed for %.0f s and is being retried: %s", op, elapsed_s, failure)


def classified(op: str, error: Exception) -> Exception:
    """`error` itself where it is of this library (or says that a caller's argument is wrong), else
    `Indeterminate` because of it. Foreign texts are left out: they may hold secrets."""
    if isinstance(error, Error) or (op == "truncate" and isinstance(error, ValueError)):
        return error
    failure = Indeterminate(f"{op} failed with {type(error).__name__}")
    failure.__cause__ = error
    return failure


class RetryBlob(Blob):
    """Repeats every request to `inner`: values never change, so all are harmless to repeat."""

    def __init__(self, inner: Blob, retry: Retry) -> None:
        self.inner = inner
        self._retry = retry

    async def get(self, key: str) -> bytes | None:
        return await self._retry.repeat("get", lambda: self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self._retry.repeat("get_range", lambda: self.inner.get_range(key, offset, length))

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await self._retry.repeat("set", lambda: self.inner.set(key, data))

    async def delete(self, keys: Sequence[str]) -> None:
        await self._retry.repeat("delete", lambda: self.inner.delete(keys))

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """A list that broke off is begun again, without what was told already."""
        told: set[str] = set()
        items = self.inner.list(prefix)

        async def following() -> tuple[str, int] | None:
            nonlocal items
            try:
                return await _following(items)
            except Exception:
                items = self.inner.list(prefix)
                raise

        while (item := await self._retry.repeat("list", following)) is not None:
            if item[0] not in told:
                told.add(item[0])
                yield item

    async def aclose(self) -> None:
        await self.inner.aclose()


class RetryConsensus(Consensus):
    """Repeats requests to `inner`; a compare-and-set only when it surely did not happen."""

    def __init__(self, inner: Consensus, retry: Retry) -> None:
        self.inner = inner
        self._retry = retry

    async def head(self, key: str) -> Versioned | None:
        return await self._retry.repeat("head", lambda: self.inner.head(key))

    async def heads(self, known: Mapping[str, int | None]) -> dict[str, Versioned | None]:
        return await self._retry.repeat("heads", lambda: self.inner.heads(known))

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self._retry.repeat(
            "compare_and_set", lambda: self.inner.compare_and_set(key, expected, data), idempotent=False
        )

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        return await self._retry.repeat(
            "compare_and_set_many", lambda: self.inner.compare_and_set_many(entries), idempotent=False
        )

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        return await self._retry.repeat("scan", lambda: self.inner.scan(key, from_seqno, limit))

    async def truncate(self, key: str, seqno: int) -> int:
        return await self._retry.repeat("truncate", lambda: self.inner.truncate(key, seqno))

    async def remove(self, key: str, expected: Versioned) -> bool:
        return await self._retry.repeat("remove", lambda: self.inner.remove(key, expected))

    async def list_keys(self, prefix: str) -> list[str]:
        return await self._retry.repeat("list_keys", lambda: self.inner.list_keys(prefix))

    async def watch(self, key: str) -> None:
        await self._retry.repeat("watch", lambda: self.inner.watch(key))

    def watch_together(self) -> Watch:
        return self.inner.watch_together()  # who watches looks for himself where it fails

    async def now(self) -> float:
        try:
            return await self.inner.now()  # asked for by every commit
        except Exception:
            return await self._retry.repeat("now", self.inner.now)

    async def aclose(self) -> None:
        await self.inner.aclose()
