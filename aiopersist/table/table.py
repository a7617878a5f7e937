"""The handle of a table: changes, and what follows them."""

from collections.abc import Callable, Iterable, Mapping
from contextvars import copy_context
from datetime import datetime, timedelta
from math import inf
from typing import TypeVar, overload

from aiopersist.base.frontier import minimum
from aiopersist.base.resource import Opening
from aiopersist.base.user_functions import warn_in_body
from aiopersist.data.updates.convert import rough_bytes
from aiopersist.data.updates.inputs import GivenEntries, own_copy
from aiopersist.subscription.open import SubscriptionArguments
from aiopersist.subscription.subscription import Subscription
from aiopersist.table.commit.operation import Insert, Put, Revise
from aiopersist.table.commit.plan import Done, PendingOperation, Repeated
from aiopersist.table.feed import Feed, SubscribedChanges, open_table_subscription
from aiopersist.table.reads import TableReads
from aiopersist.table.schema import has_many, pairs_of
from aiopersist.table.view.contents import TableView
from aiopersist.write.checks import Txn, check_marks

ENTRIES_MAX = 10_000  # entries of a collection that are converted at once
FEW_ENTRIES = 64  # entries that take less time than a thread: such calls keep their order

K = TypeVar("K")
V = TypeVar("V")


class Table(TableReads[K, V]):
    """At most one value per key. Opens at its first use, or at once if it is awaited or entered. Many tasks
    may use it at once. All handles of a client on one table share a view."""

    def changes(
        self,
        cursor: str | None = None,
        as_of: int | datetime | None = None,
        start: str | None = None,
        keys: Iterable[K] | None = None,
    ) -> Feed[K, V]:
        """The contents (now, or at `as_of`) as changes from `None`, in steps of bounded size, then each later
        change. `start="now"`: without the contents. `cursor`: resume after that step, in any process.
        `keys`: only changes of these keys.

        Opens when it is entered, or at its first step: `SinceViolation` if the history of the cursor is gone,
        `INVALID_CURSOR` for a text that is no cursor of this table."""
        return Feed(self._open, self._table_schema, cursor, as_of, start, keys)

    def subscription(
        self,
        name: str,
        *,
        start: str | int | datetime | None = None,
        resume: str | None = None,
        expire_after: timedelta | None = None,
        share: tuple[int, int] | None = None,
        lease_s: float | None = None,
    ) -> Opening[Subscription[SubscribedChanges[K, V]]]:
        """The consumer of that name. The state of the table keeps its position: it resumes after its last
        durable acknowledgement. Steps are those of `changes`; arguments as those of `Client.subscription`."""
        arguments = SubscriptionArguments(name, start, resume, expire_after, share, lease_s)
        return open_table_subscription(self._tables, self._table_schema, arguments)

    async def view(self) -> TableView:
        """The part of the table that this process has in memory."""
        table = await self._existing()
        if table is None:
            return TableView(self._resident is not False, 0, 0, minimum(None))
        view = table.view
        return TableView(view.is_resident, len(view.contents), view.contents.bytes, view.upper)

    # --- changes ---------------------------------------------------------------------------------

    async def put(self, key: K, val: V, once: str | None = None) -> int:
        """Give `key` that value. Returns the time of the commit. Putting an equal value writes nothing."""
        self._warn_in_body("put")
        entry = await self._tables.converted(self._entry, key, val)
        return (await self._do(Put(dict([entry])), once)).time

    async def put_many(
        self, entries: GivenEntries[K, V], txn: Txn | None = None, once: str | None = None
    ) -> int:
        """Give keys their values, all at one time: a mapping, `(key, val)` pairs, Arrow, polars or pandas
        data, or an iterator of these. The last of several values of a key counts. A list or a dict is copied
        as the call begins, but not the values inside: do not change them until it returns. Takes any number
        of entries, in bounded memory: more than `settings.table_resident_bytes` are written to the blob store
        twice, and read once, before they take their place among other operations."""
        self._warn_in_body("put_many")
        marked = check_marks(txn, once, self._tables.shards.stack.settings)
        entries = own_copy(entries)
        await self._tables.ready()
        table = await self._open()
        if not isinstance(entries, Mapping | list | tuple) or len(entries) > ENTRIES_MAX or has_many(entries):
            from aiopersist.table.bulk.put_many import put_stream  # few processes put this much

            with table.scope.call():
                return (await put_stream(table.participant, self._tables.group, entries, *marked)).time
        size = inf
        if len(entries) <= FEW_ENTRIES:
            pairs = [*pairs_of(entries)]
            size = rough_bytes(pairs)
            await self._tables.pace.turn(*pairs)
        texts = await table.shard.stack.compute_few(size, self._table_schema.entries, entries, self._size_max)
        return (await self._do(Put(texts), once, txn)).time

    async def delete(self, *keys: K, once: str | None = None) -> int:
        """Delete the existing ones of `keys`, all at one time."""
        self._warn_in_body("delete")
        texts = await self._tables.converted(self._key_texts, *keys)
        return (await self._do(Put(dict.fromkeys(texts)), once)).time

    async def insert(self, key: K, val: V, once: str | None = None) -> int:
        """Give `key` that value; `KeyExists` if it has one."""
        self._warn_in_body("insert")
        entry = await self._tables.converted(self._entry, key, val)
        return (await self._do(Insert(self._table_schema, *entry), once)).time

    @overload
    async def update(self, key: K, f: Callable[[V | None], V | None], once: None = None) -> V | None: ...
    @overload
    async def update(
        self, key: K, f: Callable[[V | None], V | None], once: str | None = None
    ) -> V | Repeated | None: ...

    async def update(
        self, key: K, f: Callable[[V | None], V | None], once: str | None = None
    ) -> V | Repeated | None:
        """Replace the value of `key` by the result of `f` on it; `None` stands for absent. `f` is no
        coroutine function, runs in the context of the call, and may run several times. Returns the new value;
        `Repeated` for a repeat of `once`."""
        self._warn_in_body("update", "tx.get and tx.put")
        text = await self._tables.converted(self._table_schema.key_text, key)
        run = copy_context().run  # the task of another call may run it
        done = await self._do(Revise(self._table_schema, text, lambda val: run(f, val), self._size_max), once)
        return done if isinstance(done, Repeated) else done.result

    # --- inside ----------------------------------------------------------------------------------

    def _warn_in_body(self, call: str, instead: str = "") -> None:
        """The change is not part of a transaction: warn if a body makes it."""
        warn_in_body(self._tables.shards.stack, f"Table.{call}", instead or f"tx.{call}", depth=4)

    def _entry(self, key: K, val: V) -> tuple[str, str]:
        return self._table_schema.entry(key, val, self._size_max)

    async def _do(
        self, action: Put | Insert | Revise, once: str | None, txn: Txn | None = None
    ) -> Done | Repeated:
        marked = check_marks(txn, once, self._tables.shards.stack.settings)
        table = await self._open()
        with table.scope.call():
            participant = table.participant
            operation = PendingOperation((participant,), action, (action.keys,), participant, *marked)
            return await self._tables.group.do(operation)

    def __repr__(self) -> str:
        return f"<Table {self.name!r}: {self.schema!r}>"
