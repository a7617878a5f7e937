"""An empty place in memory, of shards without clients."""

import uuid

import pytest

from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults
from tests.shard.register_kit import Place


@pytest.fixture
def place() -> Place:
    name = uuid.uuid4().hex
    return Place(MemoryBlob(name), MemoryConsensus(name), Faults())
