"""Acknowledgements of several subscriptions that share a commit with other writes. They are strict: if a
position has already passed the step, the commit is refused, since its writes happened before.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import NamedTuple

from aiopersist.base.errors import Error, Indeterminate, InvalidUsage
from aiopersist.shard.attempt import Attempt, Slot
from aiopersist.shard.commit import commit_all, settle
from aiopersist.shard.shard import Shard
from aiopersist.state.position import Position
from aiopersist.state.subscriptions import Ack, Acknowledge
from aiopersist.subscription.consumer import Consumer
from aiopersist.subscription.order import Acknowledging
from aiopersist.subscription.step import StepMark


class JointAck(NamedTuple):
    """The step of one subscription in such a commit."""

    consumer: Consumer
    mark: StepMark


def acknowledging(acks: Iterable[JointAck]) -> Acknowledging:
    """The call of these acknowledgements, a context manager."""
    return Acknowledging({consumer.order: mark.position for consumer, mark in acks})


def refusal(acks: Iterable[JointAck]) -> Error | None:
    """Why one of these is refused, by the newest states of this process. Refusals are final."""
    for consumer, mark in acks:
        try:
            consumer.check(consumer.shard.state)
            consumer.check_not_passed(mark)
        except Error as error:
            return error
    return None


class JointAcks:
    """The acknowledgements of one commit."""

    def __init__(self, acks: Iterable[JointAck] = ()) -> None:
        self._positions: dict[Consumer, Position] = {}
        self._acks: list[JointAck] = []
        self._calls: set[Acknowledging] = set()
        if acks:
            self.take(acks)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._acks)

    def passes(self, acks: Iterable[JointAck]) -> bool:
        """Whether one of `acks` would be refused after this commit."""
        pairs = ((self._positions.get(consumer), mark.position) for consumer, mark in acks)
        return any(own is not None and not own.is_before(position) for own, position in pairs)

    def lacks(self, call: Acknowledging) -> bool:
        """Whether an earlier call than `call` is undecided and not part of this commit."""
        return any(earlier not in self._calls for earlier in call.earlier())

    def take(self, acks: Iterable[JointAck], call: Acknowledging | None = None) -> None:
        """Add these acknowledgements, of `call`, to the commit; not those that it `passes`."""
        for consumer, mark in acks:
            self._positions[consumer] = mark.position
            self._acks.append(JointAck(consumer, mark))
        if call is not None:
            self._calls.add(call)

    def refusal(self) -> Error | None:
        """Why one of them is refused now."""
        return refusal(self._acks)

    def to(self, shard: Shard) -> tuple[Ack, ...]:
        """Those of subscriptions to `shard`."""
        return tuple(c.ack(position) for c, position in self._positions.items() if c.shard is shard)

    async def attempts(
        self, apart_from: Collection[Shard], slots: MutableMapping[Shard, Slot]
    ) -> list[Attempt]:
        """The attempts for the other shards, after an earlier commit of them is settled."""
        shards = dict.fromkeys(c.shard for c in self._positions if c.shard not in apart_from)
        for shard in shards:
            await settle(slots[shard])
        return [
            Attempt(
                shard.register,
                Acknowledge(self.to(shard), shard.stack.runtime.token(), is_strict=True),
                slots[shard],
            )
            for shard in shards
        ]

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A context around the commit: afterwards they are durable, unless it raises."""
        marks: dict[Consumer, list[StepMark]] = {consumer: [] for consumer in self._positions}
        for consumer, mark in self._acks:
            marks[consumer].append(mark)
        before = {c: c.send(marks[c], position) for c, position in self._positions.items()}
        try:
            yield
        except (Indeterminate, asyncio.CancelledError):
            raise
        except BaseException:  # the commit did not happen
            for consumer, sent in before.items():
                consumer.sent = sent
            raise
        for consumer, position in self._positions.items():
            consumer.committed(marks[consumer], position)


async def commit_alone(acks: Iterable[JointAck]) -> None:
    """Make them durable, all in one commit."""
    joint = JointAcks(acks)
    attempts = await joint.attempts((), defaultdict(Slot))
    try:
        with joint.sending():
            await commit_all(attempts)
    except InvalidUsage as error:
        raise joint.refusal() or error from None
