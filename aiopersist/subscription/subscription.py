"""The handle of a subscription: its steps, and their acknowledgement."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

from aiopersist.base.errors import (
    Error,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    UpperMismatch,
    UsageKind,
    shown,
)
from aiopersist.base.resource import Resource, Scope
from aiopersist.read.feed import UpdateFeed, UpdatesStep
from aiopersist.shard.stack import Stack
from aiopersist.subscription.consumer import Consumer
from aiopersist.subscription.joint import JointAck, JointAcks, acknowledging
from aiopersist.subscription.order import Acknowledging
from aiopersist.subscription.share import Share, within_share
from aiopersist.subscription.step import StepMark, SubscriptionStep, mark_of
from aiopersist.write.append_many import Append, append_with, with_copied_updates

S = TypeVar("S", bound=SubscriptionStep)

Form = Callable[[UpdatesStep, StepMark], S]
"""Converts a step of updates to a step for the user."""


class Subscription(Resource, Generic[S]):
    """An async iterator of the steps of one consumer, from its durable position on. The next opening delivers
    unacknowledged steps again. A wait may be cancelled and repeated."""

    def __init__(
        self,
        consumer: Consumer,
        feed: UpdateFeed[Any, Any],
        form: Form[S],
        share: Share | None,
        scope: Scope,
        release: Callable[[], Awaitable[None]],
    ) -> None:
        shard = consumer.shard
        self._scope = Scope(f"subscription {consumer.key!r}", scope, shard.id)
        self._consumer = consumer
        self._feed = feed
        self._form = form
        self._share = share
        self._release = release
        self._letting_go: asyncio.Task[None] | None = None
        feed.check_with(consumer.check)
        consumer.on_lost = self._let_go

    @property
    def name(self) -> str:
        """Its name; `name[i/n]` for a share."""
        return self._consumer.key

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> S:
        """The next step. `OpaqueMismatch` if another opening has taken over, `SubscriptionExpired` if it has
        lost its position."""
        with self._scope.call():
            self._check()
            stack = self._consumer.shard.stack
            with stack.follower.polling.over(self._consumer.shard.register, stack.settings.ack_every_s):
                try:
                    return await self._next()
                except Error:
                    self._check()  # a lost position may be the cause
                    raise

    async def ack(self, step: S, durable: bool = False) -> None:
        """Acknowledge everything up to this step: it does not come again. An older step changes nothing.

        The acknowledgement is durable within `settings.ack_every_s`, and after `async with`; with
        `durable=True` when this returns. It waits for calls that acknowledge earlier steps (`commit`,
        `Client.transact`): `WOULD_SKIP` if one of them fails meanwhile.

        `OpaqueMismatch` if another opening has taken over; without `durable=True` the next step raises it.
        `InvalidUsage` for a step of another opening. One commit for all that wait."""
        with self._scope.call():
            ack = JointAck(self._consumer, self._mark(step))
            with acknowledging([ack]) as call:
                await call.turn()
                self._consumer.acknowledge(ack.mark)
            if durable:
                await self._consumer.flush()

    async def commit(self, step: S, appends: Sequence[Append]) -> None:
        """Acknowledge everything up to this step, and append, in one commit: all of it happens, or nothing.
        So the output of a consumer is written exactly once, across crashes.

        `InvalidUsage` of kind `CONSUMED` for a step that was acknowledged before: a repeat after a lost
        answer learns from it that the commit happened. `SKIPPED` if only a later step was acknowledged. Waits
        for calls that acknowledge earlier steps: `WOULD_SKIP` if one of them fails meanwhile.

        `UpperMismatch` names a shard whose upper was not the expected one. `OpaqueMismatch` if another
        opening has taken over. Then nothing is written. `Unsupported` if the store cannot write several
        shards at one moment. Costs the same as `Client.compare_and_append_many`."""
        with self._scope.call():
            acks = [JointAck(self._consumer, self._mark(step))]
            copies = [with_copied_updates(append) for append in appends]
            with acknowledging(acks) as call:
                await call.turn()
                async with self._consumer.turn:
                    await self._commit(JointAcks(acks), copies)

    async def aclose(self) -> None:
        """Make all acknowledgements durable, and leave the position to the next opening. Idempotent; raises
        nothing if another opening has taken over. `StorageUnavailable` if the last acknowledgement is not
        durable: its step comes again. `Indeterminate` if it may still become durable."""
        if not self._scope.close():
            return
        supervisor = self._consumer.shard.stack.supervisor
        leaving = supervisor.spawn(self._leave(), "leave a subscription")
        await supervisor.released(leaving)
        if leaving.done() and not leaving.cancelled():
            error = leaving.exception()
        else:
            text = f"the last acknowledgement of subscription {self.name!r} may not be durable: no answer"
            error = Indeterminate(text, shard_id=self._consumer.shard.id)
        if error is not None and not self._consumer.is_durable:
            raise self._scope.sign(error) if isinstance(error, Error) else error

    # --- inside ----------------------------------------------------------------------------------

    async def _commit(self, joint: JointAcks, appends: Sequence[Append]) -> None:
        shard = self._consumer.shard
        (joined,) = await joint.attempts((), {shard: self._consumer.joint})
        if (error := joint.refusal()) is not None:
            raise error
        try:
            with joint.sending():
                await append_with(appends, shard, joint.to(shard), joined)
        except (InvalidUsage, UpperMismatch) as refused:
            if isinstance(refused, UpperMismatch):
                await shard.open()
            if (error := joint.refusal()) is not None:
                raise error from refused
            raise

    def _check(self) -> None:
        """Raise, and stop reading, unless it has its position."""
        try:
            self._consumer.check(self._consumer.shard.state)
        except Error:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """Stop reading: release history and blobs."""
        if self._letting_go is None:
            supervisor = self._consumer.shard.stack.supervisor
            self._letting_go = supervisor.spawn(self._feed.aclose(), "end the reads of a lost subscription")

    async def _leave(self) -> None:
        """The work of `aclose`, which continues if the caller is cancelled."""
        try:
            try:
                await self._feed.aclose()
            finally:
                await self._consumer.leave()
        except Exception as error:
            failures = self._consumer.shard.stack.supervisor.failures
            failures.report(f"leaving subscription {self.name!r}", error)
            raise
        finally:
            await self._release()

    async def _next(self) -> S:
        """The next step. If the lease of the reads is lost, as in a process that stood still, it continues
        under a new one: the position holds later history."""
        try:
            return await self._feed.next(self._formed)
        except LeaseExpired:
            self._check()
            fresh = self._feed.anew()
            await fresh.open_at(self._feed.position)
            fresh.check_with(self._consumer.check)
            stale, self._feed = self._feed, fresh
            await stale.aclose()
            return await self._feed.next(self._formed)

    def _formed(self, step: UpdatesStep) -> S:
        """The step for the user: the updates of its share."""
        if self._share is not None and step.updates.num_rows:
            step = step._replace(updates=within_share(step.updates, self._share))
        return self._form(step, StepMark(self._consumer.owner, step.position))

    def _mark(self, step: S) -> StepMark:
        mark = mark_of(step)
        if mark is None:
            raise TypeError(f"{shown(step)} is not a step of a subscription")
        if mark.owner != self._consumer.owner:
            text = f"the step is from another opening of subscription {self.name!r}"
            raise InvalidUsage(UsageKind.INVALID_CURSOR, text)
        return mark

    def __repr__(self) -> str:
        return f"<Subscription {self.name!r} to {self._consumer.shard.label}>"


class JointCall(Acknowledging):
    """A call with the acknowledgements of a user."""

    def __init__(self, acks: Iterable[Any], stack: Stack) -> None:
        self.acks = _joint_acks(acks, stack)
        super().__init__({consumer.order: mark.position for consumer, mark in self.acks})


def _joint_acks(acks: Iterable[Any], stack: Stack) -> tuple[JointAck, ...]:
    """Checked `(subscription, step)` pairs: open subscriptions of this client, each once."""
    by_consumer: dict[Consumer, JointAck] = {}
    for pair in acks:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Subscription):
            raise TypeError(f"{shown(pair)} is not a pair of a subscription and its step")
        subscription, step = pair
        subscription._scope.check()
        consumer = subscription._consumer
        if consumer.shard.stack is not stack:
            raise InvalidUsage(UsageKind.INVALID_APPEND, f"{subscription!r} belongs to another client")
        if consumer in by_consumer:
            raise InvalidUsage(UsageKind.INVALID_APPEND, f"{subscription!r} is named twice")
        by_consumer[consumer] = JointAck(consumer, subscription._mark(step))
    return tuple(by_consumer.values())
