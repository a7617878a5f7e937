"""Goal: every store, and the stack of wrappers, passes the shipped suite."""

import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from aiopersist.base.errors import InvalidUsage, Unsupported
from aiopersist.base.runtime import SYSTEM
from aiopersist.base.settings import Settings
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.layers import wrap_stores
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.urls import open_blob, open_consensus
from aiopersist.testing.storage import BlobConformance, ConsensusConformance
from aiopersist.testing.storage.heads import check_heads_of
from tests.support.obstore_s3 import by_obstore

SETTINGS = Settings(retry_timeout_s=60.0)


async def blobs(url: str) -> AsyncIterator[tuple[Blob, Blob]]:
    one, two = open_blob(url), open_blob(url)
    yield one, two
    await one.aclose()
    await two.aclose()


async def consensuses(url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
    one, two = open_consensus(url), open_consensus(url)
    yield one, two
    await one.aclose()
    await two.aclose()


NOT_KEYS = {
    "empty": "",
    "up": "../x",
    "up-inside": "a/../../x",
    "here": "./x",
    "absolute": "/etc/x",
    "empty-component": "a//b",
    "folder": "a/",
    "control": "a\nb",
    "nul": "a\0b",
    "not-ascii": "ä",
}


class OurBlob(BlobConformance):
    """The library's own stores promise more than the contract: they refuse illegal calls."""

    @pytest.mark.parametrize("key", NOT_KEYS.values(), ids=NOT_KEYS.keys())
    async def test_an_illegal_key_is_refused(self, handles: tuple[Blob, Blob], key: str) -> None:
        one, _ = handles
        with pytest.raises(InvalidUsage):
            await one.get(key)
        with pytest.raises(InvalidUsage):
            await one.set(key, b"x")
        with pytest.raises(InvalidUsage):
            await one.delete([key])

    async def test_use_after_close_is_refused(self, handles: tuple[Blob, Blob]) -> None:
        one, _ = handles
        await one.aclose()
        with pytest.raises(InvalidUsage):
            await one.get("k")


class OurConsensus(ConsensusConformance):
    """The same for consensus stores."""

    @pytest.mark.parametrize("key", ["", "a\0b", "\ud800"], ids=["empty", "nul", "surrogate"])
    async def test_an_illegal_key_is_refused(self, handles: tuple[Consensus, Consensus], key: str) -> None:
        one, _ = handles
        with pytest.raises(InvalidUsage):
            await one.head(key)
        with pytest.raises(InvalidUsage):
            await one.heads({key: None})
        with pytest.raises((InvalidUsage, Unsupported)):
            await one.remove(key, Versioned(0, b""))
        with pytest.raises(InvalidUsage):
            await one.compare_and_set(key, None, b"")

    async def test_many_with_a_key_twice_is_refused(self, handles: tuple[Consensus, Consensus]) -> None:
        one, two = handles
        with pytest.raises(InvalidUsage):
            await one.compare_and_set_many([Entry("k", None, b"0"), Entry("k", 0, b"1")])
        assert await two.head("k") is None

    async def test_use_after_close_is_refused(self, handles: tuple[Consensus, Consensus]) -> None:
        one, _ = handles
        await one.aclose()
        with pytest.raises(InvalidUsage):
            await one.head("k")
        with pytest.raises(InvalidUsage):
            await one.compare_and_set("k", 0, b"1")


class TestMemoryBlob(OurBlob):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(f"mem://{uuid.uuid4()}"):
            yield handles


class TestFilesBlob(OurBlob):
    @pytest.fixture(params=["on", "off"], ids=["fsync", "no-fsync"])
    async def handles(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(f"file://{tmp_path}/blob?fsync={request.param}"):
            yield handles


class TestBlobStack(OurBlob):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Blob, Blob]]:
        name = str(uuid.uuid4())
        one, two = (wrap_stores(MemoryBlob(name), MemoryConsensus(), SETTINGS, SYSTEM)[0] for _ in range(2))
        yield one, two
        await one.aclose()
        await two.aclose()


class TestMemoryConsensus(OurConsensus):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"mem://{uuid.uuid4()}"):
            yield handles


