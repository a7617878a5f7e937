"""The parts of an arrangement, each with a hollow batch: `Fetch` reads these pairs."""

from collections.abc import Iterable

from aiopersist.base.frontier import TIME_MAX, Antichain
from aiopersist.parts.fetch import Named
from aiopersist.state.model import HollowBatch
from aiopersist.state.streams import TraceBatch, UnsealedBatch

ZERO = Antichain(0)


def of_unsealed(batches: Iterable[UnsealedBatch]) -> list[Named]:
    """The parts of unsealed batches, in order."""
    return [(hollow, part) for batch in batches for hollow in [_unsealed(batch)] for part in batch.parts]


def of_trace(batches: Iterable[TraceBatch]) -> list[Named]:
    """The parts of batches of a trace, in order."""
    return [(hollow, part) for batch in batches for hollow in [_trace(batch)] for part in batch.parts]


def _unsealed(batch: UnsealedBatch) -> HollowBatch:
    greatest = batch.time_greatest
    upper = Antichain() if greatest == TIME_MAX else Antichain(greatest + 1)
    lower = Antichain(batch.time_least)
    return HollowBatch(lower=lower, upper=upper, since=ZERO, parts=batch.parts)


def _trace(batch: TraceBatch) -> HollowBatch:
    lower, upper, since = map(Antichain, (batch.lower, batch.upper, batch.since))
    return HollowBatch(lower=lower, upper=upper, since=since, parts=batch.parts)
