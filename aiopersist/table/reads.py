"""The reads of a table's handle, and its life: the latest value by key."""

import asyncio
from collections.abc import AsyncIterator, Collection, Generator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from aiopersist.base.errors import InvalidUsage, NotReadable, UnknownTag, UsageKind, shown
from aiopersist.base.resource import Resource
from aiopersist.data.arrays import empty_table
from aiopersist.data.part.select import project, resolve_columns
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.inputs import own_copy
from aiopersist.data.updates.updates import polars_frame
from aiopersist.read.query import Columns
from aiopersist.read.snapshot import Snapshot, contents_of, count_of, entries_scan, pandas_frame
from aiopersist.read.tagged import check_alone
from aiopersist.table.open import NotCreated, OpenTable, OpenTables, has_failed, until_created
from aiopersist.table.ranges import condition
from aiopersist.table.schema import TableSchema, listed
from aiopersist.table.view.contents import FullView
from aiopersist.table.view.lookup import vals_of, wanted_keys

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # its stubs are a package of their own
    import polars as pl
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

ENTRIES_MAX = 10_000  # entries of a collection that are converted at once
FEW_ENTRIES = 64  # entries that take less time than a thread: such calls keep their order

K = TypeVar("K")
V = TypeVar("V")


class TableReads(Resource, Generic[K, V]):
    """See the header. `Table` adds the changes."""

    def __init__(self, tables: OpenTables, table_schema: TableSchema[K, V], resident: bool | None) -> None:
        if resident not in (None, True, False):
            raise TypeError(f"resident={shown(resident)} is neither None nor a bool")
        self._tables = tables
        self._table_schema = table_schema
        self._resident = resident
        tables.met(table_schema)
        self._size_max = tables.shards.stack.settings.update_size_max
        self._opening: asyncio.Task[OpenTable] | None = None
        self._closed = False

    @property
    def name(self) -> str:
        return self._table_schema.name

    @property
    def schema(self) -> Schema[K, V, int]:
        """The schema of the shard."""
        return self._table_schema.schema

    def __await__(self) -> Generator[Any, Any, Self]:
        async def opened() -> Self:
            await self._open()
            return self

        return opened().__await__()

    async def __aenter__(self) -> Self:
        return await self

    # --- reads -----------------------------------------------------------------------------------

    async def get(self, key: K, as_of: int | datetime | None = None, stale: bool = False) -> V | None:
        """The value of `key`, or `None`. Linearizable, by one read of the head; calls that began before it
        was sent share it. `stale=True`: from the state that this process has, without a request. `as_of`: at
        that time, as by `Snapshot`."""
        text = self._table_schema.quick_key_text(key)
        if text is None:
            await self._tables.ready()
            text = self._table_schema.key_text(key)
        if as_of is not None:
            return (await self.get_many([key], as_of, stale)).get(key)
        val_text = (await self._vals((text,), stale)).get(text)
        if val_text is None:
            return None
        return await self._tables.shards.stack.compute_few(len(val_text), self._table_schema.val, val_text)

    async def get_many(
        self, keys: Iterable[K], as_of: int | datetime | None = None, stale: bool = False
    ) -> dict[K, V]:
        """The values of the existing ones of `keys`, all as of one moment. Arguments as those of `get`."""
        keys = listed(keys)
        texts = await self._tables.converted(self._key_texts, *keys)
        if as_of is not None:
            if stale:
                raise InvalidUsage(UsageKind.INVALID_TIME, "give stale=True, or as_of, not both", time=as_of)
            return await self._get_as_of(dict(zip(texts, keys, strict=True)), as_of)
        vals = await self._vals(texts, stale)
        entries = [(key, val) for key, text in zip(keys, texts, strict=True) if (val := vals.get(text))]
        return await self._tables.decoded(self._table_schema, entries)

    async def _get_as_of(self, keys: Mapping[str, K], as_of: int | datetime) -> dict[K, V]:
        """The values at that time, by one scan for all keys."""
        table_schema, texts = self._table_schema, list(keys)
        async with self._snapshot(as_of) as snapshot:
            if snapshot is None or not texts:
                return {}
            compute = self._tables.shards.stack.compute
            rows = await contents_of(snapshot, await compute(wanted_keys, table_schema, texts))
            vals = await compute(vals_of, table_schema, rows, texts)
        by_text = await self._tables.decoded(table_schema, list(vals.items()))
        return {keys[text]: by_text[text] for text in texts if text in by_text}

    async def items(
        self,
        start: K | None = None,
        stop: K | None = None,
        prefix: Any = None,
        where: Any = None,
        as_of: int | datetime | None = None,
    ) -> AsyncIterator[tuple[K, V]]:
        """The entries with `start <= key < stop`, in key order, as of one moment (now, or `as_of`), in
        bounded memory. `prefix`: only keys that begin with it; keys must be str or bytes. `where`: as in
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
        """The number of entries; arguments as those of `items`. Reads them, in bounded memory."""
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
        tag: str | None = None,
        columns: Columns | None = None,
    ) -> "pa.Table":
        """The entries as columns `key` and `val`, or as the given `columns`, in key order, one row per key;
        other arguments as those of `items`. `tag`: those that the tag of that name keeps; `UnknownTag`."""
        columns = own_copy(columns)
        chosen = await self._condition(start, stop, prefix, where)
        async with self._snapshot(as_of, tag) as snapshot:
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
        rows, table = await self.to_arrow(*args, **filters), await self._existing()
        return await pandas_frame(rows, self._tables.shards.stack, None if table is None else table.shard.id)

    async def scan(
        self, as_of: int | datetime | None = None, *, tag: str | None = None, flat: bool = True
    ) -> "pl.LazyFrame":
        """The entries as of one moment (now, `as_of`, or that of `tag`) as a lazy frame of polars, for
        queries of polars and DuckDB, as `Snapshot.scan` gives it, without `diff`. A snapshot keeps them
        readable as long as there is this frame, or one that was made of it, and the table is open; after
        that `InvalidUsage` of kind `CLOSED`. Meanwhile the blobs of that version stay. `UnknownTag`."""
        snapshot = await self._open_snapshot(as_of, tag)
        if snapshot is None:
            await self._tables.shards.stack.imported("polars", "aiopersist.read.scan")
            from aiopersist.read.scan import lazy_frame

            return lazy_frame(self.schema, lambda where: iter(()), flat=flat, diff=False)
        try:
            return await entries_scan(snapshot, flat)
        except BaseException:
            await snapshot.aclose()
            raise

    def _key_texts(self, *keys: K) -> list[str]:
        return self._table_schema.key_texts(keys) if keys else []

    async def _open(self, *, create: bool = True) -> OpenTable:
        """The table, opened if it is not. Calls share an attempt. `NotCreated` if it does not exist, unless
        `create`."""
        if (task := self._opening) is not None and task.done() and not has_failed(task):
            self._check_open()
            return task.result()

        def opening() -> tuple[asyncio.Task[OpenTable], bool]:
            self._check_open()
            if (task := self._opening) is not None and not has_failed(task):
                return task, False
            self._opening = self._tables.acquiring(self._table_schema, self._resident, create=create)
            return self._opening, True

        return await until_created(opening, create=create)

    async def _existing(self) -> OpenTable | None:
        """The table for reads; `None` if it does not exist yet, so that it is empty."""
        try:
            return await self._open(create=False)
        except NotCreated:
            return None

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidUsage(UsageKind.CLOSED, f"table {self.name!r} is closed")
        self._tables.shards.calls.check()

    async def _vals(self, keys: Collection[str], stale: bool) -> Mapping[str, str]:
        """Values by key, of these keys at least, as texts: as of a moment after this call began, or, if
        `stale`, from the state that this process has."""
        table = await self._existing()
        if table is None:
            return {}
        view = table.view
        if not stale:
            with table.scope.call():
                await table.shard.open()
                await view.catch_up()
        if isinstance(view.contents, FullView):
            return view.contents.vals
        with table.scope.call():
            return await view.read(keys)

    async def _condition(self, start: Any, stop: Any, prefix: Any, where: Any) -> Any:
        """See `condition`."""
        await self._tables.ready_to_filter(start, stop, prefix, where)
        return condition(self.schema, start=start, stop=stop, prefix=prefix, where=where)

    @asynccontextmanager
    async def _snapshot(
        self, as_of: int | datetime | None, tag: str | None = None
    ) -> AsyncIterator[Snapshot[K, V] | None]:
        """`_open_snapshot`, closed at the end."""
        snapshot = await self._open_snapshot(as_of, tag)
        if snapshot is None:
            yield None
            return
        async with snapshot:
            yield snapshot

    async def _open_snapshot(
        self, as_of: int | datetime | None, tag: str | None = None
    ) -> Snapshot[K, V] | None:
        """A snapshot now, or at `as_of`, or of `tag`; `None` if the table was empty until then."""
        if tag is not None:
            check_alone(as_of)
            if (table := await self._existing()) is None:
                raise UnknownTag(tag)
            return await table.reading.tagged(tag)
        is_over = as_of is None
        while (table := await self._existing()) is None:
            if as_of is None or is_over:
                return None
            is_over = await self._tables.passed(as_of)
        try:
            return await table.reading.snapshot(as_of, wait=True)
        except NotReadable as error:
            if error.as_of is not None:
                raise
            return None

    async def aclose(self) -> None:
        """Close the handle; the last handle closes the view. Idempotent."""
        if self._opening is not None:
            self._tables.shards.calls.check_place()
        self._closed = True
        opening, self._opening = self._opening, None
        if opening is not None:
            await self._tables.releasing(opening)
