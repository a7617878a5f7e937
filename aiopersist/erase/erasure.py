"""Erases rows of a table: the steps, and the result.

1. *Search* the stores. Without matches there is nothing to do.
2. *Delete* the rows from the contents, once. If somebody puts them again meanwhile, the result says so.
3. *Give up history*: move since to the time of the deletion, as far as all holds allow. End a hold only if
   the caller names it; wait for the others.
4. *Compact*: insertions and their retractions cancel out.
5. *Collect* the versions before that, and their blobs; wait for readers of old versions. Delete the blobs of
   crashed writers, too.
6. *Search* again: only this decides whether the rows are erased. If a blob has rows, drop the tags that keep
   it, if the caller names them; wait for the others. Then collect and search again.

Each step may be repeated, and does nothing if there is nothing to do. So after a crash, repeat the call.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

from pydantic import BaseModel

from aiopersist.base.errors import InvalidUsage, LeaseExpired, OpaqueMismatch, UsageKind, shown
from aiopersist.base.frontier import Antichain, last_before, minimum
from aiopersist.base.progress import progress
from aiopersist.data.lazy import pa
from aiopersist.data.part.select import check_where
from aiopersist.erase.rows import RowsToErase
from aiopersist.erase.search import Remnant, Search, SearchResult
from aiopersist.gc.sweep import leaks_of
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.holds import (
    Holder,
    end_hold,
    holders_of_blobs,
    holders_of_history,
    holders_of_versions,
)
from aiopersist.maintenance.inspect import ShardView, inspect
from aiopersist.read.snapshot import contents_of
from aiopersist.shard.commit import commit
from aiopersist.state.lifecycle import ExpireOverdue
from aiopersist.state.retention import ForgetHistory
from aiopersist.state.tagging import DropTag
from aiopersist.storage.readonly import refuse
from aiopersist.table.commit.operation import Remove
from aiopersist.table.commit.plan import Done, PendingOperation
from aiopersist.table.handle import acquired, leave, schema_of
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.schema import listed
from aiopersist.table.table import Table

DELETED_AT_ONCE = 10_000  # keys
ROUNDS = 5  # of deletions by a condition: others may put matching rows meanwhile
LOOK_MIN_S, LOOK_MAX_S = 0.1, 10.0  # between two looks at the holders
TRIES = 3  # of a collection without holders: other processes may collect meanwhile
CARRIED = 9  # commits: an object in a bucket has up to eight versions before its own


class EraseOptions(NamedTuple):
    """Options of an erasure: how to treat holds."""

    wait: timedelta
    end_holds: Iterable[str]
    dry_run: bool


class Erasure(BaseModel, frozen=True):
    """The result of an erasure."""

    done: bool
    """Whether no version, part or rollup of the table, and no tag, has any of the rows."""
    deleted: int
    """Rows that this call deleted from the contents."""
    present: int
    """Rows in the contents now: put again after the deletion, or, in a dry run, to delete."""
    time: int | None
    """The time of this deletion, or of an earlier one: since must reach it. `None`: nothing to erase."""
    since: Antichain
    """The since of the table."""
    remnants: list[Remnant]
    """The places that still have some of the rows."""
    holders: list[Holder]
    """The holds that keep these places."""
    ended: list[Holder]
    """The holds that the caller named, and that this call ended."""


async def erase(
    tables: OpenTables,
    maintenance: Maintenance,
    table: Table[Any, Any],
    keys: Iterable[Any] | None,
    where: Any,
    options: EraseOptions,
) -> Erasure:
    """See `Admin.erase`."""
    table_schema = schema_of(table, tables)
    if keys is None and where is None:
        raise InvalidUsage(UsageKind.INVALID_TYPE, "erase: give keys, or a condition as where=")
    if isinstance(options.end_holds, str):
        raise TypeError(f"end_holds={shown(options.end_holds)} is one name: give a list of names")
    if not isinstance(options.wait, timedelta):
        raise TypeError(f"wait={shown(options.wait)} is not a timedelta")
    await tables.ready_to_filter(keys, where)
    if where is not None:
        check_where(where, table_schema.schema)
    keys_to_erase = listed(keys or ())
    rows = RowsToErase(table_schema, table_schema.key_texts(keys_to_erase) if keys_to_erase else (), where)
    if not options.dry_run and tables.shards.stack.readonly:
        refuse("an erasure")
    open_table = await acquired(table, create=False)
    try:
        with open_table.scope.call():
            return await _Erasing(tables, maintenance, open_table, rows, options).run()
    finally:
        leave(table, open_table)


class _Erasing:
    """One call."""

    def __init__(
        self,
        tables: OpenTables,
        maintenance: Maintenance,
        table: OpenTable,
        rows: RowsToErase,
        options: EraseOptions,
    ) -> None:
        self._tables, self._maintenance, self._table = tables, maintenance, table
        self._shard, self._stack = table.shard, table.shard.stack
        self._asked = self._extended = rows
        self._options = options._replace(end_holds=tuple(options.end_holds))
        self._fitting = set[str]()
        """Keys with a row, old or new, that matches the condition."""
        self._ended: list[Holder] = []
        self._deleted = 0
        self._has_compacted = False
        self._until = self._stack.runtime.monotonic() + options.wait.total_seconds()
        self._delay_s = LOOK_MIN_S

    async def run(self) -> Erasure:
        """All steps."""
        matches, present = await self._search(), await self._present()
        if self._options.dry_run or not (matches.has_rows or present):
            view = await inspect(self._shard)
            target = Antichain(max(last_before(view.upper) if present else matches.time, 0))
            holders = holders_of_history(view, target) if matches.remnants or present else []
            others = [holder for holder in holders if holder.id != self._shard.hold.reader]
            others += holders_of_blobs(self._shard.state, matches.blobs)
            return self._result(view, matches, present, others, None)
        return await self._erase_history(max(matches.time, await self._delete(present), 0))

    async def _erase_history(self, time: int) -> Erasure:
        for tries in count(1):
            holders = await self._give_up(Antichain(time)) or await self._collect()
            matches, present = await self._search(), await self._present()
            if await self._drop_tags(matches):
                continue
            tags = holders_of_blobs(self._shard.state, matches.blobs)
            is_carried = tries < TRIES and any(each.kind == "leftover" for each in matches.remnants)
            is_over = bool(holders or present) or not matches.remnants
            holders += tags
            if is_over or not (is_carried or await self._waited_for(tags)):
                break
            for _ in range(CARRIED if is_carried else 0):
                await self._beat()
            time = max(time, matches.time)
        return self._result(await inspect(self._shard), matches, present, holders, time)

    def _result(
        self,
        view: ShardView,
        matches: SearchResult,
        present: Mapping[str, str],
        holders: Sequence[Holder],
        time: int | None,
    ) -> Erasure:
        return Erasure(
            done=not matches.remnants and not present,
            deleted=self._deleted,
            present=len(present),
            time=time,
            since=view.since,
            remnants=matches.remnants,
            holders=list(holders),
            ended=self._ended,
        )

    # --- the contents ----------------------------------------------------------------------------

    async def _search(self) -> SearchResult:
        """Search the stores. A row that matches the condition adds all rows of its key, unless the contents
        have the key: then somebody has put it again, or it was never deleted."""
        matches = await Search(self._shard, self._extended).run()
        if self._asked.where is None:
            return matches
        self._fitting |= matches.keys
        view = self._table.view
        await self._shard.open()
        await view.catch_up()
        absent = self._fitting - (await view.read(self._fitting)).keys()
        if (keys := self._asked.keys | absent) == self._extended.keys:
            return matches
        self._extended = RowsToErase(self._asked.table_schema, keys, self._asked.where)
        return await Search(self._shard, self._extended).run()

    async def _present(self) -> dict[str, str]:
        """The rows in the contents now, as texts."""
        state = await self._shard.open()
        if state.upper == minimum(None):
            return {}
        entries: dict[str, str] = {}
        asked, compute = self._asked, self._stack.compute
        async with await self._table.reading.snapshot(None, wait=False) as snapshot:
            if asked.keys:
                entries |= await compute(asked.entries, await contents_of(snapshot, asked.by_keys))
            if asked.where is not None:
                async for batch in snapshot.batches(asked.where):
                    entries |= await compute(asked.entries, pa.Table.from_batches([batch]))
        return entries

    async def _delete(self, present: Mapping[str, str]) -> int:
        """Delete the rows: those with the keys, and those that still match the condition. The time of the
        last deletion; -1 without rows."""
        time = -1
        for _ in range(ROUNDS):
            keys = self._asked.keys
            items = [(key, None if key in keys else val) for key, val in present.items()]
            for begin in range(0, len(items), DELETED_AT_ONCE):
                done = await self._remove(dict(items[begin : begin + DELETED_AT_ONCE]))
                self._deleted, time = self._deleted + done.result, max(time, done.time)
            present = await self._present()
            if not present.keys() - keys:
                break
        return time

    async def _remove(self, entries: Mapping[str, str | None]) -> Done:
        participant, action = self._table.participant, Remove(entries)
        done = await self._tables.group.do(
            PendingOperation((participant,), action, (action.keys,), participant)
        )
        assert isinstance(done, Done)  # it is not marked
        return done

    # --- the history -----------------------------------------------------------------------------

    async def _give_up(self, target: Antichain) -> list[Holder]:
        """Move since to `target`; the holds that prevent this when the time to wait is over."""
        while True:
            await self._beat()
            if target <= await commit(self._shard.register, ForgetHistory(target)):
                return []
            view = await inspect(self._shard)
            holders = holders_of_history(view, target)
            if await self._end(holders, view):
                continue
            if not self._has_compacted:  # then the views of large tables stop using the old parts
                self._has_compacted = True
                await self._maintenance.force_compaction(self._shard)
            elif not await self._waited(holders):
                return holders

    async def _collect(self) -> list[Holder]:
        """Compact, and delete all older versions; the readers that prevent this when the wait is over."""
        await self._maintenance.force_compaction(self._shard)
        without, tries = (await self._shard.open()).seqno, TRIES
        while True:
            await self._beat()
            await self._maintenance.of(self._shard).force_collection()
            view = await inspect(self._shard)
            if min(view.earliest_seqno, self._shard.state.collected) >= without:
                break
            holders, tries = holders_of_versions(view, without), tries - 1
            if not holders and tries:  # the last heartbeat was older than the rollup
                continue
            if not await self._end(holders, view) and not await self._waited(holders):
                return holders
        leaked = await leaks_of(self._stack, self._shard.id, expire=True)
        await self._stack.blob.delete(list(leaked))
        return []

    async def _beat(self) -> None:
        """Update the view of this client, and release its hold on older versions."""
        view = self._table.view
        await view.catch_up()
        view.release(())
        with suppress(LeaseExpired):  # then the reader holds nothing
            await self._shard.hold.heartbeat()

    async def _end(self, holders: Iterable[Holder], view: ShardView) -> bool:
        """End the holds that the caller has named; whether there were any."""
        named = [h for h in holders if self._is_to_end(h)]
        for holder in named:
            with suppress(OpaqueMismatch):  # it has another owner now: the next look shows that
                await end_hold(self._shard, view, holder.kind, holder.id)
                self._ended.append(holder)
        return bool(named)

    async def _drop_tags(self, matches: SearchResult) -> bool:
        """Drop the tags that keep some of the rows and that the caller has named; whether there were any."""
        state = await self._shard.open()
        named = [h for h in holders_of_blobs(state, matches.blobs) if self._is_to_end(h)]
        for holder in named:
            if await commit(self._shard.register, DropTag(holder.id, state.tags[holder.id].rollup)):
                self._ended.append(holder)
        return bool(named)

    async def _waited_for(self, tags: Sequence[Holder]) -> bool:
        """Wait until all of the tags are dropped; `False` when the time to wait is over."""
        rollups = {tag.id: self._shard.state.tags[tag.id].rollup for tag in tags}
        while await self._waited(tags):
            await commit(self._shard.register, ExpireOverdue())
            state = await self._shard.open()
            remaining = {name for name, tag in state.tags.items() if tag.rollup == rollups.get(name)}
            if not (tags := [tag for tag in tags if tag.id in remaining]):
                return True
        return False

    def _is_to_end(self, holder: Holder) -> bool:
        return any(map(holder.is_named, self._options.end_holds))

    async def _waited(self, holders: Sequence[Holder]) -> bool:
        """Wait for a while; `False` when the time to wait is over."""
        left = self._until - self._stack.runtime.monotonic()
        if left <= 0:
            return False
        names = ", ".join(f"{holder.kind} {holder.id}" for holder in holders)
        with progress(f"waiting for {names}" if names else "waiting", None, ""):
            await self._stack.runtime.sleep(min(self._delay_s, left))
        self._delay_s = min(2 * self._delay_s, LOOK_MAX_S)
        return True
