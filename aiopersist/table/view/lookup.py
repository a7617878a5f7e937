"""The reads of a view: all contents, or single keys. Statistics tell where a key may be.

A key of a table that is compacted to one run costs at most two requests: for the index of a part, unless it
was read lately, and for a row group. A compaction leaves the history of a key in one part. Only a history
that fills row groups by itself costs more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

from aiopersist.base.frontier import Time
from aiopersist.base.resource import run_bounded
from aiopersist.base.supervisor import Supervisor
from aiopersist.data.arrays import int64_scalar
from aiopersist.data.jsonable import SLICE_ROWS, column_from_texts
from aiopersist.data.lazy import pa, pc
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.consolidate import contents
from aiopersist.parts.fetch import Named, Selection
from aiopersist.read.query import Query
from aiopersist.read.session import ReadSession
from aiopersist.read.snapshot import groups, parts_at
from aiopersist.state.model import State
from aiopersist.table.schema import TableSchema
from aiopersist.table.view.contents import FullView

LOOK_UPS_AT_ONCE = 4  # look-ups of one table; keys that come meanwhile share the next
FEW_ROWS = 24  # rows that are consolidated faster than a thread starts


def wanted_keys(table_schema: TableSchema[Any, Any], texts: Sequence[str]) -> WantedKeys:
    """The keys of these texts, as a selection of reads."""
    return WantedKeys(column_from_texts(texts, table_schema.schema.key.codec.arrow_type))


def vals_of(table_schema: TableSchema[Any, Any], rows: pa.Table, keys: Iterable[str]) -> dict[str, str]:
    """The values of these keys in contents that may have other keys, too."""
    key_set = set(keys)
    pairs = zip(*table_schema.texts(rows), strict=True) if rows.num_rows else ()
    return {key: val for key, val in pairs if key in key_set}


async def look_up(
    session: ReadSession[Any, Any],
    table_schema: TableSchema[Any, Any],
    state: State,
    as_of: Time,
    reader: str,
    keys: Sequence[str],
) -> dict[str, str]:
    """The values of keys at a complete time, read by a state that `reader` holds."""
    stack, shard = session.shard.stack, session.shard
    release = shard.register.pin(state.seqno)
    try:

        def planned() -> tuple[WantedKeys, list[Named]]:
            selected = wanted_keys(table_schema, keys)
            return selected, Query(table_schema.schema, keys=selected).matching(parts_at(state, as_of))

        selected, parts = await stack.compute(planned)
        selection = Selection(as_of=as_of, keys=selected)
        jobs = [partial(session.fetch.table, group, selection, reader) for group in groups(parts)]
        tables = await run_bounded(stack.settings.fetch_max_outstanding_parts, jobs)
    finally:
        release()

    def vals() -> dict[str, str]:
        return vals_of(table_schema, contents(concat(tables, table_schema.schema), table_schema.schema), keys)

    few = sum(table.num_rows for table in tables) <= FEW_ROWS
    return await stack.compute_few(0 if few else inf, vals)


class LookUps:
    """Calls share look-ups: each look-up reads all keys that calls named before it began."""

    def __init__(self, supervisor: Supervisor, work: Callable[[list[str]], Awaitable[None]]) -> None:
        self._supervisor = supervisor
        self._work = work
        self._room = asyncio.Semaphore(LOOK_UPS_AT_ONCE)
        self._keys: dict[str, None] = {}
        self._next: asyncio.Task[None] | None = None

    async def of(self, keys: Iterable[str]) -> None:
        """Return once these were looked up. A cancelled caller stops waiting; the look-up goes on."""
        self._keys.update(dict.fromkeys(keys))
        if self._next is None or self._next.done():
            self._next = self._supervisor.spawn(self._look_up(), "look up keys of a table")
        await asyncio.shield(self._next)

    async def _look_up(self) -> None:
        async with self._room:
            keys, self._keys, self._next = list(self._keys), {}, None
            await self._work(keys)


def full_view_of(table_schema: TableSchema[Any, Any], updates: pa.Table) -> FullView:
    """All contents, of updates in any order. Updates without a retraction are contents, since a key has at
    most one value."""
    if not pc.all(pc.equal(updates.column("diff"), int64_scalar(1))).as_py():
        updates = contents(updates, table_schema.schema)
    view = FullView()
    add_all(view, table_schema, updates)
    return view


def add_all(view: FullView, table_schema: TableSchema[Any, Any], rows: pa.Table | pa.RecordBatch) -> None:
    """Add contents of keys that the view does not have."""
    for start in range(0, rows.num_rows, SLICE_ROWS):
        view.add(*table_schema.texts(rows.slice(start, SLICE_ROWS)))
