"""Goal: the wrappers repeat only requests that may be repeated, count requests, and keep blobs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.base.settings import Settings
from aiopersist.storage.blob import Blob
from aiopersist.storage.cache import CacheBlob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.layers import Metrics, wrap_stores
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.clock import Hurried

Stores = tuple[Blob, Consensus]
OPERATIONS: dict[str, Callable[[Stores], Awaitable[object]]] = {
    "get": lambda s: s[0].get("k"),
    "get_range": lambda s: s[0].get_range("k", 0, 1),
    "set": lambda s: s[0].set("k2", b"x"),
    "delete": lambda s: s[0].delete(["k2"]),
    "head": lambda s: s[1].head("k"),
    "heads": lambda s: s[1].heads({"k": None}),
    "scan": lambda s: s[1].scan("k", 0, 1),
    "truncate": lambda s: s[1].truncate("k", 0),
    "list_keys": lambda s: s[1].list_keys(""),
    "now": lambda s: s[1].now(),
    "compare_and_set": lambda s: s[1].compare_and_set("k", 0, b"1"),
    "compare_and_set_many": lambda s: s[1].compare_and_set_many([Entry("k", 0, b"1")]),
}
WRITES_ONCE = ("compare_and_set", "compare_and_set_many")


async def stacked(faults: Faults, **settings: float) -> tuple[CacheBlob, Consensus, Metrics, Hurried]:
    blob, consensus, runtime = MemoryBlob(), MemoryConsensus(), Hurried()
    await blob.set("k", b"abc")
    await consensus.compare_and_set("k", None, b"0")
    wrapped = wrap_stores(
        FaultyBlob(blob, faults), FaultyConsensus(consensus, faults), Settings(**settings), runtime
    )
    return *wrapped, runtime


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED])
async def test_what_is_repeated(op: str, outcome: Outcome) -> None:
    faults = Faults()
    blob, consensus, *_ = await stacked(faults)
    faults.fail_next(op, outcome, times=3)
    if op in WRITES_ONCE and outcome is not Outcome.REFUSED:
        with pytest.raises(Indeterminate):
            await OPERATIONS[op]((blob, consensus))
        assert faults.calls[op] == 1
    else:
        await OPERATIONS[op]((blob, consensus))
        assert faults.calls[op] == 4


async def test_a_list_goes_on_where_it_broke_off() -> None:
    faults = Faults()
    blob, *_ = await stacked(faults)
    for i in range(5):
        await blob.set(f"l/{i}", b"x")
    faults.fail_next("list", Outcome.LOST, times=2)
    assert sorted([key async for key, _ in blob.list("l/")]) == [f"l/{i}" for i in range(5)]


async def test_a_lasting_failure_is_not_repeated() -> None:
    class Full(MemoryBlob):
        async def set(self, key: str, data: bytes | memoryview) -> None:
            raise StorageUnavailable("full", retry=False)

    blob, _, metrics = wrap_stores(Full(), MemoryConsensus(), Settings(), Hurried())
    with pytest.raises(StorageUnavailable, match="full"):
        await blob.set("k", b"x")
    assert metrics["blob.set"].count == metrics["blob.set"].errors == 1


@pytest.mark.parametrize("limit_s", [0, 3, 60])
async def test_the_limit_of_retries(limit_s: int, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the last try is made when the time is over, and not before; the log says that it was the last."""
    faults = Faults(rates={Outcome.REFUSED: 1.0})
    blob, *_, runtime = await stacked(faults, retry_timeout_s=limit_s)
    with caplog.at_level(logging.WARNING, "aiopersist"):
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await blob.get("k")
    assert runtime.passed == pytest.approx(2 * limit_s)
    told = [record.getMessage() for record in caplog.records]
    if limit_s == 3:
        assert told == ["get has failed for 3 s and is given up: injected: get was refused"]
    assert len(told) == (limit_s > 0)


async def _reads_well(faults: Faults, consensus: Consensus) -> None:
    rates, faults.rates = faults.rates, {}
    await consensus.head("k")
    faults.rates = rates


async def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults(rates={Outcome.REFUSED: 1.0})
    blob, consensus, *_ = await stacked(faults, retry_timeout_s=300)
    with caplog.at_level(logging.WARNING, "aiopersist"):
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await blob.get("k")
        assert len(caplog.records) == 1
        await _reads_well(faults, consensus)
        assert len(caplog.records) == 1  # that is another kind of request
        faults.heal()
        await blob.get("k")
        faults.rates = {Outcome.REFUSED: 1.0}
        with pytest.raises(StorageUnavailable):
            await blob.get("another")
    assert len(caplog.records) == 2


async def test_a_short_outage_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    blob, *_ = await stacked(faults)
    faults.fail_next("get", Outcome.REFUSED, times=5)
    await blob.get("k")
    assert caplog.records == []


