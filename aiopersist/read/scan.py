"""Lazy scans of a snapshot: what polars, DuckDB and readers of Arrow streams ask for, batch by batch.

They call from threads that block, so the batches are read by the client's twin (`shard/twin.py`), under the
lease of the snapshot. Each batch is checked against the snapshot, so a read that outlives it fails.

Polars gives a source the columns, the predicate and the number of rows that a query needs. The predicate
becomes a prefilter, so parts and row groups without a match are not fetched; polars filters the rows again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

from aiopersist.base.errors import Unsupported
from aiopersist.base.frontier import Time
from aiopersist.base.resource import Scope
from aiopersist.base.runtime import OwnProcess
from aiopersist.data.arrays import empty_table
from aiopersist.data.lazy import pa, pl
from aiopersist.data.part.flat import ColumnSource, sources
from aiopersist.data.part.layout import writable
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.updates import polars_frame
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.read.leased import leased_batches
from aiopersist.read.predicate import FlatColumn, where_of
from aiopersist.read.query import Query
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shards import Shards
from aiopersist.shard.twin import Twin

DIFF = "diff"


@dataclass(frozen=True)
class LeasedContents:
    """The contents of an open snapshot, for threads that block."""

    shard: ShardId
    schema_id: int
    schema: Schema[Any, Any, Any]
    parts: list[Named]
    reader: str
    as_of: Time
    twin: Twin
    scope: Scope
    """The life of the snapshot."""

    @property
    def arrow_schema(self) -> pa.Schema:
        return _no_rows(self.schema).schema

    def batches(self, where: Any = None) -> Iterator[pa.RecordBatch]:
        """The columns `key`, `val`, `diff`, in key order. Without a `where`, or where it is a prefilter, as
        all reads. `InvalidUsage` of kind `CLOSED` once the snapshot is closed."""
        self.scope.check_open()
        for batch in self.twin.iterate(partial(self._read, where)):
            self.scope.check_open()
            yield batch

    async def _read(self, where: Any, shards: Shards) -> AsyncGenerator[pa.RecordBatch, None]:
        """In the loop of the twin."""
        shard = await shards.of_a_piece(self.shard)
        fetch = Fetch(shard, shard.schema(self.schema_id))
        query = Query(fetch.schema, where)
        runs = await shards.stack.compute(query.runs, self.parts)
        selection = Selection(as_of=self.as_of, where=where)
        rows = leased_batches(fetch, runs, selection, self.reader, "snapshot", True)
        async with aclosing(rows) as batches:
            async for batch in batches:
                yield batch

    def stream(self, requested_schema: object) -> object:
        """The capsule of a stream of Arrow, which reads when it is first asked for a batch."""
        reader = pa.RecordBatchReader.from_batches(self.arrow_schema, self.batches())
        return reader.__arrow_c_stream__(requested_schema)


class ScanSource:
    """The columns of `batches` of contents as polars asks for them. A column without a source is `diff`."""

    def __init__(
        self,
        schema: Schema[Any, Any, Any],
        batches: Callable[[Any], Iterator[pa.RecordBatch]],
        *,
        flat: bool,
        diff: bool,
    ) -> None:
        self._schema = schema
        self._batches = batches
        halves = schema.arrow_schema
        others = (DIFF,) if diff else ()
        self._sources: dict[str, ColumnSource | None] = {}
        if flat:
            self._sources |= sources(schema, others)
        else:
            self._sources |= {half: ColumnSource(half, None, halves.field(half)) for half in ("key", "val")}
        self._columns = {
            name: FlatColumn(source.path, source.stored.type)
            for name, source in self._sources.items()
            if source is not None
        }
        self._sources |= dict.fromkeys(others)
        self.schema = self._frame(_no_rows(schema), list(self._sources)).schema

    def frames(
        self,
        columns: Sequence[str] | None,
        predicate: pl.Expr | None,
        rows: int | None,
        batch_size: int | None,
    ) -> Iterator[pl.DataFrame]:
        """As `register_io_source` of polars wants it: of the first `rows` rows, those of the predicate."""
        needed = list(self._sources) if columns is None else list(columns)
        where = None
        if predicate is not None:
            names = predicate.meta.root_names()
            read = list(dict.fromkeys([*needed, *names]))
            if rows is None:  # else the first rows count, also those without a match
                where = where_of(predicate, self._columns, self._schema)
        for batch in self._batches(where):
            frame = self._frame(batch, needed if predicate is None else read)
            if rows is not None:
                frame = frame.head(rows)
                rows -= frame.height
            yield frame if predicate is None else frame.filter(predicate).select(needed)
            if rows == 0:
                return

    def _frame(self, batch: pa.Table | pa.RecordBatch, names: Sequence[str]) -> pl.DataFrame:
        arrays = {}
        for name in names:
            source = self._sources[name]
            arrays[name] = batch.column(DIFF) if source is None else source.of(batch)
        return polars_frame(pa.table(arrays))


def lazy_frame(
    schema: Schema[Any, Any, Any],
    batches: Callable[[Any], Iterator[pa.RecordBatch]],
    *,
    flat: bool,
    diff: bool,
    forget: Callable[[], object] | None = None,
) -> pl.LazyFrame:
    """A lazy frame of contents, whose batches `batches(where)` reads. `forget` is called, in any thread, when
    no frame made of it is left."""
    try:
        from polars.io.plugins import register_io_source
    except ImportError as error:
        text = f"polars {pl.__version__} has no register_io_source: read with to_polars() or batches()"
        raise Unsupported(text) from error
    source = ScanSource(schema, batches, flat=flat, diff=diff)
    if forget is not None:
        weakref.finalize(source, forget).atexit = False
    pure: dict[str, Any] = {"is_pure": True} if "is_pure" in signature(register_io_source).parameters else {}
    return register_io_source(source.frames, schema=source.schema, **pure)


def in_the_loop(work: Callable[[], object]) -> Callable[[], None]:
    """A function that calls `work` in this event loop, from any thread; nothing once the loop has ended, or
    in a fork."""
    loop, process = asyncio.get_running_loop(), OwnProcess("the event loop")

    def call() -> None:
        if process.is_here:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(work)

    return call


def _no_rows(schema: Schema[Any, Any, Any]) -> pa.Table:
    return writable(empty_table(schema.contents_schema))
