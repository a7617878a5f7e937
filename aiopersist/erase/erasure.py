"""Erases rows of a table: the steps, and what is left.

1. *Search* the stores. Where they have nothing of the rows, nothing is to be done.
2. *Delete* the rows from the contents, once: what somebody puts again meanwhile is theirs, and is told.
3. *Give up history*: since moves to the time of the deletion, as far as all holds allow. A hold is ended only
   if the caller names it; the others are waited for.
4. *Compact*: insertions meet their retractions, and both go.
5. *Collect* the versions before that, and their blobs; readers of old versions are waited for. What crashed
   writers have left goes, too.
6. *Search* again: only this decides whether it is done.

Each step may be repeated, and does nothing if there is nothing to do. So a call that was cut off is called
again, and goes on.
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
from aiopersist.erase.search import Remnant, Search, SearchResult
from aiopersist.erase.wanted import RowsToErase
from aiopersist.gc.sweep import leaks_of
from aiopersist.maintenance.background import Maintenance
from aiopersist.maintenance.holds import Holder, end_hold, holders_of_history, holders_of_versions
from aiopersist.maintenance.inspect import ShardView, inspect
from aiopersist.read.snapshot import contents_of
from aiopersist.shard.commit import commit
from aiopersist.state.retention import ForgetHistory
from aiopersist.storage.readonly import refuse
from aiopersist.table.commit.operation import Remove
from aiopersist.table.commit.plan import Done, PendingOperation
from aiopersist.table.handle import acquired, kind_of, leave
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.schema import listed
from aiopersist.table.table import Table

DELETED_AT_ONCE = 10_000  # keys
ROUNDS = 5  # of deletions by a condition: others may put rows of which it is true
LOOK_MIN_S, LOOK_MAX_S = 0.1, 10.0  # between two looks at those who hold
TRIES = 3  # to collect what nobody holds: other processes may collect meanwhile
CARRIED = 9  # commits: an object of a bucket carries up to eight versions before its own


class EraseOptions(NamedTuple):
    """How an erasure goes on while somebody holds what is to go."""

    wait: timedelta
    end_holds: Iterable[str]
    dry_run: bool


class Erasure(BaseModel, frozen=True):
    """What came of an erasure."""

    done: bool
    """Whether no version, part or rollup of the table has any of the rows."""
    deleted: int
    """Rows that this call deleted from the contents."""
    present: int
    """Such rows in the contents now: put again after they were deleted, or, of a dry run, to be deleted."""
    time: int | None
    """The time of the deletion, or of an earlier one: since must reach it. `None`: nothing had to go."""
    since: Antichain
    """The since of the table."""
    remnants: list[Remnant]
    """What still has some of the rows."""
    holders: list[Holder]
    """Who keeps it: nothing goes before they let go."""
    ended: list[Holder]
    """The holds that were ended, since the caller named them."""


async def erase(
    tables: OpenTables,
    maintenance: Maintenance,
    table: Table[Any, Any],
    keys: Iterable[Any] | None,
    where: Any,
    options: EraseOptions,
) -> Erasure:
    """See `Admin.erase`."""
    kind = kind_of(table, tables)
    if keys is None and where is None:
        raise InvalidUsage(UsageKind.INVALID_TYPE, "erase: give keys, or a condition as where=")
    if isinstance(options.end_holds, str):
        raise TypeError(f"end_holds={shown(options.end_holds)} is one name: give a list of names")
    if not isinstance(options.wait, timedelta):
        raise TypeError(f"wait={shown(options.wait)} is no timedelta")
    await tables.ready_to_filter(keys, where)
    if where is not None:
        check_where(where, kind.schema)
    given = listed(keys or ())
    wanted = RowsToErase(kind, kind.key_texts(given) if given else (), where)
    if not options.dry_run and tables.shards.stack.readonly:
        refuse("an erasure")
    found = await acquired(table, make=False)
    try:
        with found.scope.call():
            return await _Erasing(tables, maintenance, found, wanted, options).run()
    finally:
        leave(table, found)


class _Erasing:
    """One call."""

    def __init__(
        self,
        tables: OpenTables,
        maintenance: Maintenance,
        table: OpenTable,
        wanted: RowsToErase,
        options: EraseOptions,
    ) -> None:
        self._tables, self._maintenance, self._table = tables, maintenance, table
        self._shard, self._stack = table.shard, table.shard.stack
        self._asked = self._wanted = wanted
        self._options = options._replace(end_holds=tuple(options.end_holds))
        self._fitting = set[str]()
        """Keys of rows that the condition fits, or once did."""
        self._ended: list[Holder] = []
        self._deleted = 0
        self._has_compacted = False
        self._until = self._stack.runtime.monotonic() + options.wait.total_seconds()
        self._delay_s = LOOK_MIN_S

    async def run(self) -> Erasure:
        """All steps."""
        found, there = await self._search(), await self._present()
        if self._options.dry_run or not (found.remnants or there):
            view = await inspect(self._shard)
            target = Antichain(max(last_before(view.upper) if there else found.time, 0))
            holders = holders_of_history(view, target) if found.remnants or there else []
            others = [holder for holder in holders if holder.id != self._shard.hold.reader]
            return self._told(view, found, there, others, None)
        return await self._erase_history(max(found.time, await self._delete(there), 0))

    async def _erase_history(self, time: int) -> Erasure:
        for tries in count(1):
            holders = await self._give_up(Antichain(time)) or await self._collect()
            found, there = await self._search(), await self._present()
            is_carried = tries < TRIES and any(each.kind == "leftover" for each in found.remnants)
            is_over = bool(holders or there) or not found.remnants
            if is_over or not (is_carried or await self._waited(())):
                break
            for _ in range(CARRIED if is_carried else 0):
                await self._beat()
            time = max(time, found.time)
        return self._told(await inspect(self._shard), found, there, holders, time)

    def _told(
        self,
        view: ShardView,
        found: SearchResult,
        there: Mapping[str, str],
        holders: Sequence[Holder],
        time: int | None,
    ) -> Erasure:
        return Erasure(
            done=not found.remnants and not there,
            deleted=self._deleted,
            present=len(there),
            time=time,
            since=view.since,
            remnants=found.remnants,
            holders=list(holders),
            ended=self._ended,
        )

    # --- the contents ----------------------------------------------------------------------------

    async def _search(self) -> SearchResult:
        """What the stores have. A row that the condition fits takes the other rows of its key along, unless
        the contents have the key: then it is somebody else's by now, or was never deleted."""
        found = await Search(self._shard, self._wanted).run()
        if self._asked.where is None:
            return found
        self._fitting |= found.keys
        view = self._table.view
        await self._shard.open()
        await view.catch_up()
        gone = self._fitting - (await view.read(self._fitting)).keys()
        if (keys := self._asked.keys | gone) == self._wanted.keys:
            return found
        self._wanted = RowsToErase(self._asked.kind, keys, self._asked.where)
        return await Search(self._shard, self._wanted).run()

    async def _present(self) -> dict[str, str]:
        """The rows in the contents now, as texts."""
        state = await self._shard.open()
        if state.upper == minimum(None):
            return {}
        found: dict[str, str] = {}
        wanted, compute = self._asked, self._stack.compute
        async with await self._table.reading.snapshot(None, wait=False) as snapshot:
            if wanted.keys:
                found |= await compute(wanted.entries, await contents_of(snapshot, wanted.by_keys))
            if wanted.where is not None:
                async for batch in snapshot.batches(wanted.where):
                    found |= await compute(wanted.entries, pa.Table.from_batches([batch]))
        return found

    async def _delete(self, there: Mapping[str, str]) -> int:
        """Delete the rows: by their keys whatever their values are, by the condition if it still fits. The
        time at which all of them are gone; -1 if there were none."""
        time = -1
        for _ in range(ROUNDS):
            keys = self._asked.keys
            entries = {**dict.fromkeys(keys & there.keys()), **{k: there[k] for k in there.keys() - keys}}
            given = list(entries.items())
            for begin in range(0, len(given), DELETED_AT_ONCE):
                done = await self._remove(dict(given[begin : begin + DELETED_AT_ONCE]))
                self._deleted, time = self._deleted + done.result, max(time, done.time)
            there = await self._present()
            if not there.keys() - keys:
                break
        return time

    async def _remove(self, entries: Mapping[str, str | None]) -> Done:
        member, action = self._table.member, Remove(entries)
        done = await self._tables.group.do(PendingOperation((member,), action, (action.keys,), member))
        assert isinstance(done, Done)  # it is not marked
        return done

    # --- the history -----------------------------------------------------------------------------

    async def _give_up(self, target: Antichain) -> list[Holder]:
        """Move since to `target`; who keeps it from that, when there is no time left to wait."""
        while True:
            await self._beat()
            if target <= await commit(self._shard.register, ForgetHistory(target)):
                return []
            view = await inspect(self._shard)
            holders = holders_of_history(view, target)
            if await self._end(holders, view):
                continue
            if not self._has_compacted:  # then tables that are not resident look keys up in what is new
                self._has_compacted = True
                await self._maintenance.force_compaction(self._shard)
            elif not await self._waited(holders):
                return holders

    async def _collect(self) -> list[Holder]:
        """Compact, and delete all before that; who reads what is older, when there is no time left to
        wait."""
        await self._maintenance.force_compaction(self._shard)
        without, mine = (await self._shard.open()).seqno, TRIES
        while True:
            await self._beat()
            await self._maintenance.of(self._shard).force_collection()
            view = await inspect(self._shard)
            if view.earliest_seqno >= without:
                break
            holders, mine = holders_of_versions(view, without), mine - 1
            if not holders and mine:  # the rollup is newer than what the heartbeat before it has told
                continue
            if not await self._end(holders, view) and not await self._waited(holders):
                return holders
        leaked = await leaks_of(self._stack, self._shard.id, expire=True)
        await self._stack.blob.delete(list(leaked))
        return []

    async def _beat(self) -> None:
        """Tell the shard what this client holds no more: its view of the table follows, too."""
        view = self._table.view
        await view.catch_up()
        view.release(())
        with suppress(LeaseExpired):  # then it holds nothing
            await self._shard.hold.heartbeat()

    async def _end(self, holders: Iterable[Holder], view: ShardView) -> bool:
        """End those that the caller has named; whether there were any."""
        named = [h for h in holders if any(map(h.is_named, self._options.end_holds))]
        for holder in named:
            with suppress(OpaqueMismatch):  # somebody else has it now: the next look tells
                await end_hold(self._shard, view, holder.kind, holder.id)
                self._ended.append(holder)
        return bool(named)

    async def _waited(self, holders: Sequence[Holder]) -> bool:
        """Wait for a while; `False` when there is no time left."""
        left = self._until - self._stack.runtime.monotonic()
        if left <= 0:
            return False
        names = ", ".join(f"{holder.kind} {holder.id}" for holder in holders)
        with progress(f"waiting for {names}" if names else "waiting", None, ""):
            await self._stack.runtime.sleep(min(self._delay_s, left))
        self._delay_s = min(2 * self._delay_s, LOOK_MAX_S)
        return True
