"""Acknowledgements that share a commit with other writes, of several subscriptions. They are strict: a
position that is passed already refuses the commit, since what shares it was written then."""

from collections import defaultdict
from collections.abc import Collection, Iterable, MutableMapping
from typing import NamedTuple

from aiopersist.errors import Error
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import Intent, commit_all, settle
from aiopersist.shard.shard import Shard
from aiopersist.state.position import Position
from aiopersist.state.subscriptions import Ack, Acknowledge
from aiopersist.subscription.consumer import Consumer


class JointAck(NamedTuple):
    """The position of one subscription in such a commit."""

    consumer: Consumer
    position: Position


def refusal(acks: Iterable[JointAck]) -> Error | None:
    """Why one of these is refused, by the newest known states. Refusals are final."""
    for consumer, position in acks:
        try:
            consumer.check(consumer.shard.state)
            consumer.check_not_consumed(position)
        except Error as error:
            return error
    return None


class JointAcks:
    """The acknowledgements of one commit."""

    def __init__(self, acks: Iterable[JointAck] = ()) -> None:
        self._positions: dict[Consumer, Position] = dict(acks)

    def passes(self, acks: Iterable[JointAck]) -> bool:
        """Whether one of these would be refused once this is committed."""
        found = ((self._positions.get(consumer), position) for consumer, position in acks)
        return any(mine is not None and not mine.is_before(position) for mine, position in found)

    def take(self, acks: Iterable[JointAck]) -> None:
        """Have these join."""
        self._positions.update(acks)

    @property
    def is_refused(self) -> bool:
        """Whether one of them is refused by now."""
        return refusal(JointAck(*item) for item in self._positions.items()) is not None

    def to(self, shard: Shard) -> tuple[Ack, ...]:
        """Those of subscriptions to `shard`."""
        return tuple(c.ack(position) for c, position in self._positions.items() if c.shard is shard)

    async def intents(
        self, apart_from: Collection[Shard], slots: MutableMapping[Shard, Slot]
    ) -> list[Intent]:
        """What commits those of other shards, once an earlier such commit is settled."""
        shards = dict.fromkeys(c.shard for c in self._positions if c.shard not in apart_from)
        for shard in shards:
            await settle(slots[shard])
        return [
            Intent(
                shard.register,
                Acknowledge(self.to(shard), shard.stack.runtime.token(), is_strict=True),
                slots[shard],
            )
            for shard in shards
        ]

    def committed(self) -> None:
        """They are durable."""
        for consumer, position in self._positions.items():
            consumer.committed(position)


async def commit_alone(acks: Iterable[JointAck]) -> None:
    """Make them durable, all in one commit."""
    together = JointAcks(acks)
    await commit_all(await together.intents((), defaultdict(Slot)))
    together.committed()
