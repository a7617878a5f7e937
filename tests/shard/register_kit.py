"""Helpers that the tests of the register share."""

from typing import Any, NamedTuple

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus


class Place(NamedTuple):
    """A place in memory, what happens on the way to it, and how to look at it."""

    blob: MemoryBlob
    consensus: MemoryConsensus
    faults: Faults

    def open(self, *, maintenance: bool = True, **limits: Any) -> Any:
        return ap.open(
            blob=FaultyBlob(self.blob, self.faults),
            consensus=FaultyConsensus(self.consensus, self.faults),
            settings=ap.Settings(**{"retry_timeout_s": 60.0, **limits}),
            maintenance=maintenance,
        )

    async def keys(self, end: str) -> list[str]:
        return [key async for key, _ in self.blob.list("") if key.endswith(end)]
