"""Blobs on local disk: shared by processes, checked, evicted by use, and lost without harm."""

import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any, TypeVar

import pytest

import aiopersist as ap
from aiopersist.base.errors import InvalidLocation
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.base.settings import Settings
from aiopersist.storage.blob import Blob
from aiopersist.storage.disk_cache import DiskCache, DiskCacheBlob
from aiopersist.storage.layers import wrap_stores
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.readonly import ReadonlyBlob
from aiopersist.storage.urls import open_blob, parse_location
from aiopersist.storage.wrapper import Request, WrappedBlob
from tests.storage.test_conformance import OurBlob

T = TypeVar("T")
KIB = 1024


class Counting(WrappedBlob):
    def __init__(self, inner: Blob) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        self.calls[op] += 1
        return request()


def cached(
    store: MemoryBlob, folder: Path, limit: int = 1024 * KIB, runtime: Runtime = SYSTEM
) -> tuple[DiskCacheBlob, Counter[str]]:
    """A handle as another process would have it, and its requests."""
    inner = Counting(store)
    return DiskCacheBlob(inner, DiskCache(str(folder), limit, "mem://place", runtime)), inner.calls


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def store() -> MemoryBlob:
    return MemoryBlob(uuid.uuid4().hex)


class TestDiskCachedBlob(OurBlob):
    @pytest.fixture
    async def handles(self, tmp_path: Path) -> AsyncIterator[tuple[Blob, Blob]]:
        name = uuid.uuid4().hex
        one, two = (cached(MemoryBlob(name), tmp_path)[0] for _ in range(2))
        yield one, two
        await one.aclose()
        await two.aclose()


async def test_processes_share_what_was_read(store: MemoryBlob, tmp_path: Path) -> None:
    await store.set("s/k", b"0123456789")
    one, _ = cached(store, tmp_path)
    two, calls = cached(store, tmp_path)
    assert await one.get("s/k") == await two.get("s/k") == b"0123456789"
    assert await one.get_range("s/k", 2, 3) == await two.get_range("s/k", 2, 3) == b"234"
    assert calls == {}
    assert await two.get_range("s/k", 2, 4) == b"2345"
    assert calls == {"get_range": 1}


async def test_what_is_absent_and_the_identity_are_not_kept(store: MemoryBlob, tmp_path: Path) -> None:
    """Goal: a blob may be set a moment later, and the identity must be that of the store."""
    one, _ = cached(store, tmp_path)
    assert await one.get("s/k") is None
    await store.set("s/k", b"1")
    assert await one.get("s/k") == b"1"
    for identity in (b"a", b"b"):
        await store.set("location", identity)
        assert await one.get("location") == identity
    assert len(files(tmp_path)) == 1


async def test_what_is_deleted_is_forgotten(store: MemoryBlob, tmp_path: Path) -> None:
    one, _ = cached(store, tmp_path)
    await store.set("s/k", b"1")
    assert await one.get("s/k") and await one.get_range("s/k", 0, 1)
    await one.delete(["s/k", "s/absent"])
    assert await one.get("s/k") is None
    assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["a bit", "the end", "all", "another range", "another blob"])
async def test_a_damaged_file_is_fetched_anew(store: MemoryBlob, tmp_path: Path, damage: str) -> None:
    one, calls = cached(store, tmp_path)
    await store.set("s/k", b"0123456789")
    assert await one.get_range("s/k", 0, 4) == b"0123"
    (path,) = files(tmp_path)
    stored = bytearray(path.read_bytes())
    if damage == "another range":
        await one.get_range("s/k", 4, 4)
        stored = bytearray(next(p for p in files(tmp_path) if p != path).read_bytes())
    if damage == "another blob":
        await store.set("s/l", b"9876543210")
        await one.get_range("s/l", 0, 4)
        stored = bytearray(next(p for p in files(tmp_path) if p.parent != path.parent).read_bytes())
    if damage == "a bit":
        stored[-1] ^= 1
    path.write_bytes({"the end": stored[:-1], "all": b""}.get(damage, stored))
    calls.clear()
    for _ in range(2):
        assert await one.get_range("s/k", 0, 4) == b"0123"
    assert calls == {"get_range": 1}, "and kept again"


async def test_what_was_used_longest_ago_goes_first(store: MemoryBlob, tmp_path: Path) -> None:
    class Turning(Runtime):
        at = 1_700_000_000.0

        def wall(self) -> float:
            return self.at

    runtime, limit = Turning(), 64 * KIB
    one, calls = cached(store, tmp_path, limit, runtime)
    for number in range(40):
        await store.set(f"s/{number}", bytes(4 * KIB))
        runtime.at += 1000
        await one.get(f"s/{number}")
        for path in files(tmp_path):
            if path.stat().st_mtime > 1_750_000_000:  # of the system's clock, when it was written
                os.utime(path, (runtime.at, runtime.at))
        await one.get("s/0")
    assert sum(path.stat().st_size for path in files(tmp_path)) <= limit * 17 // 16
    calls.clear()
    for number in (0, 39):
        await one.get(f"s/{number}")
    assert calls == {}
    await one.get("s/1")
    assert calls == {"get": 1}