async def test_a_foreign_exception_is_of_unknown_outcome() -> None:
    class Odd(MemoryConsensus):
        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            raise RuntimeError("password is hunter2")

    _, consensus, _ = wrap_stores(MemoryBlob(), Odd(), Settings(), Hurried())
    with pytest.raises(Indeterminate, match="RuntimeError") as caught:
        await consensus.compare_and_set("k", None, b"")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "hunter2" not in str(caught.value)


async def test_a_callers_mistake_comes_through() -> None:
    _, consensus, *_ = await stacked(Faults())
    with pytest.raises(ValueError):
        await consensus.truncate("k", 7)


async def test_metrics_count_requests() -> None:
    faults = Faults()
    blob, consensus, metrics, _ = await stacked(faults)
    faults.fail_next("get", Outcome.REFUSED)
    await blob.get("k")
    await blob.get("k")  # from the cache
    await blob.set("k3", memoryview(b"12345"))
    assert await consensus.head("k") == Versioned(0, b"0")
    counted = {op: (m.count, m.errors, m.bytes) for op, m in metrics.items()}
    assert counted == {"blob.get": (2, 1, 3), "blob.set": (1, 0, 5), "consensus.head": (1, 0, 1)}
    assert metrics["blob.list"].count == 0


class Counting(MemoryBlob):
    """Counts reads, and holds them back until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def get(self, key: str) -> bytes | None:
        self.reads += 1
        await self.gate.wait()
        return await super().get(key)


class TestCache:
    async def test_what_was_read_is_kept(self) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 8000)
        await inner.set("k", b"0123456789")
        assert [await cache.get("k") for _ in range(3)] == [b"0123456789"] * 3
        assert await cache.get_range("k", 2, 3) == b"234"
        assert inner.reads == 1
        assert await cache.uncached.get("k") == b"0123456789"
        assert inner.reads == 2

    async def test_ranges_are_kept(self) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 8000)
        await inner.set("k", b"0123456789")
        assert [await cache.get_range("k", 1, 2) for _ in range(2)] == [b"12"] * 2
        assert await cache.get_range("k", 1, 3) == b"123"
        assert inner.reads == 2

    async def test_missing_is_never_kept(self) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 8000)
        assert await cache.get("k") is None
        await inner.set("k", b"x")
        assert await cache.get("k") == b"x"

    async def test_deleted_is_gone(self) -> None:
        cache = CacheBlob(Counting(), 8000)
        await cache.set("k", b"0123456789")
        await cache.get_range("k", 1, 2)
        await cache.get("k")
        await cache.delete(["k"])
        assert await cache.get("k") is None
        assert await cache.get_range("k", 1, 2) is None

    async def test_the_least_recently_used_goes_first(self) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 80)
        for i in range(9):
            await inner.set(f"k{i}", b"x" * 10)
        for i in range(8):
            await cache.get(f"k{i}")
        await cache.get("k0")
        await cache.get("k8")  # k1 goes
        inner.reads = 0
        for key in ("k0", "k2", "k8"):
            await cache.get(key)
        assert inner.reads == 0
        await cache.get("k1")
        assert inner.reads == 1

    async def test_a_large_value_is_not_kept(self) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 80)
        await inner.set("big", b"x" * 11)
        await cache.get("big")
        await cache.get("big")
        assert inner.reads == 2

    async def test_those_who_ask_at_once_share_a_request(self) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 0)  # also without keeping anything
        await inner.set("k", b"x")
        inner.gate.clear()
        asking = [asyncio.create_task(cache.get("k")) for _ in range(5)]
        await asyncio.sleep(0.01)
        inner.gate.set()
        assert await asyncio.gather(*asking) == [b"x"] * 5
        assert inner.reads == 1

    @pytest.mark.parametrize("cancelled", [0, 1])
    async def test_the_cancellation_of_one_is_not_that_of_others(self, cancelled: int) -> None:
        inner = Counting()
        cache = CacheBlob(inner, 8000)
        await inner.set("k", b"x")
        inner.gate.clear()
        asking = [asyncio.create_task(cache.get("k")) for _ in range(3)]
        await asyncio.sleep(0.01)
        asking[cancelled].cancel()
        await asyncio.sleep(0.01)
        inner.gate.set()
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert [r for i, r in enumerate(results) if i != cancelled] == [b"x"] * 2
        assert isinstance(results[cancelled], asyncio.CancelledError)


async def test_a_wrapper_that_changes_a_read_changes_those_that_answer_like_it() -> None:
    """Goal: what a wrapper of another project does to `head` and `scan` it does to all reads."""

    class Changed(FaultyConsensus):
        async def head(self, key: str) -> Versioned | None:
            found = await super().head(key)
            return found and found._replace(data=b"head")

        async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
            return [found._replace(data=b"scan") for found in await super().scan(key, from_seqno, limit)]

    inner = MemoryConsensus()
    assert await inner.compare_and_set("k", None, b"0")
    changed = Changed(inner, Faults())
    assert await changed.likely_head("k", 0) == Versioned(0, b"head")
    assert await changed.versions("k", 0, 0) == [Versioned(0, b"scan")]
