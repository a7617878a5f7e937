"""Conformance of storage backends: `BlobConformance` and `ConsensusConformance`."""

from aiopersist.testing.storage_blob import BlobConformance
from aiopersist.testing.storage_consensus import ConsensusConformance

__all__ = ["BlobConformance", "ConsensusConformance"]
