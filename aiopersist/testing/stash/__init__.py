"""What every stash must do, as a test class to inherit from: `StashConformance` in `collections`. Its parts
are in `append`, `owners` and `typed`."""

from aiopersist.testing.stash.collections import StashConformance

__all__ = ["StashConformance"]
