"""Acknowledgements that share a commit with other writes, of several subscriptions. They are strict: a
position that is passed already refuses the commit, since what shares it was written then."""

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
    """The call of these acknowledgements, to be entered."""
    return Acknowledging({consumer.order: mark.position for consumer, mark in acks})


def refusal(acks: Iterable[JointAck]) -> Error | None:
    """Why one of these is refused, by the newest known states. Refusals are final."""
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
        """Whether one of these would be refused once this is committed."""
        found = ((self._positions.get(consumer), mark.position) for consumer, mark in acks)
        return any(mine is not None and not mine.is_before(position) for mine, position in found)

    def lacks(self, call: Acknowledging) -> bool:
        """Whether an earlier call than this one is undecided, and not part of this commit."""
        return any(earlier not in self._calls for earlier in call.earlier())

    def take(self, acks: Iterable[JointAck], call: Acknowledging | None = None) -> None:
        """Have these, of that call, join; those that it `passes` cannot."""
        for consumer, mark in acks:
            self._positions[consumer] = mark.position
            self._acks.append(JointAck(consumer, mark))
        if call is not None:
            self._calls.add(call)

    def refusal(self) -> Error | None:
        """Why one of them is refused by now."""
        return refusal(self._acks)

    def to(self, shard: Shard) -> tuple[Ack, ...]:
        """Those of subscriptions to `shard`."""
        return tuple(c.ack(position) for c, position in self._positions.items() if c.shard is shard)

    async def attempts(
        self, apart_from: Collection[Shard], slots: MutableMapping[Shard, Slot]
    ) -> list[Attempt]:
        """What commits those of other shards, once an earlier such commit is settled."""
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
        """Around the commit: at its end they are durable, unless it raises."""
        marks: dict[Consumer, list[StepMark]] = {consumer: [] for consumer in self._positions}
        for consumer, mark in self._acks:
            marks[consumer].append(mark)
        before = {c: c.send(marks[c], position) for c, position in self._positions.items()}
        try:
            yield
        except (Indeterminate, asyncio.CancelledError):
            raise
        except BaseException:  # none of it happened
            for consumer, sent in before.items():
                consumer.sent = sent
            raise
        for consumer, position in self._positions.items():
            consumer.committed(marks[consumer], position)


async def commit_alone(acks: Iterable[JointAck]) -> None:
    """Make them durable, all in one commit."""
    together = JointAcks(acks)
    attempts = await together.attempts((), defaultdict(Slot))
    try:
        with together.sending():
            await commit_all(attempts)
    except InvalidUsage as error:
        raise together.refusal() or error from None
