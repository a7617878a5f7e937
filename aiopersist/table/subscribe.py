"""Subscriptions to tables: steps of changes, old and new value paired, as a feed gives them."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiopersist.base.resource import Opening
from aiopersist.read.feed import UpdatesStep
from aiopersist.storage.readonly import refuse
from aiopersist.subscription.open import Wanted, opened
from aiopersist.subscription.step import StepMark, SubscriptionStep
from aiopersist.subscription.subscription import Form, Subscription
from aiopersist.table.feed import Change, changes_in
from aiopersist.table.open import OpenTables
from aiopersist.table.schema import TableSchema

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribedChanges(SubscriptionStep, Generic[K, V]):
    """A step of a subscription to a table."""

    changes: list[Change[K, V]]
    """In order of time, then of keys."""


def open_table_subscription(
    tables: OpenTables, kind: TableSchema[K, V], wanted: Wanted
) -> Opening[Subscription[SubscribedChanges[K, V]]]:
    """See `Table.subscription`."""

    async def open_handle() -> Subscription[SubscribedChanges[K, V]]:
        wanted.check()
        if tables.shards.stack.readonly:
            refuse("a subscription")
        table = await tables.acquire(kind)

        async def release() -> None:
            await tables.release(table)

        try:
            return await opened(table.reading, wanted, _with_changes(kind), tables.shards.scope, release)
        except BaseException:
            tables.shards.stack.supervisor.spawn(release(), "release a table")
            raise

    return tables.shards.opening(open_handle, f"client.table({kind.name!r}, ...).subscription(...)")


def _with_changes(kind: TableSchema[Any, Any]) -> Form[SubscribedChanges[Any, Any]]:
    def form(step: UpdatesStep, mark: StepMark) -> SubscribedChanges[Any, Any]:
        return SubscribedChanges(
            changes=changes_in(step, kind),
            upper=step.upper,
            cursor=step.cursor,
            contents=step.contents,
            _mark=mark,
        )

    return form
