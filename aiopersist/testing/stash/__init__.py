"""What every stash must do, as a test class to inherit from: `StashConformance`, see `collections`."""

from aiopersist.testing.stash.collections import StashConformance

__all__ = ["StashConformance"]
