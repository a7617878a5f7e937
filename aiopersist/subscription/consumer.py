"""One opening of a subscription in the state of the shard: its owner, and its acknowledged position.

Acknowledgements coalesce: `acknowledge` notes the greatest position, and a task of the client makes it
durable within `settings.ack_every_s`. Positions only move forward, so a position that is sent twice or late
changes nothing, and no outcome needs to be settled.

A position that shares a commit with appends does need that. Its attempt stays in `joint` until it is settled.
The position tells a repeat that the commit happened (`CONSUMED`), but only if that very step has moved it. If
a later step was acknowledged without this one, the answer is `SKIPPED`.

A take-over replaces the owner in the record. The earlier opening sees that in the newest state of this
process, which follows the shard, and in each commit; at the latest with its next heartbeat. Then it releases
the history and blobs of its reads.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import NamedTuple

from aiopersist.base.errors import OpaqueMismatch, ShardFinalized, SubscriptionExpired
from aiopersist.base.failures import Backoff
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.lease import HEARTBEATS_PER_LEASE, heartbeats
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State
from aiopersist.state.position import Position, SubscriptionRecord
from aiopersist.state.subscriptions import (
    Ack,
    Acknowledge,
    BeatSubscription,
    LeaveSubscription,
    consumed,
    refused,
    skipped,
)
from aiopersist.subscription.order import Order
from aiopersist.subscription.step import StepMark

FLUSHES_PER_PERIOD = 2  # half of `ack_every_s` for the acknowledgement to wait, half for the commit


class SentSteps(NamedTuple):
    """The steps that a sent commit acknowledges, and the last of their positions."""

    marks: Collection[StepMark]
    position: Position


class Consumer:
    """See the header."""

    def __init__(self, shard: Shard, record: SubscriptionRecord) -> None:
        assert record.owner is not None
        self.shard = shard
        self.key = record.key
        self.owner = record.owner
        self.begins_at = record.position
        self.turn = asyncio.Lock()
        """Of commits that move the position."""
        self.joint = Slot()
        """Of a commit shared with appends to other shards."""
        self.order = Order(record.key)
        """Of the calls that acknowledge."""
        self.sent: SentSteps | None = None
        """Of a commit with other writes whose outcome is unknown."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when a heartbeat or an acknowledgement sees that it is fenced, or has lost its position."""
        self._acked = record.position
        self._flushing: asyncio.Task[None] | None = None
        self._backoff = Backoff(shard.stack.supervisor.failures, f"acknowledging in {shard.label}")
        name = f"heartbeats of a subscription to {shard.label}"
        self._beating = heartbeats(shard.stack, record.lease_s, self._beat, name)

    def ack(self, position: Position) -> Ack:
        """The acknowledgement of everything before `position`."""
        return Ack(self.key, self.owner, position)

    @property
    def _record(self) -> SubscriptionRecord | None:
        return self.shard.state.subscriptions.get(self.key)

    def check(self, state: State) -> None:
        """Raise unless `state` has this opening as the owner."""
        if state.finalized:
            raise ShardFinalized("it is finalized", shard_id=self.shard.id)
        refusal = refused(self.ack(self._acked), state.subscriptions.get(self.key))
        if refusal is not None:
            refusal.shard_id = self.shard.id
            raise refusal

    # --- acknowledgements ------------------------------------------------------------------------

    def acknowledge(self, mark: StepMark) -> None:
        """Note the position, if it is later. It becomes durable within `settings.ack_every_s`."""
        self.learn()
        mark.is_acknowledged = True
        if self._acked.is_before(mark.position):
            self._acked, self.sent = mark.position, None
            if self._flushing is None or self._flushing.done():
                name = f"acknowledge in {self.shard.label}"
                self._flushing = self.shard.stack.supervisor.background(self._flush_soon(), name)

    async def flush(self) -> None:
        """Make the noted position durable; raise if fenced. One commit; one request if it was durable."""
        was_durable = self.is_durable
        async with self.turn:
            if not self.is_durable:
                command = Acknowledge((self.ack(self._acked),), self.shard.stack.runtime.token())
                await commit(self.shard.register, command)
            elif was_durable:
                self.check(await self.shard.open())

    @property
    def is_durable(self) -> bool:
        """Whether the noted position is durable."""
        record = self._record
        return record is not None and not record.position.is_before(self._acked)

    async def _flush_soon(self) -> None:
        stack = self.shard.stack
        while not self.is_durable:
            await stack.runtime.sleep(stack.settings.ack_every_s / FLUSHES_PER_PERIOD)
            try:
                await self.flush()
                self._backoff.succeeded()
            except (OpaqueMismatch, SubscriptionExpired, ShardFinalized):
                self.on_lost()
                return  # the next call of the user raises it
            except Exception as error:
                await self._backoff.failed(error)

    # --- together with appends -------------------------------------------------------------------

    def check_not_passed(self, mark: StepMark) -> None:
        """`CONSUMED` if the step was acknowledged, `SKIPPED` if only a later one was."""
        self.learn()
        record = self._record
        positions = [self._acked, *([] if record is None else [record.position])]
        if all(one.is_before(mark.position) for one in positions):
            return
        is_its_own = mark.is_acknowledged or mark.position in positions
        error = (consumed if is_its_own else skipped)(self.key)
        error.shard_id = self.shard.id
        raise error

    def send(self, marks: Collection[StepMark], position: Position) -> SentSteps | None:
        """A commit will acknowledge these steps. Returns an earlier commit whose outcome is unknown: then the
        position does not tell which of the two has moved it."""
        self.learn()
        before = self.sent
        self.sent = SentSteps(marks if before is None else (), position)
        return before

    def learn(self) -> None:
        """Check in the newest state of this process whether the sent commit happened."""
        record = self._record
        if self.sent is not None and record is not None and record.position == self.sent.position:
            self.committed(*self.sent)

    def committed(self, marks: Collection[StepMark], position: Position) -> None:
        """A commit of these steps has moved the position."""
        self.sent = None
        for mark in marks:
            mark.is_acknowledged = True
        if self._acked.is_before(position):
            self._acked = position

    # --- the end ---------------------------------------------------------------------------------

    async def _beat(self) -> None:
        try:
            await self._renew()
        finally:
            if self._is_lost:
                self.on_lost()

    @property
    def _is_lost(self) -> bool:
        """Whether the newest state of this process has another owner, or no position."""
        state, record = self.shard.state, self._record
        return state.finalized or refused(self.ack(self._acked), record) is not None

    async def _renew(self) -> None:
        now, record = await self.shard.stack.consensus.now(), self._record
        if record is not None and record.owner == self.owner:
            every_s = record.lease_s / HEARTBEATS_PER_LEASE
            if now - record.heartbeat < every_s / 2:  # an acknowledgement has renewed it
                return
        await commit(self.shard.register, BeatSubscription(self.key, self.owner))

    async def leave(self) -> None:
        """Make the noted position durable, and give up the ownership. One commit; none after a take-over."""
        self.stop()
        async with self.turn:
            command = LeaveSubscription(self.ack(self._acked), self.shard.stack.runtime.token())
            await commit(self.shard.register, command)

    def stop(self) -> None:
        """End its tasks."""
        self._beating.cancel()
        if self._flushing is not None:
            self._flushing.cancel()
