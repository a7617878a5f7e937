"""A feed: first the contents of a table, then its changes in order of time, each with the old and new value.

`read/feed.py` gives the updates, those of the contents in steps of bounded size, in key order. Later updates
are paired by key and time: a table has at most one value per key, so at each time a key has at most one
retraction and one insertion.

A subscription gives the same steps, and keeps its position in the shard.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain
from aiopersist.base.resource import Opening, Resource
from aiopersist.data.arrays import int64_array
from aiopersist.data.jsonable import column_texts
from aiopersist.data.lazy import pa, pc
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.read.feed import UpdateFeed, UpdatesStep
from aiopersist.shard.stack import Stack
from aiopersist.storage.readonly import refuse
from aiopersist.subscription.open import SubscriptionArguments, opened
from aiopersist.subscription.step import StepMark, SubscriptionStep
from aiopersist.subscription.subscription import Form, Subscription
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.ranges import any_key
from aiopersist.table.schema import TableSchema, listed

if TYPE_CHECKING:
    from collections.abc import Awaitable

K = TypeVar("K")
V = TypeVar("V")

SHARED_BUFFERS = 2  # rows are copied if their buffers have more than this many times their bytes


class Change(NamedTuple, Generic[K, V]):
    """At `time` the value of `key` went from `old` to `new`; `None` stands for absent."""

    key: K
    old: V | None
    new: V | None
    time: int


@dataclass(frozen=True, slots=True)
class FeedStep(Generic[K, V]):
    """Some changes, and the position of the feed after them."""

    changes: list[Change[K, V]]
    """In order of time, then of keys."""
    upper: Antichain
    """Everything before it was delivered."""
    cursor: str
    """A text by which a feed resumes after this step."""
    contents: bool
    """Whether the changes are the initial contents."""


class Feed(Resource, Generic[K, V]):
    """An async iterator of `FeedStep`. It opens when it is entered, or at its first step. A wait may be
    cancelled and repeated."""

    def __init__(
        self,
        opened: "Callable[[], Awaitable[OpenTable]]",
        table_schema: TableSchema[K, V],
        cursor: str | None,
        as_of: int | datetime | None,
        start: str | None,
        keys: Iterable[K] | None,
    ) -> None:
        if cursor is not None and not isinstance(cursor, str):
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"{shown(cursor)} is no text")
        if start not in (None, "now"):
            raise InvalidUsage(UsageKind.INVALID_TIME, f"start={shown(start)}: 'now' or None", time=start)
        if sum(argument is not None for argument in (cursor, as_of, start)) > 1:
            raise InvalidUsage(UsageKind.INVALID_CURSOR, "give one of cursor, as_of and start")
        self._open_table = opened
        self._table_schema = table_schema
        self._start = cursor, as_of, start
        self._keys = None if keys is None else listed(keys)
        self._texts = None if self._keys is None else frozenset(table_schema.key_texts(self._keys))
        texts = None if self._texts is None else "\n".join(sorted(self._texts))
        self._choice = "" if texts is None else sha256(texts.encode()).hexdigest()
        self._step_bytes: int | None = None
        self._updates: UpdateFeed[K, V] | None = None
        self._closed = False
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FeedStep[K, V]:
        return await (await self._open()).next(self._step_of)

    @property
    def cursor(self) -> str:
        """A text by which a feed resumes at the position of this one."""
        if self._updates is None:
            raise InvalidUsage(UsageKind.CLOSED, "the feed was not entered yet")
        return self._updates.cursor

    async def aclose(self) -> None:
        """Stop; idempotent."""
        self._closed = True
        await self._close_updates()

    # --- inside ----------------------------------------------------------------------------------

    def _step_of(self, step: UpdatesStep) -> FeedStep[K, V]:
        changes = changes_in(step, self._table_schema, self._texts)
        return FeedStep(changes, step.upper, step.cursor, step.contents)

    def _columns_of(self, step: UpdatesStep) -> "ColumnsStep[K, V]":
        rows = step.updates if step.contents else _in_order_of_time(step.updates, self._table_schema)
        if rows.get_total_buffer_size() > SHARED_BUFFERS * rows.nbytes:
            rows = rows.take(int64_array(range(rows.num_rows)))  # a copy: a slice keeps the whole buffers
        return ColumnsStep(rows, step.cursor, step.contents, self._table_schema, self._texts)

    async def _open(self) -> UpdateFeed[K, V]:
        """The updates, opened if they are not. Calls share an opening. If the feed closes, so do they."""
        async with self._opening:
            if self._updates is None and not self._closed:
                self._updates = await self._open_updates()
        if self._closed:
            await self._close_updates()
            raise InvalidUsage(UsageKind.CLOSED, "the feed is closed")
        assert self._updates is not None
        return self._updates

    async def _open_updates(self) -> UpdateFeed[K, V]:
        where = None if self._keys is None else any_key(self._table_schema.schema, self._keys)
        reading = (await self._open_table()).reading
        updates: UpdateFeed[K, V] = UpdateFeed(reading, where, self._choice, self._step_bytes)
        cursor, as_of, start = self._start
        if cursor is not None:
            await updates.open_cursor(cursor)
        elif start is not None:
            await updates.open_now()
        else:
            await updates.open_contents(as_of)
        return updates

    async def _close_updates(self) -> None:
        if self._updates is not None:
            await self._updates.aclose()


@dataclass(frozen=True, slots=True)
class ColumnsStep(Generic[K, V]):
    """A step as columns, which take a fraction of the memory of its changes."""

    rows: "pa.Table"
    """The contents; or updates, in order of time, then of keys."""
    cursor: str
    contents: bool
    _table_schema: TableSchema[K, V]
    _texts: frozenset[str] | None

    def slices(self, bytes_max: int, rows_max: int) -> Iterator[tuple[list[Change[K, V]], bool]]:
        """Lists of changes, each of about `bytes_max` bytes and at most `rows_max` rows, and whether the list
        is the last one. Updates of one key at one time stay together."""
        schema, count = self._table_schema, self.rows.num_rows
        size = max(min(rows_max, bytes_max * count // max(self.rows.nbytes, 1)), 1)
        end = 0
        while (start := end) < count:
            end = min(start + size, count)
            while not self.contents and end < count and self._is_one_change(end):
                end += 1
            rows = self.rows.slice(start, end - start)
            changes = _contents_in(rows, schema) if self.contents else _changes_of(rows, schema, self._texts)
            yield changes, end == count

    def _is_one_change(self, row: int) -> bool:
        """Whether a row and the row before it are of one key at one time."""
        two = self.rows.slice(row - 1, 2)
        first, second = column_texts(two.column("key"))
        before, at = two.column("time").to_pylist()
        return bool(first == second and before == at)


def bound_feed(feed: Feed[Any, Any], step_bytes: int) -> None:
    """Before it opens: bound its steps to about `step_bytes`, as far as keys and times can be divided."""
    feed._step_bytes = step_bytes


async def next_columns(feed: Feed[K, V]) -> ColumnsStep[K, V]:
    """The next step of the feed, as columns."""
    return await (await feed._open()).next(feed._columns_of)


def updates_of(feed: Feed[Any, Any]) -> UpdateFeed[Any, Any]:
    """The updates below an open feed."""
    if feed._updates is None:
        raise InvalidUsage(UsageKind.CLOSED, "the feed was not entered yet")
    return feed._updates


def choice_of(feed: Feed[Any, Any]) -> str:
    """A text that identifies the choice of keys; empty: all keys."""
    return feed._choice


async def stack_of(feed: Feed[Any, Any]) -> Stack:
    """The stack of the table of a feed. Opens the table, not the feed."""
    return (await feed._open_table()).shard.stack


def changes_in(
    step: UpdatesStep, table_schema: TableSchema[K, V], texts: frozenset[str] | None = None
) -> list[Change[K, V]]:
    """The updates of the step as changes, in order of time; `texts`: only of these keys."""
    if not step.updates.num_rows:
        return []
    if step.contents:
        return _contents_in(step.updates, table_schema)
    return _changes_of(sort_and_consolidate(step.updates, table_schema.schema), table_schema, texts)


def _contents_in(updates: "pa.Table", table_schema: TableSchema[K, V]) -> list[Change[K, V]]:
    keys, vals = (field.decode(updates.column(name)) for name, field in table_schema.columns())
    as_of = updates.column("time")[0].as_py()
    return [Change(key, None, val, as_of) for key, val in zip(keys, vals, strict=True)]


def _in_order_of_time(updates: "pa.Table", table_schema: TableSchema[Any, Any]) -> "pa.Table":
    """The updates, consolidated, in order of time, then of keys."""
    net = sort_and_consolidate(updates, table_schema.schema)
    return net.take(pc.sort_indices(net, sort_keys=[("time", "ascending")])) if net.num_rows > 1 else net


def _changes_of(
    net: "pa.Table", table_schema: TableSchema[K, V], key_texts: frozenset[str] | None
) -> list[Change[K, V]]:
    """The changes of consolidated updates."""
    keys, vals = (field.decode(net.column(name)) for name, field in table_schema.columns())
    texts, _ = table_schema.texts(net)
    times, diffs = net.column("time").to_pylist(), net.column("diff").to_pylist()
    changes: dict[tuple[int, str], Change[K, V]] = {}
    for text, key, val, time, diff in zip(texts, keys, vals, times, diffs, strict=True):
        if key_texts is None or text in key_texts:
            change = changes.get((time, text)) or Change(key, None, None, time)
            side = {"new": val} if diff > 0 else {"old": val}
            changes[time, text] = change._replace(**side)
    return sorted(changes.values(), key=lambda change: change.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribedChanges(SubscriptionStep, Generic[K, V]):
    """A step of a subscription to a table."""

    changes: list[Change[K, V]]
    """In order of time, then of keys."""


def open_table_subscription(
    tables: OpenTables, table_schema: TableSchema[K, V], arguments: SubscriptionArguments
) -> Opening[Subscription[SubscribedChanges[K, V]]]:
    """See `Table.subscription`."""

    async def open_handle() -> Subscription[SubscribedChanges[K, V]]:
        arguments.check()
        if tables.shards.stack.readonly:
            refuse("a subscription")
        table = await tables.acquire(table_schema)

        async def release() -> None:
            await tables.release(table)

        try:
            return await opened(
                table.reading, arguments, _with_changes(table_schema), tables.shards.scope, release
            )
        except BaseException:
            tables.shards.stack.supervisor.spawn(release(), "release a table")
            raise

    return tables.shards.opening(open_handle, f"client.table({table_schema.name!r}, ...).subscription(...)")


def _with_changes(table_schema: TableSchema[Any, Any]) -> Form[SubscribedChanges[Any, Any]]:
    def form(step: UpdatesStep, mark: StepMark) -> SubscribedChanges[Any, Any]:
        return SubscribedChanges(
            changes=changes_in(step, table_schema),
            upper=step.upper,
            cursor=step.cursor,
            contents=step.contents,
            _mark=mark,
        )

    return form
