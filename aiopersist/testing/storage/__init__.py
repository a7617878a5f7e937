"""What every store must do, as test classes to inherit from: `BlobConformance` in `blob`, and
`ConsensusConformance` in `consensus`, with parts in `heads`, `remove`, `wishes`. `docs/stores.md` shows how
to use them."""

from aiopersist.testing.storage.blob import BlobConformance
from aiopersist.testing.storage.consensus import ConsensusConformance

__all__ = ["BlobConformance", "ConsensusConformance"]
