"""Every backend, and the stack of wrappers, passes the suite that is shipped."""

import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from aiopersist.runtime import SYSTEM
from aiopersist.settings import Settings
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.layers import stack
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.urls import open_blob, open_consensus
from aiopersist.testing.storage import BlobConformance, ConsensusConformance

SETTINGS = Settings(retry_timeout_s=5.0)


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


class TestMemoryBlob(BlobConformance):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(f"mem://{uuid.uuid4()}"):
            yield handles


class TestFilesBlob(BlobConformance):
    @pytest.fixture(params=["on", "off"], ids=["fsync", "no-fsync"])
    async def handles(
        self, tmp_path: Path, request: pytest.FixtureRequest
    ) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(f"file://{tmp_path}/blob?fsync={request.param}"):
            yield handles


class TestBlobStack(BlobConformance):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Blob, Blob]]:
        name = str(uuid.uuid4())
        one, two = (stack(MemoryBlob(name), MemoryConsensus(), SETTINGS, SYSTEM)[0] for _ in range(2))
        yield one, two
        await one.aclose()
        await two.aclose()


class TestMemoryConsensus(ConsensusConformance):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"mem://{uuid.uuid4()}"):
            yield handles


class Bare(Consensus):
    """A store of an application that defines what it must, and nothing else."""

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


class TestBareConsensus(ConsensusConformance):
    @pytest.fixture
    async def handles(self) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for one, two in consensuses(f"mem://{uuid.uuid4()}"):
            yield Bare(one), Bare(two)


class TestSqliteConsensus(ConsensusConformance):
    @pytest.fixture
    async def handles(self, tmp_path: Path) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(f"sqlite://{tmp_path}/state.db"):
            yield handles


class TestConsensusStack(ConsensusConformance):
    @pytest.fixture
    async def handles(self, tmp_path: Path) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for one, two in consensuses(f"sqlite://{tmp_path}/state.db"):
            yield (
                stack(MemoryBlob(), one, SETTINGS, SYSTEM)[1],
                stack(MemoryBlob(), two, SETTINGS, SYSTEM)[1],
            )


class TestPostgresConsensus(ConsensusConformance):
    @pytest.fixture
    async def handles(self, postgres_url: str) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(postgres_url):
            yield handles


class TestS3Blob(BlobConformance):
    @pytest.fixture
    async def handles(self, s3_url: str) -> AsyncIterator[tuple[Blob, Blob]]:
        async for handles in blobs(s3_url):
            yield handles
