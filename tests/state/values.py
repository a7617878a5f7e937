"""Values that several tests begin with."""

from aiopersist.base.frontier import Antichain

SHARD = "s00000000-0000-4000-8000-000000000000"


ZERO = Antichain(0)
