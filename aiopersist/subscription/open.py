"""Opens subscriptions, lists those of a shard, and drops them."""

import re
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from aiopersist.base.errors import InvalidUsage, SinceViolation, UsageKind, shown
from aiopersist.base.frontier import check_time, successor
from aiopersist.base.resource import Opening, Scope
from aiopersist.base.settings import SECONDS_MAX
from aiopersist.data.types.schema import Schema, checked_schema
from aiopersist.data.updates.updates import Updates
from aiopersist.read.feed import UpdateFeed, UpdatesStep
from aiopersist.read.handle import ReadHandle, session_of
from aiopersist.read.places import position_of
from aiopersist.read.session import ReadSession
from aiopersist.shard.catalog import check_name
from aiopersist.shard.commit import commit
from aiopersist.shard.instant import as_int, time_of
from aiopersist.shard.lease import check_lease_s
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.position import Position
from aiopersist.state.subscriptions import Beginning, DropSubscription, OpenSubscription
from aiopersist.storage.readonly import refuse
from aiopersist.subscription.consumer import Consumer
from aiopersist.subscription.share import Share, check_share
from aiopersist.subscription.step import StepMark, SubscribedUpdates, SubscriptionStep
from aiopersist.subscription.subscription import Form, Subscription
from aiopersist.subscription.view import SubscriptionView, views_of

S = TypeVar("S", bound=SubscriptionStep)

_SHARE = re.compile(r"\[\d+/\d+\]$")


class SubscriptionArguments(NamedTuple):
    """The arguments of an opening, as the user gave them."""

    name: str
    start: str | int | datetime | None = None
    resume: str | None = None
    expire_after: timedelta | None = None
    share: Share | None = None
    lease_s: float | None = None

    def check(self) -> None:
        """Check everything that needs no state."""
        if _SHARE.search(check_name(self.name)):
            text = f"{shown(self.name)} ends like the name of a share: give share=(i, n)"
            raise InvalidUsage(UsageKind.INVALID_NAME, text, name=self.name)
        if self.resume is not None and self.start is not None:
            raise InvalidUsage(UsageKind.INVALID_CURSOR, "give start or resume, not both")
        if self.resume is not None and not isinstance(self.resume, str):
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"resume={shown(self.resume)} is not a str")
        if isinstance(self.start, str) and self.start not in list(Beginning):
            text = f"start={shown(self.start)}: 'snapshot', 'now', a time, or None"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=self.start)
        if self.share is not None:
            check_share(self.share)
        if self.lease_s is not None:
            check_lease_s(self.lease_s)
        if self.expire_after is not None:
            _check_expire_after(self.expire_after)

    def beginning(self, shard: Shard) -> Position | Beginning | None:
        """The position of `start`: after a time, not at it."""
        if self.start is None or isinstance(self.start, str):
            return None if self.start is None else Beginning(self.start)
        time = time_of(self.start, shard)
        if type(time) is not int:
            text = f"start={shown(self.start)}: 'snapshot', 'now', an int time, or None"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=self.start)
        return Position(frontier=successor(as_int(check_time(time))))


def _check_expire_after(value: object) -> None:
    if not isinstance(value, timedelta) or not 0 < value.total_seconds() <= SECONDS_MAX:
        raise ValueError(f"expire_after={value!r} is not a positive timedelta of at most a century")


def open_subscription(
    shards: Shards, name: str, schema: Schema[Any, Any, Any] | None, arguments: SubscriptionArguments
) -> Opening[Subscription[SubscribedUpdates[Any, Any]]]:
    """See `Client.subscription`."""

    async def open_handle() -> Subscription[SubscribedUpdates[Any, Any]]:
        arguments.check()
        if schema is not None:
            checked_schema(schema)
        if shards.stack.readonly:
            refuse("a subscription")
        shard = await shards.existing(name)
        stored = shard.schema(shard.state.schema_id)
        if stored.time_length is not None:
            text = f"{shard.label} has product times: a subscription needs int times"
            raise InvalidUsage(UsageKind.INVALID_TIME, text)
        chosen: Schema[Any, Any, Any] = stored if schema is None else shard.as_stored(schema)
        handle: ReadHandle[Any, Any] = await ReadHandle._open(
            shard, chosen, shards.scope, hold=None, hold_name=None, lease_s=None
        )
        try:
            return await opened(
                session_of(handle), arguments, _with_updates(chosen), shards.scope, handle.aclose
            )
        except BaseException:
            shards.stack.supervisor.spawn(handle.aclose(), "close a reader")
            raise

    return shards.opening(open_handle, f"client.subscription({name!r}, ...)")


def _with_updates(schema: Schema[Any, Any, Any]) -> Form[SubscribedUpdates[Any, Any]]:
    def form(step: UpdatesStep, mark: StepMark) -> SubscribedUpdates[Any, Any]:
        return SubscribedUpdates(
            updates=Updates(step.updates, schema),
            upper=step.upper,
            cursor=step.cursor,
            contents=step.contents,
            _mark=mark,
        )

    return form


async def opened(
    session: ReadSession[Any, Any],
    arguments: SubscriptionArguments,
    form: Form[S],
    scope: Scope,
    release: Callable[[], Awaitable[None]],
) -> Subscription[S]:
    """A subscription that reads by `session`, and calls `release` at its end. One commit."""
    shard, stack = session.shard, session.shard.stack
    resume = None if arguments.resume is None else await position_of(arguments.resume, session)
    expire_after = arguments.expire_after
    command = OpenSubscription(
        arguments.name,
        arguments.share,
        stack.signed(stack.runtime.token()),
        stack.settings.reader_lease_s if arguments.lease_s is None else arguments.lease_s,
        None if expire_after is None else expire_after.total_seconds(),
        arguments.beginning(shard),
        resume,
    )
    consumer = Consumer(shard, await commit(shard.register, command))
    feed: UpdateFeed[Any, Any] = UpdateFeed(session)
    try:
        await feed.open_at(consumer.begins_at)
        return Subscription(consumer, feed, form, arguments.share, scope, release)
    except BaseException as error:
        consumer.stop()
        stack.supervisor.spawn(_given_up(consumer, feed), "leave a subscription")
        if isinstance(error, SinceViolation):  # the position holds since, so another opening has moved it
            consumer.check(shard.state)
        raise


async def _given_up(consumer: Consumer, feed: UpdateFeed[Any, Any]) -> None:
    await feed.aclose()
    await consumer.leave()


async def subscriptions(shards: Shards, name: str) -> dict[str, SubscriptionView]:
    """See `Admin.subscriptions`."""
    shard = await shards.existing(name)
    return views_of(shard.state, await shard.register.now())


async def drop_subscription(shards: Shards, shard_name: str, name: str) -> None:
    """See `Admin.drop_subscription`."""
    shard = await shards.existing(shard_name)
    if not await commit(shard.register, DropSubscription(check_name(name))):
        raise LookupError(f"{shard.label} has no subscription {name!r}")
