"""The wrappers of every store, stacked in one place: cache over retry over tracing over metrics
over the store.

Metrics are below the retries, so they count requests. The cache is above them, so a hit costs no request; a
cache on disk stands between both, if the blob store was opened with one.
Without metrics or a tracer, their wrappers are left out.

*Retries* repeat requests that are harmless to repeat: reads, blob writes and deletes, truncates, removals. A
compare-and-set is repeated only if it surely did not happen. After `Indeterminate` a repetition would take
its own success for a mismatch, so the error goes to the caller, which finds out the outcome. An exception
that is not of this library comes from a store of the application, and counts as `Indeterminate`.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from math import inf
from typing import Any, TypeVar

from aiopersist.base.errors import Error, Indeterminate, StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.measure.metrics import Metrics, NoMetrics
from aiopersist.measure.providers import Measures
from aiopersist.measure.tracing import Tracing
from aiopersist.storage.blob import Blob
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus, Versioned
from aiopersist.storage.readonly import ReadonlyBlob
from aiopersist.storage.stall import LOG_AFTER_S
from aiopersist.storage.wrapper import READS, CachedBlob, Request, WrappedBlob, WrappedConsensus

T = TypeVar("T")

log = logging.getLogger("aiopersist").getChild("storage")


def wrap_stores(
    blob: Blob, consensus: Consensus, settings: Settings, runtime: Runtime, measures: Measures | None = None
) -> tuple[CacheBlob, Consensus, Metrics]:
    """The two stores in their wrappers, and the counts of their requests. Closing a wrapper closes
    the store in it."""
    metrics, tracing = measures or Measures.new(runtime.monotonic, enabled=settings.metrics)
    blob, cached = _split(blob)
    if metrics.enabled:
        blob, consensus = MetricsBlob(blob, metrics), MetricsConsensus(consensus, metrics)
    if tracing.on:
        blob, consensus = TracedBlob(blob, tracing), TracedConsensus(consensus, tracing)
    consensus.limit_clock(settings.clock_ahead_max_s)
    retry = Retry(settings.retry_timeout_s, runtime, metrics)
    uncached, wrapped_consensus = RetryBlob(blob, retry), RetryConsensus(consensus, retry)
    wrapped_blob = uncached if cached is None else cached.before(uncached)
    return CacheBlob(wrapped_blob, settings.blob_cache_bytes, uncached), wrapped_consensus, metrics


def _split(blob: Blob) -> tuple[Blob, CachedBlob | None]:
    """The store, and the cache that it was opened with."""
    if isinstance(blob, CachedBlob):
        return blob.inner, blob
    if isinstance(blob, ReadonlyBlob) and isinstance(blob.inner, CachedBlob):
        return ReadonlyBlob(blob.inner.inner), blob.inner
    return blob, None


async def measured(metrics: Metrics, op: str, request: Request[T], sent: int) -> T:
    """Make the request, which sends values of `sent` bytes, and count it."""
    counts, began = metrics.op(op), metrics.now()
    counts.count += 1
    try:
        result = await request()
    except Exception:  # a cancellation is no failure of the store
        counts.errors += 1
        raise
    finally:
        counts.latencies.add(metrics.now() - began)
    counts.bytes += sent + _value_bytes(result)
    return result


def _value_bytes(result: object) -> int:
    """The bytes of the values in the answer of a store."""
    match result:
        case bytes():
            return len(result)
        case Versioned():
            return len(result.data)
        case dict():
            return sum(map(_value_bytes, result.values()))
        case list():
            return sum(map(_value_bytes, result))
    return 0


class MetricsBlob(WrappedBlob):
    """Counts the requests to `inner`; a list counts as one."""

    def __init__(self, inner: Blob, metrics: Metrics) -> None:
        super().__init__(inner)
        self._metrics = metrics

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return measured(self._metrics, f"blob.{op}", request, sent)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        items = self.inner.list(prefix)
        item = await self._request("list", lambda: anext(items, None))
        while item is not None:
            yield item
            item = await anext(items, None)


class MetricsConsensus(WrappedConsensus):
    """Counts the requests to `inner`, but neither `watch`, whose seconds would say nothing about the store,
    nor `now`, which as a rule reads a clock."""

    def __init__(self, inner: Consensus, metrics: Metrics) -> None:
        super().__init__(inner)
        self._metrics = metrics

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        if op == "watch":
            return request()
        return measured(self._metrics, f"consensus.{op}", request, sent)

    # every commit asks for these two: they pass no layer that they do not need

    def now(self) -> Coroutine[Any, Any, float]:
        return self.inner.now()

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        now = self._metrics.now
        counts, began = self._metrics.op("consensus.compare_and_set"), now()
        counts.count += 1
        try:
            result = await self.inner.compare_and_set(key, expected, data)
        except Exception:
            counts.errors += 1
            raise
        finally:
            counts.latencies.add(now() - began)
        counts.bytes += len(data)
        return result


class TracedBlob(WrappedBlob):
    """Requests to `inner` with spans; a list has none."""

    def __init__(self, inner: Blob, tracing: Tracing) -> None:
        super().__init__(inner)
        self._tracing = tracing

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._tracing.request(f"blob.{op}", request)


class TracedConsensus(WrappedConsensus):
    """Requests to `inner` with spans, but neither `watch` nor `now`; see `MetricsConsensus`."""

    def __init__(self, inner: Consensus, tracing: Tracing) -> None:
        super().__init__(inner)
        self._tracing = tracing

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return request() if op in ("watch", "now") else self._tracing.request(f"consensus.{op}", request)


class Retry:
    """Repeats requests until `timeout_s` has passed (`None`: without end), and then makes the last one. It
    logs an outage of more than `LOG_AFTER_S`, or that a request is given up: once, until a request of the
    same kind succeeds again."""

    def __init__(self, timeout_s: float | None, runtime: Runtime, metrics: Metrics | None = None) -> None:
        self._timeout_s = timeout_s
        self._runtime = runtime
        self._metrics = NoMetrics() if metrics is None else metrics
        self._logged: set[str] = set()

    async def repeat(self, op: str, request: Request[T], *, idempotent: bool = True) -> T:
        """Make the request, and again after failures that waiting may heal. A request that is not
        `idempotent` is made again only if it surely did not happen."""
        began, delays = self._runtime.monotonic(), None
        while True:
            try:
                result = await request()
            except Exception as error:  # a store of an application may raise anything
                failure = classified(op, error)
                delays = delays or self._runtime.delays()
                elapsed_s = self._runtime.monotonic() - began
                self._check(op, failure, idempotent, elapsed_s)
                left_s = inf if self._timeout_s is None else self._timeout_s - elapsed_s
                delay = min(next(delays), left_s)
                self._metrics.retried(op)
            else:
                if op in self._logged:
                    self._answered(op, self._runtime.monotonic() - began)
                return result
            await self._runtime.sleep(delay)

    def _answered(self, op: str, elapsed_s: float) -> None:
        self._logged.discard(op)
        extra = {"op": op, "seconds": elapsed_s}
        log.info("%s succeeds again: this request took %.0f s", op, elapsed_s, extra=extra)

    def _check(self, op: str, failure: Exception, idempotent: bool, elapsed_s: float) -> None:
        """Raise `failure` unless the request is to be made again."""
        determinate = isinstance(failure, StorageUnavailable) and failure.retry
        if not determinate and not (idempotent and isinstance(failure, Indeterminate)):
            raise failure
        if self._timeout_s is not None and elapsed_s >= self._timeout_s:
            if self._timeout_s > 0:
                self._log(op, failure, elapsed_s, is_last=True)
            if op in READS and isinstance(failure, Indeterminate):  # a read leaves nothing in doubt
                raise StorageUnavailable(str(failure)) from failure.__cause__
            raise failure
        if elapsed_s > LOG_AFTER_S:
            self._log(op, failure, elapsed_s, is_last=False)

    def _log(self, op: str, failure: Exception, elapsed_s: float, *, is_last: bool) -> None:
        if op not in self._logged:
            self._logged.add(op)
            self._metrics.stalled()
            extra = {"op": op, "seconds": elapsed_s, "error": type(failure).__name__}
            arguments = op, elapsed_s, failure
            if is_last:
                log.warning("%s has failed for %.0f s and is given up: %s", *arguments, extra=extra)
            else:
                log.warning("%s has failed for %.0f s and is being retried: %s", *arguments, extra=extra)


def classified(op: str, error: Exception) -> Exception:
    """`error` itself if it is of this library (or says that a caller's argument is wrong), else
    `Indeterminate` because of it. The text of a foreign error is left out: it may hold secrets."""
    if isinstance(error, Error) or (op == "truncate" and isinstance(error, ValueError)):
        return error
    failure = Indeterminate(f"{op} failed with {type(error).__name__}")
    failure.__cause__ = error
    return failure


class RetryBlob(WrappedBlob):
    """Repeats every request to `inner`: values never change, so all requests are harmless to repeat."""

    def __init__(self, inner: Blob, retry: Retry) -> None:
        super().__init__(inner)
        self._retry = retry

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._retry.repeat(op, request)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """A list that broke off begins anew, without the keys that it has yielded."""
        yielded: set[str] = set()
        items = self.inner.list(prefix)

        async def following() -> tuple[str, int] | None:
            nonlocal items
            try:
                return await anext(items, None)
            except Exception:
                items = self.inner.list(prefix)
                raise

        while (item := await self._request("list", following)) is not None:
            if item[0] not in yielded:
                yielded.add(item[0])
                yield item


class RetryConsensus(WrappedConsensus):
    """Repeats requests to `inner`; a compare-and-set only if it surely did not happen."""

    def __init__(self, inner: Consensus, retry: Retry) -> None:
        super().__init__(inner)
        self._retry = retry

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return self._retry.repeat(op, request, idempotent=not op.startswith("compare_and_set"))

    async def wish(self, keys: Sequence[str], who: str, for_s: float, waited_s: float) -> None:
        # a wish decides nothing, and its client tries again soon
        await self.inner.wish(keys, who, for_s, waited_s)

    async def now(self) -> float:
        try:
            return await self.inner.now()  # every commit asks for it
        except Exception:
            return await super().now()
