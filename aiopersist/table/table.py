"""The handle of a table: the latest value by key."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from contextvars import copy_context
from datetime import datetime, timedelta
from math import inf
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from aiopersist.base.errors import InvalidUsage, NotReadable, UsageKind, shown
from aiopersist.base.frontier import minimum
from aiopersist.base.resource import Opening, Resource
from aiopersist.base.user_functions import warn_in_body
from aiopersist.data.arrays import empty_table
from aiopersist.data.part.select import project, resolve_columns
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import rough_bytes
from aiopersist.data.updates.inputs import GivenEntries, own_copy
from aiopersist.data.updates.updates import polars_frame
from aiopersist.read.query import Columns
from aiopersist.read.snapshot import Snapshot, contents_of, count_of, pandas_frame
from aiopersist.subscription.open import SubscriptionArguments
from aiopersist.subscription.subscription import Subscription
from aiopersist.table.commit.operation import Insert, Put, Revise
from aiopersist.table.commit.plan import Done, PendingOperation, Repeated
from aiopersist.table.feed import Feed, SubscribedChanges, open_table_subscription
from aiopersist.table.open import NotMade, OpenTable, OpenTables, has_failed, until_made
from aiopersist.table.ranges import condition
from aiopersist.table.schema import TableSchema, has_many, listed, pairs_of
from aiopersist.table.view.contents import FullView, TableView
from aiopersist.table.view.lookup import chosen, wanted_keys
from aiopersist.write.checks import Txn, check_marks

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # its stubs are a package of their own
    import polars as pl
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

AT_ONCE = 10_000  # entries of a collection that are converted at once
FEW = 64  # entries that take less time than a thread: such calls keep their order

K = TypeVar("K")
V = TypeVar("V")


class Table(Resource, Generic[K, V]):
    """At most one value per key. Opens at its first use; may be awaited or entered, which opens it at once.
    Serves many tasks at once; all handles of a client on one table share its view."""

    def __init__(self, tables: OpenTables, kind: TableSchema[K, V], resident: bool | None) -> None:
        if resident not in (None, True, False):
            raise TypeError(f"resident={shown(resident)} is neither None nor a bool")
        self._tables = tables
        self._kind = kind
        self._resident = resident
        tables.met(kind)
        self._size_max = tables.shards.stack.settings.update_size_max
        self._opening: asyncio.Task[OpenTable] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self._kind.name

    @property
    def schema(self) -> Schema[K, V, int]:
        """The schema of the shard."""
        return self._kind.schema

    def __await__(self) -> Generator[Any, Any, Self]:
        async def opened() -> Self:
            await self._open()
            return self

        return opened().__await__()

    async def __aenter__(self) -> Self:
        return await self

    # --- reads -----------------------------------------------------------------------------------

    async def get(self, key: K, as_of: int | datetime | None = None, stale: bool = False) -> V | None:
        """The value of `key`, or `None`. Linearizable, by one read of the head, which all calls share that
        began before it was sent. `stale=True`: by what this process has heard, without a request. `as_of`:
        at that time, as `Snapshot` reads it."""
        text = self._kind.plain_key_text(key)
        if text is None:
            await self._tables.ready()
            text = self._kind.key_text(key)
        if as_of is not None:
            return (await self.get_many([key], as_of, stale)).get(key)
        found = (await self._vals((text,), stale)).get(text)
        if found is None:
            return None
        return await self._tables.shards.stack.compute_few(len(found), self._kind.val, found)

    async def get_many(
        self, keys: Iterable[K], as_of: int | datetime | None = None, stale: bool = False
    ) -> dict[K, V]:
        """The values of those of `keys` that are there, all of one moment. As `get`."""
        wanted = listed(keys)
        texts = await self._tables.converted(self._key_texts, *wanted)
        if as_of is not None:
            if stale:
                raise InvalidUsage(UsageKind.INVALID_TIME, "give stale=True, or as_of, not both", time=as_of)
            return await self._get_as_of(dict(zip(texts, wanted, strict=True)), as_of)
        vals = await self._vals(texts, stale)
        there = [(key, val) for key, text in zip(wanted, texts, strict=True) if (val := vals.get(text))]
        return await self._tables.decoded(self._kind, there)

    async def _get_as_of(self, keys: Mapping[str, K], as_of: int | datetime) -> dict[K, V]:
        """By one scan for all of them."""
        kind, texts = self._kind, list(keys)
        async with self._snapshot(as_of) as snapshot:
            if snapshot is None or not texts:
                return {}
            compute = self._tables.shards.stack.compute
            found = await contents_of(snapshot, await compute(wanted_keys, kind, texts))
            vals = await compute(chosen, kind, found, texts)
        by_text = await self._tables.decoded(kind, list(vals.items()))
        return {keys[text]: by_text[text] for text in texts if text in by_text}

    async def items(
        self,
        start: K | None = None,
        stop: K | None = None,
        prefix: Any = None,
        where: Any = None,
        as_of: int | datetime | None = None,
    ) -> AsyncIterator[tuple[K, V]]:
        """The entries with `start <= key < stop`, in key order, of one moment (now, or `as_of`), in bounded
        memory. `prefix`: those whose keys begin with it, for keys that are str or bytes. `where`: as in
        `Snapshot.to_arrow`."""
        chosen = await self._condition(start, stop, prefix, where)
        async with self._snapshot(as_of) as snapshot:
            if snapshot is None:
                return
            async for batch in snapshot.batches(chosen):
                keys = self.schema.key.decode(batch.column("key"))
                for entry in zip(keys, self.schema.val.decode(batch.column("val")), strict=True):
                    yield entry

    async def count(
        self,
        start: K | None = None,
        stop: K | None = None,
        prefix: Any = None,
        where: Any = None,
        as_of: int | datetime | None = None,
    ) -> int:
        """The number of such entries; arguments as those of `items`. They are read, in bounded memory."""
        chosen = await self._condition(start, stop, prefix, where)
        async with self._snapshot(as_of) as snapshot:
            return 0 if snapshot is None else await count_of(snapshot, chosen)

    async def to_arrow(
        self,
        start: K | None = None,
        stop: K | None = None,
        prefix: Any = None,
        where: Any = None,
        as_of: int | datetime | None = None,
        *,
        columns: Columns | None = None,
    ) -> "pa.Table":
        """Such entries as columns `key` and `val`, or those asked for, in key order, one row per key;
        arguments as those of `items`."""
        columns = own_copy(columns)
        chosen = await self._condition(start, stop, prefix, where)
        async with self._snapshot(as_of) as snapshot:
            if snapshot is None:
                table = empty_table(self.schema.contents_schema)
            else:
                table = await snapshot.to_arrow(chosen)
        if columns is not None:
            table = project(table, resolve_columns(columns, self.schema))
        return table.drop_columns(["diff"])

    async def to_polars(self, *args: Any, **filters: Any) -> "pl.DataFrame":
        """As `to_arrow`, as a polars frame."""
        return polars_frame(await self.to_arrow(*args, **filters))

    async def to_pandas(self, *args: Any, **filters: Any) -> "pd.DataFrame":
        """As `to_arrow`, as a pandas frame. `Unsupported` for dates that Python cannot represent."""
        frame, found = await self.to_arrow(*args, **filters), await self._found()
        return await pandas_frame(frame, self._tables.shards.stack, None if found is None else found.shard.id)

    def changes(
        self,
        cursor: str | None = None,
        as_of: int | datetime | None = None,
        start: str | None = None,
        keys: Iterable[K] | None = None,
    ) -> Feed[K, V]:
        """The contents (of now, or at `as_of`) as changes from `None`, in steps of bounded size, then each
        later change. `start="now"`: without the contents. `cursor`: go on behind that step, in any process.
        `keys`: of these keys alone.

        Opens when it is entered, or at its first step: `SinceViolation` if the history of the cursor is gone,
        `INVALID_CURSOR` for one that is no cursor of this table."""
        return Feed(self._open, self._kind, cursor, as_of, start, keys)

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
        """The consumer of that name, whose position is durable in the table's own state: it goes on behind
        its last durable acknowledgement. Steps are those of `changes`; arguments as those of
        `Client.subscription`."""
        arguments = SubscriptionArguments(name, start, resume, expire_after, share, lease_s)
        return open_table_subscription(self._tables, self._kind, arguments)

    async def view(self) -> TableView:
        """What this process holds of the table."""
        table = await self._found()
        if table is None:
            return TableView(self._resident is not False, 0, 0, minimum(None))
        view = table.view
        return TableView(view.is_resident, len(view.held), view.held.bytes, view.upper)

    # --- changes ---------------------------------------------------------------------------------

    async def put(self, key: K, val: V, once: str | None = None) -> int:
        """Give `key` that value. Returns the time at which it is in. A value that is there already writes
        nothing."""
        self._apart("put")
        entry = await self._tables.converted(self._entry, key, val)
        return (await self._do(Put(dict([entry])), once)).time

    async def put_many(
        self, entries: GivenEntries[K, V], txn: Txn | None = None, once: str | None = None
    ) -> int:
        """Give keys their values, all at one time: a mapping, `(key, val)` pairs, Arrow, polars or pandas
        data, or an iterator of these. Of several values of a key the last counts. A list or a dict is taken
        as the call begins; what is inside an entry is yours to keep still until it returns. Any number, in
        bounded memory: more than `settings.table_resident_bytes` are written to the blob store twice, and
        read once; they take their place among other operations when that is done."""
        self._apart("put_many")
        marked = check_marks(txn, once, self._tables.shards.stack.settings)
        given = own_copy(entries)
        await self._tables.ready()
        table = await self._open()
        if not isinstance(given, Mapping | list | tuple) or len(given) > AT_ONCE or has_many(given):
            from aiopersist.table.bulk.put_many import put_stream  # few processes put so much

            with table.scope.call():
                return (await put_stream(table.member, self._tables.group, given, *marked)).time
        size = inf
        if len(given) <= FEW:
            pairs = [*pairs_of(given)]
            size = rough_bytes(pairs)
            await self._tables.pace.turn(*pairs)
        texts = await table.shard.stack.compute_few(size, self._kind.entries, given, self._size_max)
        return (await self._do(Put(texts), once, txn)).time

    async def delete(self, *keys: K, once: str | None = None) -> int:
        """Delete the keys that are there, all at one time."""
        self._apart("delete")
        texts = await self._tables.converted(self._key_texts, *keys)
        return (await self._do(Put(dict.fromkeys(texts)), once)).time

    async def insert(self, key: K, val: V, once: str | None = None) -> int:
        """Give `key` that value; `KeyExists` if it has one."""
        self._apart("insert")
        entry = await self._tables.converted(self._entry, key, val)
        return (await self._do(Insert(self._kind, *entry), once)).time

    @overload
    async def update(self, key: K, f: Callable[[V | None], V | None], once: None = None) -> V | None: ...
    @overload
    async def update(
        self, key: K, f: Callable[[V | None], V | None], once: str | None = None
    ) -> V | Repeated | None: ...

    async def update(
        self, key: K, f: Callable[[V | None], V | None], once: str | None = None
    ) -> V | Repeated | None:
        """Replace the value of `key` by what `f` makes of it; `None` stands for absent. `f` is a plain
        function in the context of the call, and may run several times. Returns the new value; `Repeated` for
        a repeat of `once`."""
        self._apart("update", "tx.get and tx.put")
        text = await self._tables.converted(self._kind.key_text, key)
        run = copy_context().run  # the task that runs it is that of another call, perhaps
        done = await self._do(Revise(self._kind, text, lambda val: run(f, val), self._size_max), once)
        return done if isinstance(done, Repeated) else done.result

    # --- inside ----------------------------------------------------------------------------------

    def _apart(self, call: str, instead: str = "") -> None:
        """A change of its own: not by a transaction whose body makes it."""
        warn_in_body(self._tables.shards.stack, f"Table.{call}", instead or f"tx.{call}", depth=4)

    def _entry(self, key: K, val: V) -> tuple[str, str]:
        return self._kind.entry(key, val, self._size_max)

    def _key_texts(self, *keys: K) -> list[str]:
        return self._kind.key_texts(keys) if keys else []

    async def _open(self, *, make: bool = True) -> OpenTable:
        """The table, opened if it is not. One attempt serves all calls that wait. `NotMade` if it does not
        exist, unless `make`."""
        if (task := self._opening) is not None and task.done() and not has_failed(task):
            self._check_open()
            return task.result()

        def opening() -> tuple[asyncio.Task[OpenTable], bool]:
            self._check_open()
            if (task := self._opening) is not None and not has_failed(task):
                return task, False
            self._opening = self._tables.acquiring(self._kind, self._resident, make=make)
            return self._opening, True

        return await until_made(opening, make=make)

    async def _found(self) -> OpenTable | None:
        """The table, as reads open it; `None`: it was not made yet, so it is empty."""
        try:
            return await self._open(make=False)
        except NotMade:
            return None

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidUsage(UsageKind.CLOSED, f"table {self.name!r} is closed")
        self._tables.shards.calls.check()

    async def _vals(self, keys: Collection[str], stale: bool) -> Mapping[str, str]:
        """The values by key, of these keys at least, as texts: as of a moment after this call began, or as
        this process has heard."""
        table = await self._found()
        if table is None:
            return {}
        view = table.view
        if not stale:
            with table.scope.call():
                await table.shard.open()
                await view.catch_up()
        if isinstance(view.held, FullView):
            return view.held.vals
        with table.scope.call():
            return await view.read(keys)

    async def _condition(self, start: Any, stop: Any, prefix: Any, where: Any) -> Any:
        """See `condition`."""
        await self._tables.ready_to_filter(start, stop, prefix, where)
        return condition(self.schema, start=start, stop=stop, prefix=prefix, where=where)

    @asynccontextmanager
    async def _snapshot(self, as_of: int | datetime | None) -> AsyncIterator[Snapshot[K, V] | None]:
        """A snapshot of now, or at `as_of`; `None` if nothing was ever put."""
        has_passed = as_of is None
        while (table := await self._found()) is None:
            if as_of is None or has_passed:
                yield None
                return
            has_passed = await self._tables.passed(as_of)
        try:
            snapshot = await table.reading.snapshot(as_of, wait=True)
        except NotReadable as error:
            if error.as_of is not None:
                raise
            yield None
            return
        async with snapshot:
            yield snapshot

    async def _do(
        self, action: Put | Insert | Revise, once: str | None, txn: Txn | None = None
    ) -> Done | Repeated:
        marked = check_marks(txn, once, self._tables.shards.stack.settings)
        table = await self._open()
        with table.scope.call():
            member = table.member
            waiting = PendingOperation((member,), action, (action.keys,), member, *marked)
            return await self._tables.group.do(waiting)

    async def aclose(self) -> None:
        """Release what this handle holds; the view goes with the last handle. Idempotent."""
        if self._opening is not None:
            self._tables.shards.calls.check_place()
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None:
            await self._tables.releasing(opening)

    def __repr__(self) -> str:
        return f"<Table {self.name!r}: {self.schema!r}>"
