"""Conformance of storage backends: `BlobConformance` and `ConsensusConformance`."""

from aiopersist.testing.storage.blob import BlobConformance
from aiopersist.testing.storage.consensus import ConsensusConformance

__all__ = ["BlobConformance", "ConsensusConformance"]
