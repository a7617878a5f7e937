"""One opening of a subscription in the state of the shard: who it is, and how far it has acknowledged.

Acknowledgements coalesce: `acknowledge` notes the greatest position, and a task of the client makes it
durable within `settings.ack_every_s`. Positions only move forward, so to send one twice, or an older one
late, changes nothing; no outcome is left to settle. That is different where the position shares a commit
with appends: the attempt stays in `joint` until it is settled, and the position tells a repeat that it
happened (`CONSUMED`). It does so only if it was moved for this very step. A later step that was acknowledged
without it proves nothing: `SKIPPED`.

A take-over replaces the owner in the record. The earlier opening finds that in the newest state that this
process knows, which news of the shard keep fresh, and in every commit; at the latest with its next heartbeat.
Then it gives up what its reads keep.
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

FLUSHES_PER_PERIOD = 2  # an acknowledgement waits half of `ack_every_s`, the commit has the other half


class SentSteps(NamedTuple):
    """The steps whose acknowledgements a commit has that was sent, and the last of their positions."""

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
        """Of a commit that it shares with appends to other shards."""
        self.order = Order(record.key)
        """Of the calls that acknowledge."""
        self.sent: SentSteps | None = None
        """Those of a commit with other writes whose outcome is not known."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when a heartbeat or an acknowledgement finds that it is fenced, or gave up its position."""
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
        """Note it; it is durable within `settings.ack_every_s`. Nothing if a later one was noted."""
        self.learn()
        mark.is_acknowledged = True
        if self._acked.is_before(mark.position):
            self._acked, self.sent = mark.position, None
            if self._flushing is None or self._flushing.done():
                name = f"acknowledge in {self.shard.label}"
                self._flushing = self.shard.stack.supervisor.background(self._flush_soon(), name)

    async def flush(self) -> None:
        """Make what was noted durable, and raise if the opening is fenced. One commit; if it was durable, one
        request."""
        was_durable = self.is_durable
        async with self.turn:
            if not self.is_durable:
                command = Acknowledge((self.ack(self._acked),), self.shard.stack.runtime.token())
                await commit(self.shard.register, command)
            elif was_durable:
                self.check(await self.shard.open())

    @property
    def is_durable(self) -> bool:
        """Whether everything that was noted is durable."""
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
                return  # the next call of the user finds it, too
            except Exception as error:
                await self._backoff.failed(error)

    # --- together with appends -------------------------------------------------------------------

    def check_not_passed(self, mark: StepMark) -> None:
        """`CONSUMED` if the step was acknowledged before, `SKIPPED` if only a later one was."""
        self.learn()
        record = self._record
        known = [self._acked, *([] if record is None else [record.position])]
        if all(one.is_before(mark.position) for one in known):
            return
        is_its_own = mark.is_acknowledged or mark.position in known
        error = (consumed if is_its_own else skipped)(self.key)
        error.shard_id = self.shard.id
        raise error

    def send(self, marks: Collection[StepMark], position: Position) -> SentSteps | None:
        """One commit is about to acknowledge these steps. Returns an earlier one whose outcome is not known:
        while there is one, the position does not tell which of the two has moved it."""
        self.learn()
        before = self.sent
        self.sent = SentSteps(marks if before is None else (), position)
        return before

    def learn(self) -> None:
        """Note what the newest state that this process knows tells of the commit that was sent."""
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
        """Whether the newest state that this process knows has another owner, or no position."""
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
        """Make what was noted durable, and give up the ownership. One commit; none if it was taken over."""
        self.stop()
        async with self.turn:
            command = LeaveSubscription(self.ack(self._acked), self.shard.stack.runtime.token())
            await commit(self.shard.register, command)

    def stop(self) -> None:
        """End its tasks."""
        self._beating.cancel()
        if self._flushing is not None:
            self._flushing.cancel()
