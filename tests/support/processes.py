"""A location with clients that are each like a process of its own, and a clock that tests move."""

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiopersist as ap
from aiopersist.storage.consensus import Consensus
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.conftest import StoreUrls


class Clock(FaultyConsensus):
    """A consensus store whose clock the test moves."""

    ahead_s = 0.0

    async def now(self) -> float:
        return await super().now() + self.ahead_s


@dataclass
class Place:
    """Its clients have these settings, unless they say others."""

    stack: AsyncExitStack
    settings: Mapping[str, Any]
    urls: StoreUrls = field(default_factory=lambda: _in_memory())

    def __post_init__(self) -> None:
        self.blob = ap.open_blob(self.urls.blob)
        self.stack.push_async_callback(self.blob.aclose)
        self.clock = Clock(self.consensus(), Faults())

    def consensus(self) -> Consensus:
        """The store, without the clock."""
        consensus = ap.open_consensus(self.urls.consensus)
        self.stack.push_async_callback(consensus.aclose)
        return consensus

    async def client(self, **settings: Any) -> ap.Client:
        return await self._opened(self.clock, settings)

    async def apart(self) -> ap.Client:
        """A client whose consensus store is a handle of its own: it races with others as a process does. The
        clock of the tests is not its own."""
        return await self._opened(self.consensus(), {})

    async def _opened(self, consensus: Consensus, settings: Mapping[str, Any]) -> ap.Client:
        opening = ap.open(
            blob=self.blob,
            consensus=consensus,
            settings=ap.Settings(**{**self.settings, **settings}),
            maintenance=False,
        )
        return await self.stack.enter_async_context(opening)

    async def parts(self) -> set[str]:
        """The blobs of parts that are there."""
        return {key async for key, _ in self.blob.list("") if key.endswith(".parquet")}


@asynccontextmanager
async def place_in_memory(**settings: Any) -> AsyncIterator[Place]:
    """A place whose clients have these settings; they end with the block."""
    async with AsyncExitStack() as stack:
        yield Place(stack, settings)


def _in_memory() -> StoreUrls:
    url = f"mem://{uuid.uuid4().hex}"
    return StoreUrls(url, url)
