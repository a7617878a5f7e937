"""What a subscription hands out."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from aiopersist.base.frontier import Antichain
from aiopersist.data.updates.updates import Updates
from aiopersist.state.position import Position

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class StepMark:
    """What a step is acknowledged by."""

    owner: str
    """The opening that handed it out."""
    position: Position
    """Where that stands behind it."""
    is_acknowledged: bool = False
    """Whether it was acknowledged itself, as far as is known; not only by the acknowledgement of a later
    one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionStep:
    """A step, and where the subscription stands behind it."""

    upper: Antichain
    """Everything before it was delivered."""
    cursor: str
    """A text by which a subscription, or a feed, goes on behind this step."""
    contents: bool
    """Whether it has some of the contents at the beginning."""
    _mark: StepMark = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribedUpdates(SubscriptionStep, Generic[K, V]):
    """A step of a subscription to a shard."""

    updates: Updates[K, V, int]


def mark_of(step: object) -> StepMark | None:
    """What `step` is acknowledged by; `None` for what is no step of a subscription."""
    return step._mark if isinstance(step, SubscriptionStep) else None