class Bare(Consensus):
    """A store of an application that defines only the abstract methods."""

    def __init__(self, inner: Consensus) -> None:
        self.inner = inner

    async def head(self, key: str) -> Versioned | None:
        return await self.inner.head(key)

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.inner.compare_and_set(key, expected, data)

    async def compare_and_set_many(self, entries: Sequence[Entry]) -> bool:
        return await self.inner.compare_and_set_many(entries)

    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Versioned]:
        return await self.inner.scan(key, from_seqno, limit)

    async def truncate(self, key: str, seqno: int) -> int:
        return await self.inner.truncate(key, seqno)

    async def list_keys(self, prefix: str) -> list[str]:
        return await self.inner.list_keys(prefix)

    async def watch(self, key: str) -> None:
        await self.inner.watch(key)

    async def now(self) -> float:
        return await self.inner.now()

    async def aclose(self) -> None:
        await self.inner.aclose()


class TestBareConsensus(OurConsensus):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for one, two in consensuses(f"mem://{uuid.uuid4()}"):
            yield Bare(one), Bare(two)


class TestSqliteConsensus(OurConsensus):
    @pytest.fixture
    async def handles(self, tmp_path: Path) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"sqlite://{tmp_path}/state.db"):
            yield handles


class TestConsensusStack(OurConsensus):
    @pytest.fixture
    async def handles(self, tmp_path: Path) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for one, two in consensuses(f"sqlite://{tmp_path}/state.db"):
            yield (
                wrap_stores(MemoryBlob(), one, SETTINGS, SYSTEM)[1],
                wrap_stores(MemoryBlob(), two, SETTINGS, SYSTEM)[1],
            )


class TestPostgresConsensus(OurConsensus):
    @pytest.fixture
    async def handles(self, postgres_url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(postgres_url):
            yield handles


class TestS3Consensus(OurConsensus):
    @pytest.fixture
    async def handles(self, s3_url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"{s3_url}&poll_s=0.05"):
            yield handles

    @pytest.mark.parametrize("count", [60, pytest.param(600, marks=pytest.mark.long)])
    async def test_heads_of_many(self, handles: tuple[Consensus, Consensus], count: int) -> None:
        """Each key is created and read by requests of its own, which take long together."""
        await check_heads_of(handles, count)


class TestS3Blob(OurBlob):
    @pytest.fixture
    async def handles(self, s3_url: str) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(s3_url):
            yield handles


@pytest.mark.long  # by default consensus on S3 and by obstore are tested, but not both together
class TestS3ConsensusByObstore(OurConsensus):
    @pytest.fixture
    async def handles(self, s3_url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(by_obstore(f"{s3_url}&poll_s=0.05")):
            yield handles


class TestS3BlobByObstore(OurBlob):
    @pytest.fixture
    async def handles(self, s3_url: str) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(by_obstore(s3_url)):
            yield handles

    @pytest.mark.long
    async def test_list_is_complete_beyond_a_page(self, handles: tuple[Blob, Blob]) -> None:
        await super().test_list_is_complete_beyond_a_page(handles)


class TestAzureConsensus(OurConsensus):
    """azurite takes a few milliseconds of a core for each request, so some tests are for the long run."""

    @pytest.fixture
    async def handles(self, azure_url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"{azure_url}&poll_s=0.05"):
            yield handles

    @pytest.mark.long
    async def test_heads_of_many(self, handles: tuple[Consensus, Consensus]) -> None:
        await super().test_heads_of_many(handles)

    @pytest.mark.long
    async def test_heads_are_of_now(self, handles: tuple[Consensus, Consensus]) -> None:
        await super().test_heads_are_of_now(handles)

    @pytest.mark.long
    async def test_truncate_races_with_compare_and_set(self, handles: tuple[Consensus, Consensus]) -> None:
        await super().test_truncate_races_with_compare_and_set(handles)


class TestAzureBlob(OurBlob):
    @pytest.fixture
    async def handles(self, azure_url: str) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(azure_url):
            yield handles

    @pytest.mark.long
    async def test_list_is_complete_beyond_a_page(self, handles: tuple[Blob, Blob]) -> None:
        await super().test_list_is_complete_beyond_a_page(handles)


@pytest.mark.long  # the same code as for Azure
class TestGoogleConsensus(OurConsensus):
    """On a stand-in, unless a bucket is named: see the fixture."""

    @pytest.fixture
    async def handles(self, gcs_url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"{gcs_url}&poll_s=0.05"):
            yield handles


class TestGoogleBlob(OurBlob):
    """On a stand-in, unless a bucket is named: see the fixture."""

    @pytest.fixture
    async def handles(self, gcs_url: str) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(gcs_url):
            yield handles
