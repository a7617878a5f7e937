"""The exact contents of a shard at one time.

A snapshot pins one state, and lists its parts without an await in between. Compaction and garbage collection
continue, but the blobs of that state stay until the snapshot is closed or the lease of its reader is lost.
The contents are the sum of all updates with times `<= as_of`, over all batches that begin at or before
`as_of`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload
from weakref import WeakSet

from aiopersist.base.errors import LeaseExpired, SinceViolation, Unsupported
from aiopersist.base.frontier import Time
from aiopersist.base.resource import Resource, Scope, run_bounded
from aiopersist.data.lazy import pa, pl
from aiopersist.data.part.layout import writable
from aiopersist.data.part.stats import ColumnStats
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.updates.assemble import at_time, concat
from aiopersist.data.updates.merge import are_sums
from aiopersist.data.updates.slices import grow_old, slices
from aiopersist.data.updates.updates import Updates, polars_frame
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.runs import are_contents, plan_runs
from aiopersist.read.leased import LeasedPart, common_stats
from aiopersist.read.puller import Items, RowItems
from aiopersist.read.query import Columns, Query
from aiopersist.read.stream import BATCH_ROWS, in_batches, projected_in_batches
from aiopersist.read.tagged import TaggedContents, check_tag
from aiopersist.shard.hold import HistoryPin, SharedHold
from aiopersist.shard.stack import ON_THE_LOOP_BYTES, Stack
from aiopersist.state.model import State

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]  # its stubs are a package of their own

    from aiopersist.read.scan import LeasedContents

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

ROWS_ON_THE_LOOP = 512  # fewer rows are decoded faster than a worker thread takes over

PLANS_MAX = 8  # attempts of a read without a lease: a collection may delete its parts first


def parts_at(state: State, as_of: Time) -> list[Named]:
    """The parts that may hold updates at times `<= as_of`."""
    return [
        (batch, part)
        for batch in state.batches.values()
        if batch.parts and batch.lower.less_equal(as_of)
        for part in batch.parts
    ]


class SnapshotStats(NamedTuple):
    """Upper bounds of the contents of a snapshot."""

    parts: int
    updates_max: int
    """Updates in its parts, including those beyond its time and those that cancel out."""
    encoded_bytes: int
    columns: dict[str, ColumnStats]
    """Bounds of the values of each leaf column with statistics in every part, by its dotted name."""


class PinnedRead(Resource):
    """The reads of one pinned state, and their iterations. Its blobs stay until this is closed."""

    def __init__(self, scope: Scope, fetch: Fetch, hold: SharedHold, seqno: int) -> None:
        self._scope = Scope("the snapshot", scope, fetch.shard.id)
        self._fetch = fetch
        self._hold = hold
        self._reader = hold.reader
        self._release: Callable[[], None] = fetch.shard.register.pin(seqno)
        self._iterations: WeakSet[Items[Any]] = WeakSet()

    def _iteration(self, items: AsyncGenerator[T, None]) -> "Items[T]":
        iteration = Items(self._scope, items, self._fetch.stack.supervisor)
        self._iterations.add(iteration)
        return iteration

    async def aclose(self) -> None:
        """Release its blobs; idempotent. Iterations end with `CLOSED`."""
        self._scope.close()  # the handle may have closed it before
        self._release()
        for items in list(self._iterations):
            await items.aclose()


class Snapshot(PinnedRead, Generic[K, V]):
    """Contents at `as_of`: consolidated `(key, val, diff)` in key order."""

    def __init__(
        self,
        scope: Scope,
        fetch: Fetch,
        hold: SharedHold,
        state: State,
        as_of: Time,
        need: HistoryPin | None,
        closed: Callable[["Snapshot[K, V]"], None],
        tagged: TaggedContents | None = None,
    ) -> None:
        """`tagged`: the contents that a tag of `state` keeps, instead of those of the state itself."""
        super().__init__(scope, fetch, hold, state.seqno)
        self.as_of = as_of
        self._pin = need
        self._closed = closed
        self._tag = None if tagged is None else tagged.name
        self._parts = parts_at(state if tagged is None else tagged.contents, as_of)

    async def to_arrow(self, where: Any = None, columns: Columns | None = None) -> "pa.Table":
        """All contents, as columns `key`, `val`, `diff`. One request per part that is not inline.
        `DiffOverflow` if the sum of a row is beyond 64 bits.

        `where` is a `pyarrow.compute` expression over `pc.field("key")`, `pc.field("val", "amount")`, or
        only the names of fields if they are unique. Returns only matching rows. Does not fetch parts and row
        groups whose statistics exclude a match (one more request for the index of a large part).

        `columns` names the columns to return instead, in their order, summed again: `["key"]`,
        `["val.amount"]`. `InvalidUsage` of kind `INVALID_COLUMN` for a column that does not exist."""
        with self._scope.call():
            return writable(await self._contents(self._query(where, columns)))

    async def to_polars(self, where: Any = None, columns: Columns | None = None) -> "pl.DataFrame":
        """As `to_arrow`, as a polars frame."""
        return polars_frame(await self.to_arrow(where, columns))

    async def to_pandas(self, where: Any = None, columns: Columns | None = None) -> "pd.DataFrame":
        """As `to_arrow`, as a pandas frame. `Unsupported` for dates that Python cannot represent."""
        shard = self._fetch.shard
        return await pandas_frame(await self.to_arrow(where, columns), shard.stack, shard.id)

    @overload
    async def rows(self, where: Any = None, columns: None = None) -> list[tuple[K, V, int]]: ...
    @overload
    async def rows(self, where: Any = None, *, columns: Columns) -> list[tuple[Any, ...]]: ...

    async def rows(self, where: Any = None, columns: Columns | None = None) -> list[Any]:
        """All contents, as `(key, val, diff)` in types of the schema; `where`, `columns` as in `to_arrow`."""
        with self._scope.call():
            query = self._query(where, columns)
            return await self._rows_of(await self._contents(query), query)

    def batches(self, where: Any = None, columns: Columns | None = None) -> "Items[pa.RecordBatch]":
        """All contents as Arrow batches, globally consolidated, in key order; `where` and `columns` as in
        `to_arrow`. Needs memory for about 1.5 row groups (`settings.row_group_bytes`) of each sorted run
        of parts; for the whole result, if `columns` do not begin with the key or its first fields."""
        return self._iteration(self._batches(self._query(where, columns)))

    async def scan(self, flat: bool = True) -> "pl.LazyFrame":
        """The contents as a lazy frame of polars, for queries of polars and DuckDB: `collect` it in any
        thread, as often as you like, until the snapshot is closed (then `InvalidUsage` of kind `CLOSED`).
        Columns are `key`, or its fields, then `val`, or its fields, then `diff`; a name that occurs twice
        gets its half as a prefix. `flat=False`: `key`, `val`, `diff`.

        No request. A query fetches only parts and row groups that its conditions do not exclude, in memory
        as for `batches`. A second client, in a thread of its own, reads them under the lease of the
        snapshot: one more request per query. `Unsupported` for stores that were given as instances."""
        with self._scope.call():
            await self._fetch.stack.imported("polars", "aiopersist.read.scan")
            from aiopersist.read.scan import lazy_frame

            return lazy_frame(self._fetch.schema, self._leased().batches, flat=flat, diff=True)

    def _leased(self) -> "LeasedContents":
        from aiopersist.read.scan import LeasedContents

        fetch, twin = self._fetch, self._fetch.stack.twin
        twin.check()
        at = self._parts, self._reader, self.as_of
        return LeasedContents(fetch.shard.id, fetch.schema_id, fetch.schema, *at, twin, self._scope)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """All contents as a stream of Arrow, for `duckdb.sql("... from snapshot")`, `pa.table(snapshot)` and
        others that read streams: `key`, `val`, `diff`, in bounded memory, read as by `scan`. Works in any
        thread; in that of the event loop it blocks the loop."""
        self._scope.check_open()
        return self._leased().stream(requested_schema)

    def __aiter__(self) -> AsyncIterator[tuple[K, V, int]]:
        return RowItems(self._scope, self._iteration(self._row_slices()))

    def parts(self) -> list[LeasedPart]:
        """The parts of the snapshot, for readers in other processes (`fetch_part`), until the snapshot is
        closed. No request."""
        self._scope.check()
        self._hold.check(self._reader)
        return [LeasedPart(named, self._fetch, self._reader, self.as_of) for named in self._parts]

    async def stats(self) -> SnapshotStats:
        """Bounds of the contents, from the statistics of the parts. No request."""
        with self._scope.call():
            columns = await self._fetch.stack.compute(
                common_stats, [part for _, part in self._parts], self._fetch.schema
            )
            return SnapshotStats(
                parts=len(self._parts),
                updates_max=sum(part.rows for _, part in self._parts),
                encoded_bytes=sum(part.size for _, part in self._parts),
                columns=columns,
            )

    async def aclose(self) -> None:
        """See `PinnedRead`."""
        if self._pin is not None:
            self._hold.drop(self._pin)
        await super().aclose()
        self._closed(self)

    def _query(self, where: Any = None, columns: Columns | None = None) -> Query:
        return Query.of(self._fetch.schema, where, columns)

    async def _matching(self, query: Query) -> list[Named]:
        if not query.prunes or all(part.stats is None for _, part in self._parts):
            return self._parts
        return await self._fetch.stack.compute(query.matching, self._parts)

    async def _plan_again(self, error: LeaseExpired, plans_left: int) -> None:
        """Plan again on the newest state, after a part without a lease was deleted. Raises `error` if there
        is a lease, or if no plan is left; `UnknownTag` if the tag of the contents was dropped."""
        if self._hold.keeps or not plans_left:
            raise error
        state = await self._fetch.shard.open()
        if self._tag is not None:
            check_tag(state, self._tag)
            raise error
        if not state.since.less_equal(self.as_of):
            raise SinceViolation(self.as_of, state.since, shard_id=self._fetch.shard.id)
        self._parts = parts_at(state, self.as_of)

    async def _contents(self, query: Query) -> "pa.Table":
        with self._fetch.stack.tracing.span("snapshot.read", self._fetch.shard.known_as):
            for plans_left in reversed(range(PLANS_MAX)):
                try:
                    return await self._read(query)
                except LeaseExpired as error:
                    await self._plan_again(error, plans_left)
        raise AssertionError("the last attempt returns or raises")

    async def _read(self, query: Query) -> "pa.Table":
        self._hold.check(self._reader)
        selection = Selection(as_of=self.as_of, where=query.where, keys=query.keys)
        parts = await self._matching(query)
        small = sum(part.size for _, part in parts) <= ON_THE_LOOP_BYTES
        if small and all(part.inline is not None for _, part in parts):
            return self._summed([await self._fetch.table(parts, selection, self._reader)], query, parts)
        jobs = [partial(self._fetch.table, group, selection, self._reader) for group in groups(parts)]
        tables = await run_bounded(self._fetch.stack.settings.fetch_max_outstanding_parts, jobs)
        return await self._fetch.stack.compute(self._summed, tables, query, parts)

    def _summed(self, tables: "list[pa.Table]", query: Query, parts: Sequence[Named]) -> "pa.Table":
        is_whole = query.paths is None and query.sums
        if is_whole and are_contents(parts, self._fetch.schema_id) and are_sums(tables):
            return concat(tables, self._fetch.schema).select(["key", "val", "diff"])
        return query.summed([query.projected(concat(tables, self._fetch.schema))])

    async def _rows_of(self, table: Any, query: Query) -> list[tuple[Any, ...]]:
        if table.num_rows < ROWS_ON_THE_LOOP:
            return query.rows(table)
        rows: list[tuple[Any, ...]] = []
        for part in slices(table):
            rows += await self._fetch.stack.compute(_kept_rows, query, part)
        return rows

    def _batches(self, query: Query) -> "AsyncGenerator[pa.RecordBatch, None]":
        tracing, name = self._fetch.stack.tracing, self._fetch.shard.known_as
        return tracing.iteration("snapshot.read", name, self._planned_batches(query))

    async def _planned_batches(self, query: Query) -> "AsyncGenerator[pa.RecordBatch, None]":
        for plans_left in reversed(range(PLANS_MAX)):
            begun = False
            try:
                async with aclosing(self._merged(query)) as batches:
                    async for batch in batches:
                        begun = True
                        yield batch
                return
            except LeaseExpired as error:
                await self._plan_again(error, 0 if begun else plans_left)

    async def _merged(self, query: Query) -> "AsyncGenerator[pa.RecordBatch, None]":
        self._hold.check(self._reader)
        selection = Selection(as_of=self.as_of, not_as_of=query.after, where=query.where, keys=query.keys)
        if query.prunes:
            runs = await self._fetch.stack.compute(query.runs, self._parts)
        else:
            runs = plan_runs(self._parts)
        source = self._fetch, runs, selection, self._reader
        if query.paths is None:
            merged = in_batches(*source, final=True)
        else:
            merged = projected_in_batches(*source, query)
        async with aclosing(merged) as batches:
            async for batch in batches:
                yield batch

    async def _row_slices(self) -> AsyncGenerator[list[Any], None]:
        query = self._query()
        async with aclosing(self._batches(query)) as batches:
            async for batch in batches:
                size = batch.nbytes if batch.num_rows < ROWS_ON_THE_LOOP else inf
                for rows in slices(batch):
                    yield await self._fetch.stack.compute_few(size, query.rows, rows)

    async def updates(self) -> AsyncGenerator[Updates[K, V, Any], None]:
        """The contents as updates at `as_of`, in bounded memory."""
        async with aclosing(self._batches(self._query())) as batches:
            async for batch in batches:
                table = at_time(batch, self.as_of, self._fetch.schema)
                yield Updates(table, self._fetch.schema)

    def __repr__(self) -> str:
        return f"<Snapshot of {self._fetch.shard.id} as of {self.as_of}: {len(self._parts)} parts>"


def _kept_rows(query: Query, table: Any) -> list[tuple[Any, ...]]:
    rows = query.rows(table)
    grow_old()
    return rows


async def entries_scan(snapshot: Snapshot[Any, Any], flat: bool) -> "pl.LazyFrame":
    """As `scan`, without `diff`. The snapshot is closed when no frame made of it is left."""
    stack = snapshot._fetch.stack
    with snapshot._scope.call():
        await stack.imported("polars", "aiopersist.read.scan")
        from aiopersist.read.scan import in_the_loop, lazy_frame

        def close() -> None:
            if not snapshot._scope.closed:
                stack.supervisor.spawn(snapshot.aclose(), "close the snapshot of a scan")

        leased = snapshot._leased()
        return lazy_frame(leased.schema, leased.batches, flat=flat, diff=False, forget=in_the_loop(close))


async def contents_of(snapshot: Snapshot[Any, Any], keys: WantedKeys) -> "pa.Table":
    """As `to_arrow`, of these keys; the result may have others, too."""
    with snapshot._scope.call():
        return await snapshot._contents(Query(snapshot._fetch.schema, keys=keys))


async def count_of(snapshot: Snapshot[Any, Any], where: Any) -> int:
    """How many rows `to_arrow(where)` has, in bounded memory."""
    if sum(part.rows for _, part in snapshot._parts) <= BATCH_ROWS:  # a merge takes a few ms
        return int((await snapshot.to_arrow(where)).num_rows)
    return sum([batch.num_rows async for batch in snapshot.batches(where)])


async def updates_of(snapshot: Snapshot[Any, Any]) -> "pa.Table":
    """As `to_arrow()`, but not summed, in any order: this needs no sort."""
    with snapshot._scope.call():
        return await snapshot._contents(Query(snapshot._fetch.schema, sums=False))


def some_batches(
    snapshot: Snapshot[Any, Any],
    where: Any,
    after: Time | None,
    may_match: Callable[[Named], bool],
    columns: Columns | None = None,
) -> "Items[pa.RecordBatch]":
    """As `batches(where, columns)`, but reads only parts that `may_match`. `after`, a time at or beyond
    since: returns the changes after it instead, the diffs between the contents then and now."""
    query = replace(snapshot._query(where, columns), after=after, may_match=may_match)
    return snapshot._iteration(snapshot._batches(query))


async def pandas_frame(table: "pa.Table", stack: Stack, shard_id: str | None) -> "pd.DataFrame":
    """The table as a pandas frame, made on a thread. `Unsupported` for dates that Python cannot represent."""
    try:
        frame: pd.DataFrame = await stack.compute(table.to_pandas)
    except (OverflowError, ValueError) as e:
        raise Unsupported(f"pandas cannot hold the contents: {e}", shard_id=shard_id) from e
    return frame


def groups(parts: list[Named]) -> list[list[Named]]:
    """Parts that are fetched together: a blob alone, all inline parts at once."""
    inline = [named for named in parts if named[1].inline is not None]
    blobs = [[named] for named in parts if named[1].inline is None]
    return [inline, *blobs] if inline else blobs
