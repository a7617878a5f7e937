"""The exact contents of a shard at one time.

A snapshot is planned on one state, without an await in between, and pins it: compaction and
garbage collection go on around it, the blobs that it names stay until it is closed or the lease of
its reader is lost. What is read is the sum of all updates with times `<= as_of`, over all batches
that begin at or before it.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakSet

from aiopersist.data.assemble import at_time, concat
from aiopersist.data.consolidate import contents
from aiopersist.data.updates import Updates, decode_rows
from aiopersist.errors import DiffOverflow
from aiopersist.frontier import Time
from aiopersist.read.stream import contents_in_batches
from aiopersist.resource import Puller, Resource, Scope, run_bounded
from aiopersist.shard.fetch import Fetch, Named, Selection
from aiopersist.shard.hold import Need, SharedHold
from aiopersist.shard.stack import ON_THE_LOOP_BYTES
from aiopersist.state.model import State

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # its stubs are a package of their own
    import polars as pl
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def parts_at(state: State, as_of: Time) -> list[Named]:
    """The parts that may hold updates at times `<= as_of`."""
    return [
        (batch, part)
        for batch in state.batches.values()
        if batch.parts and batch.lower.less_equal(as_of)
        for part in batch.parts
    ]


class Snapshot(Resource, Generic[K, V]):
    """Contents at `as_of`: consolidated `(key, val, diff)` in key order."""

    def __init__(
        self,
        scope: Scope,
        fetch: Fetch,
        hold: SharedHold,
        state: State,
        as_of: Time,
        need: Need | None,
        closed: Callable[["Snapshot[K, V]"], None],
    ) -> None:
        self.as_of = as_of
        self._scope = Scope("the snapshot", scope, fetch.shard.id)
        self._fetch = fetch
        self._hold = hold
        self._reader = hold.reader
        self._need = need
        self._closed = closed
        self._release: Callable[[], None] = fetch.shard.register.pin(state)
        self._parts = parts_at(state, as_of)
        self._iterations: WeakSet[Items[Any]] = WeakSet()

    async def to_arrow(self) -> "pa.Table":
        """All contents, as columns `key`, `val`, `diff`. One request per part that is not inline.
        `DiffOverflow` if the sum of a row is beyond 64 bits."""
        with self._scope.call():
            return await self._contents()

    async def to_polars(self) -> "pl.DataFrame":
        """As `to_arrow`, as a polars frame."""
        table = await self.to_arrow()
        import polars

        frame = polars.from_arrow(table)
        assert isinstance(frame, polars.DataFrame)
        return frame

    async def to_pandas(self) -> "pd.DataFrame":
        """As `to_arrow`, as a pandas frame."""
        table = await self.to_arrow()
        frame: pd.DataFrame = await self._fetch.stack.compute(table.to_pandas)
        return frame

    async def rows(self) -> list[tuple[K, V, int]]:
        """All contents, as `(key, val, diff)` of the types of the schema."""
        with self._scope.call():
            table = await self._contents()
            return await self._rows_of(table)

    def batches(self) -> "Items[pa.RecordBatch]":
        """All contents as Arrow batches, globally consolidated, in key order. In memory are about one and a
        half row groups (`settings.row_group_bytes`) of each sorted run of parts, not the contents."""
        return self._iteration(self._batches())

    def __aiter__(self) -> AsyncIterator[tuple[K, V, int]]:
        return self._iteration(self._row_by_row())

    def _iteration(self, items: AsyncGenerator[T, None]) -> "Items[T]":
        iteration = Items(self._scope, items, self._fetch)
        self._iterations.add(iteration)
        return iteration

    async def aclose(self) -> None:
        """Let go of the blobs; idempotent. Iterations end with `CLOSED`."""
        self._scope.close()  # perhaps with its handle before
        self._release()
        if self._need is not None:
            self._hold.drop(self._need)
        for items in list(self._iterations):
            await items.aclose()
        self._closed(self)

    async def _contents(self) -> "pa.Table":
        self._hold.check(self._reader)
        selection = Selection(as_of=self.as_of)
        small = sum(part.size for _, part in self._parts) <= ON_THE_LOOP_BYTES
        if small and all(part.inline is not None for _, part in self._parts):
            table = await self._fetch.table(self._parts, selection, self._reader)
            return self._summed([table])
        jobs = [partial(self._fetch.table, group, selection, self._reader) for group in groups(self._parts)]
        tables = await run_bounded(self._fetch.stack.settings.fetch_max_outstanding_parts, jobs)
        return await self._fetch.stack.compute(self._summed, tables)

    def _summed(self, tables: "list[pa.Table]") -> "pa.Table":
        try:
            return contents(concat(tables, self._fetch.schema), self._fetch.schema)
        except DiffOverflow as error:
            error.shard_id = self._fetch.shard.id
            raise

    async def _rows_of(self, table: Any) -> list[tuple[K, V, int]]:
        if table.num_rows < 512:
            return decode_rows(table, self._fetch.schema)
        return await self._fetch.stack.compute(decode_rows, table, self._fetch.schema)

    async def _batches(self) -> "AsyncGenerator[pa.RecordBatch, None]":
        self._hold.check(self._reader)
        merged = contents_in_batches(self._fetch, self._parts, self.as_of, self._reader)
        async with aclosing(merged) as batches:
            try:
                async for batch in batches:
                    yield batch
            except DiffOverflow as error:
                error.shard_id = self._fetch.shard.id
                raise

    async def _row_by_row(self) -> AsyncGenerator[tuple[K, V, int], None]:
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                for row in await self._rows_of(batch):
                    yield row

    async def updates(self) -> AsyncGenerator[Updates[K, V, Any], None]:
        """The contents as updates at `as_of`, in bounded memory."""
        async with aclosing(self._batches()) as batches:
            async for batch in batches:
                table = at_time(batch, self.as_of, self._fetch.schema)
                yield Updates(table, self._fetch.schema)

    def __repr__(self) -> str:
        return f"<Snapshot of {self._fetch.shard.id} as of {self.as_of}: {len(self._parts)} parts>"


class Items(Generic[T]):
    """An async iterator whose waits may be cancelled and repeated."""

    def __init__(self, scope: Scope, items: AsyncGenerator[T, None], fetch: Fetch) -> None:
        self._scope = scope
        self._puller = Puller(items, fetch.stack.supervisor, "compute the next batch of a snapshot")

    def __aiter__(self) -> "Items[T]":
        return self

    async def __anext__(self) -> T:
        with self._scope.call():
            return await self._puller.pull()

    async def aclose(self) -> None:
        """Stop computing."""
        await self._puller.aclose()


def groups(parts: list[Named]) -> list[list[Named]]:
    """Parts that are fetched together: each blob alone, all inline parts at once."""
    inline = [named for named in parts if named[1].inline is not None]
    blobs = [[named] for named in parts if named[1].inline is None]
    return [inline, *blobs] if inline else blobs
