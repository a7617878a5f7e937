"""The steps of a subscription."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aiopersist.base.frontier import Antichain
from aiopersist.data.updates.updates import Updates
from aiopersist.state.position import Position

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class StepMark:
    """Identifies a step for its acknowledgement."""

    owner: str
    """The opening that delivered the step."""
    position: Position
    """The position after the step."""
    is_acknowledged: bool = False
    """Whether this process knows that it was acknowledged itself, not only by a later step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStep:
    """A step, and the position after it."""

    upper: Antichain
    """Everything before it was delivered."""
    cursor: str
    """Text from which a subscription or a feed continues after this step."""
    contents: bool
    """Whether it is part of the contents at the beginning."""
    _mark: StepMark = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribedUpdates(SubscriptionStep, Generic[K, V]):
    """A step of a subscription to a shard."""

    updates: Updates[K, V, int]


def mark_of(step: object) -> StepMark | None:
    """The mark of `step`; `None` unless it is a step of a subscription."""
    return step._mark if isinstance(step, SubscriptionStep) else None
