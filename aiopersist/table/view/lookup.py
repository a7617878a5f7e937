"""What a view reads: all contents, or keys that are looked up, by the statistics of parts, then by those of
row groups.

A key of a table that is compacted to one run costs at most two requests: for the index of a part, and for a
row group; an index that was read lately costs none. A compaction leaves the history of a key in one part.
Only a history that fills row groups by itself costs more.
"""

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

AT_ONCE = 4  # look-ups of one table; keys that come meanwhile share the next


FEW = 24  # rows that are summed faster than a thread is reached


def wanted_keys(kind: TableSchema[Any, Any], texts: Sequence[str]) -> WantedKeys:
    """The keys of these texts, as reads look for them."""
    return WantedKeys(column_from_texts(texts, kind.schema.key.codec.arrow_type))


def chosen(kind: TableSchema[Any, Any], found: pa.Table, keys: Iterable[str]) -> dict[str, str]:
    """The values of these keys, of contents that have them and perhaps others."""
    wanted = set(keys)
    pairs = zip(*kind.texts(found), strict=True) if found.num_rows else ()
    return {key: val for key, val in pairs if key in wanted}


async def look_up(
    session: ReadSession[Any, Any],
    kind: TableSchema[Any, Any],
    state: State,
    as_of: Time,
    reader: str,
    keys: Sequence[str],
) -> dict[str, str]:
    """The values that keys had at a complete time, by a state that `reader` holds."""
    stack, shard = session.shard.stack, session.shard
    release = shard.register.pin(state.seqno)
    try:

        def planned() -> tuple[WantedKeys, list[Named]]:
            wanted = wanted_keys(kind, keys)
            return wanted, Query(kind.schema, keys=wanted).matching(parts_at(state, as_of))

        wanted, parts = await stack.compute(planned)
        selection = Selection(as_of=as_of, keys=wanted)
        jobs = [partial(session.fetch.table, group, selection, reader) for group in groups(parts)]
        tables = await run_bounded(stack.settings.fetch_max_outstanding_parts, jobs)
    finally:
        release()

    def found() -> dict[str, str]:
        return chosen(kind, contents(concat(tables, kind.schema), kind.schema), keys)

    few = sum(table.num_rows for table in tables) <= FEW
    return await stack.compute_few(0 if few else inf, found)


class LookUps:
    """Shares look-ups among the calls that wait: each takes all keys that were asked for before it began."""

    def __init__(self, supervisor: Supervisor, work: Callable[[list[str]], Awaitable[None]]) -> None:
        self._supervisor = supervisor
        self._work = work
        self._room = asyncio.Semaphore(AT_ONCE)
        self._keys: dict[str, None] = {}
        self._next: asyncio.Task[None] | None = None

    async def of(self, keys: Iterable[str]) -> None:
        """Look these up. A caller that is cancelled stops waiting."""
        self._keys.update(dict.fromkeys(keys))
        if self._next is None or self._next.done():
            self._next = self._supervisor.spawn(self._look_up(), "look up keys of a table")
        await asyncio.shield(self._next)

    async def _look_up(self) -> None:
        async with self._room:
            keys, self._keys, self._next = list(self._keys), {}, None
            await self._work(keys)


def whole_of(kind: TableSchema[Any, Any], updates: pa.Table) -> FullView:
    """All contents, of updates in any order. If none is a retraction, they are it: a key has at most one
    value."""
    if not pc.all(pc.equal(updates.column("diff"), int64_scalar(1))).as_py():
        updates = contents(updates, kind.schema)
    whole = FullView()
    add_all(whole, kind, updates)
    return whole


def add_all(whole: FullView, kind: TableSchema[Any, Any], found: pa.Table | pa.RecordBatch) -> None:
    """Add contents of other keys."""
    for start in range(0, found.num_rows, SLICE_ROWS):
        whole.add(*kind.texts(found.slice(start, SLICE_ROWS)))