async def test_the_files_of_others_stay(store: MemoryBlob, tmp_path: Path) -> None:
    """Goal: a folder that is in use for something else loses nothing, however old or large that is."""
    others = [tmp_path / name for name in ("photo.jpg", "ab/notes", f"ab/{'0' * 64}/letter", "x/y/1-2")]
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(b"o" * 64 * KIB)
        os.utime(other, (0, 0))
    cache, _ = cached(store, tmp_path, limit=64 * KIB)
    for number in range(40):
        await store.set(f"s/{number}", b"x" * 4 * KIB)
        await cache.get(f"s/{number}")
    ours = [path for path in files(tmp_path) if path not in others]
    assert 5 < len(ours) < 20
    assert all(other.stat().st_size == 64 * KIB for other in others)


async def test_a_large_range_is_not_kept(store: MemoryBlob, tmp_path: Path) -> None:
    one, _ = cached(store, tmp_path, 64 * KIB)
    await store.set("s/k", bytes(9 * KIB))
    assert await one.get("s/k") == bytes(9 * KIB)
    assert files(tmp_path) == []


async def test_a_full_disk(store: MemoryBlob, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: reads go on, what is kept stays right, and the log says so once."""
    one, calls = cached(store, small_disk, 64 * 1024 * KIB)
    for number in range(20):
        await store.set(f"s/{number}", b"%02d" % number * 20 * KIB)
    for _ in range(2):
        for number in range(20):
            assert await one.get(f"s/{number}") == b"%02d" % number * 20 * KIB
    assert 20 < calls["get"] < 40
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    assert not [path for path in files(small_disk) if path.name.startswith(".tmp-")]


async def test_a_folder_that_is_none(store: MemoryBlob, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    one, calls = cached(store, tmp_path / "file")
    await store.set("s/k", b"1")
    for _ in range(2):
        assert await one.get("s/k") == b"1"
    assert calls == {"get": 2}


@pytest.mark.parametrize("readonly", [False, True])
async def test_reads_that_pass_the_caches(store: MemoryBlob, tmp_path: Path, readonly: bool) -> None:
    """Goal: what looks for damage in the store reads the store."""
    await store.set("s/k", b"1")
    disk, calls = cached(store, tmp_path)
    given: Blob = ReadonlyBlob(disk) if readonly else disk
    blob, _, _ = wrap_stores(given, MemoryConsensus(), Settings(blob_cache_bytes=0), SYSTEM)
    for _ in range(3):
        assert await blob.get("s/k") == b"1"
    assert calls == {"get": 1}
    assert await blob.uncached.get("s/k") == b"1"
    assert calls == {"get": 2}
    assert files(tmp_path)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("cache=", "'cache' is a folder"),
        ("cache_bytes=100", "'cache' is a folder"),
        ("cache=/tmp/x&cache_bytes=much", "'cache_bytes' is a number"),
        ("cache=/tmp/x&cache_bytes=0", "'cache_bytes' is a number"),
        ("cache=/tmp/x&cache=/tmp/y", "given twice"),
    ],
)
def test_options_that_cannot_be_used(options: str, match: str) -> None:
    with pytest.raises(InvalidLocation, match=match):
        open_blob(f"s3://bucket/prefix?{options}")


def test_only_stores_on_servers_have_a_cache(tmp_path: Path) -> None:
    with pytest.raises(InvalidLocation, match="unknown option 'cache'"):
        open_blob(f"file://{tmp_path}?cache=/tmp/x")
    found = parse_location("az://c/p?cache=/tmp/x&account=a&cache_bytes=5&poll_s=2")
    assert found.blob == "az://c/p/blob?cache=/tmp/x&account=a&cache_bytes=5"
    assert found.consensus == "az://c/p/consensus?account=a&poll_s=2"


async def test_a_location_with_a_cache(best_s3_url: str, tmp_path: Path) -> None:
    """Goal: what one client has read costs another no request, and the facts name the folder."""
    url = f"{best_s3_url}&cache={tmp_path}/cache&cache_bytes=100000000"
    settings: dict[str, Any] = {"inline_writes_single_max_bytes": 0, "blob_cache_bytes": 0}
    schema, gets = ap.Schema(key=str, val=int), []
    for number in range(3):
        async with ap.open(url, settings=ap.Settings(**settings)) as client:
            if number == 0:
                async with client.writer("t", schema) as w:
                    await w.write([(f"k{i}", i) for i in range(1000)])
                continue
            async with client.reader("t", schema) as r, r.snapshot() as s:
                assert len(await s.rows()) == 1000
            made = client.metrics().requests
            gets.append(sum(made[op].count for op in ("blob.get", "blob.get_range") if op in made))
    assert gets[0] > 0 == gets[1], gets
    blob = open_blob(url)
    assert "cache" in await blob.facts()
    assert await blob.probe()
    await blob.aclose()
