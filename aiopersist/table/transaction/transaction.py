"""Transactions: a function of the user reads and writes tables, and all of it happens at one moment.

The body runs against the views and the operations that are still undecided (`commit/plan.py`), and reads at
one moment (`consistent_read`). Its writes are kept. At its end the group commit applies them if all keys and
ranges that the body read are unchanged. Else it is a conflict, and the body runs again. Every table that was
read or written takes part in the commit of a transaction that writes, so commits have the order of times.

A body that wrote nothing, or raised, is answered only if its reads were valid at a look that began after it.
This is optimistic concurrency control (Kung and Robinson, 1981) with backward validation, by predicates for
ranges.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from aiopersist.base.errors import InvalidUsage, KeyExists, ShardFinalized, SinceViolation, UsageKind, shown
from aiopersist.base.frontier import Antichain, last_before, minimum
from aiopersist.base.resource import run_bounded
from aiopersist.data.lazy import pa
from aiopersist.data.updates.convert import ROW, chunks_of, to_table
from aiopersist.data.updates.inputs import GivenEntries, own_copy
from aiopersist.data.updates.sizes import check_update_size
from aiopersist.read.session import ReadSession
from aiopersist.read.snapshot import Snapshot
from aiopersist.table.commit.group import LOOKS_AT_ONCE
from aiopersist.table.commit.operation import Action, Cells, Conflicted
from aiopersist.table.commit.participant import Participant, ShardParticipant, TableParticipant
from aiopersist.table.commit.plan import Speculation
from aiopersist.table.handle import acquired, is_closed, kind_of, leave
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.ranges import ReadRange, condition_of, entries_within, streamed, within
from aiopersist.table.schema import TableSchema, listed
from aiopersist.table.table import Table
from aiopersist.table.transaction.consistent_read import ConsistentRead
from aiopersist.table.view.contents import FullView
from aiopersist.write.handle import WriteHandle, session_of

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 64  # of an entry that is filtered and sorted, about


class RunAgain(BaseException):
    """Ends a body that has read what is no longer so: `keys`, as those of `Conflict`. No `Exception`, so that
    the body does not catch it."""

    def __init__(self, keys: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__("what the transaction read has changed")
        self.keys = keys

    @classmethod
    def within(cls, group: BaseExceptionGroup[Any]) -> RunAgain | None:
        """The first of those that tasks of a body have raised."""
        for error in group.exceptions:
            found = cls.within(error) if isinstance(error, BaseExceptionGroup) else error
            if isinstance(found, cls):
                return found
        return None


class Touched(Struct, eq=False):
    """What a transaction has read and written of one table."""

    kind: TableSchema[Any, Any]
    handle: Table[Any, Any]
    table: OpenTable | None = None
    """Opened by the first read, or at the end."""
    version: int = 0
    """Of the view when the reads were last known to be so."""
    ahead: Speculation | None = None
    """What its reads see besides the view."""
    member: TableParticipant = None  # type: ignore[assignment]  # that of the `table`, once that is there
    checked: tuple[int, int] | None = None
    """The versions of the view and of `ahead` for which the reads were checked."""
    read: dict[str, str | None] = {}
    ranges: list[ReadRange] = []
    written: dict[str, str | None] = {}
    kept: list[str] = []
    """The keys that the view keeps for it."""
    closed: bool = False

    async def open(self) -> OpenTable:
        """The table. It stays open until `close`, also if the body closes its handle."""
        if self.table is None:
            table = await acquired(self.handle)
            if self.table is None and not self.closed:
                self.version, self.member, self.table = table.view.version, table.member, table
            else:  # another read was first, or the transaction has ended
                leave(self.handle, table)
        return self.table or table

    def val_of(self, key: str) -> str | None:
        """The value of a known key, before what the transaction writes."""
        view, ahead = self.member.view, self.ahead
        return view.val_of(key) if ahead is None else ahead.val_of(self.member, key)

    def conflicts(self, val_of: Callable[[str], str | None], more: Iterable[str] = ()) -> list[Any]:
        """The keys, and the ranges, that were read and are no longer so. `more` are keys that were written
        besides the changes of the view."""
        found = [key for key, val in self.read.items() if val_of(key) != val]
        conflicts: list[Any] = self.kind.keys(found) if found else []
        if self.ranges:
            changed = self.member.view.changed_since(self.version)
            changed = None if changed is None else changed | set(more)
            conflicts += [r for r in self.ranges if changed is None or self._has_any(changed, r)]
        return conflicts

    def _has_any(self, keys: Iterable[str], wanted: ReadRange) -> bool:
        entries = dict.fromkeys(keys)
        return bool(entries) and within(self.kind, entries, wanted).num_rows > 0

    def keep(self, keys: Sequence[str]) -> None:
        """Let the view keep keys until `close`."""
        view = self.member.view
        if not view.is_resident and not self.closed:
            view.keep(keys)
            self.kept += keys

    def unknown(self, keys: Sequence[str] = ()) -> list[str]:
        """What the view does not know of the keys, and of what was read if that must be checked."""
        if self.table is None or self.table.view.is_resident:
            return []
        view = self.table.view
        return view.unknown(keys if self.version == view.version else [*self.read, *keys])

    async def know(self, keys: Sequence[str]) -> None:
        """Have keys looked up and kept."""
        if not self.closed:
            self.keep(keys)
            await self.member.view.know(keys)

    def check(self) -> None:
        """`RunAgain` unless what was read is so by now. No key may be unknown."""
        if self.table is None:
            return
        now = self.table.view.version, self.ahead.version if self.ahead else -1
        if self.checked != now:
            if conflicts := self.conflicts(self.val_of):
                raise RunAgain([(self.kind.name, key) for key in conflicts])
            self.version, self.checked = now[0], now

    def close(self) -> None:
        """Keep nothing any more."""
        if self.closed:
            return
        self.closed = True
        if self.kept:
            kept, self.kept = self.kept, []
            self.member.view.release(kept)
        if self.table is not None:
            leave(self.handle, self.table)


class Transaction:
    """What a body is given. Its reads see its own writes. It ends with the body."""

    def __init__(self, tables: OpenTables, cut: ConsistentRead, ahead: Speculation | None = None) -> None:
        self._tables = tables
        self._cut = cut
        self._ahead = ahead
        self._size_max = tables.shards.stack.settings.update_size_max
        self.touched: dict[str, Touched] = {}
        """By the name of the table."""
        self._of_handles: dict[int, Touched] = {}  # by their identity
        self.plain: dict[Participant, Sequence[pa.Table]] = {}
        """What is appended to plain shards."""
        self.ended = False
        self.done_at: int | None = None

    @property
    def time(self) -> int:
        """The time of its commit, once that has happened; of a transaction that wrote nothing the greatest
        time that it saw."""
        if self.done_at is None:
            raise InvalidUsage(UsageKind.OUTCOME_PENDING, "a transaction has no time until it is committed")
        return self.done_at

    # --- reads -----------------------------------------------------------------------------------

    async def get(self, table: Table[K, V], key: K) -> V | None:
        """The value of `key`, or `None`."""
        touched = self._of(table)
        text = touched.kind.key_text(key)
        await self._read(touched, [] if text in touched.written else [text])
        if (val := _val(touched, text)) is None:
            return None
        return await self._tables.shards.stack.compute_few(len(val), touched.kind.val, val)

    async def get_many(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        """The values of those of `keys` that are there."""
        touched, wanted = self._of(table), listed(keys)
        texts = touched.kind.key_texts(wanted) if wanted else []
        await self._read(touched, [text for text in texts if text not in touched.written])
        vals = [(key, _val(touched, text)) for key, text in zip(wanted, texts, strict=True)]
        return await self._tables.decoded(touched.kind, [(key, val) for key, val in vals if val is not None])

    async def insert(self, table: Table[K, V], key: K, val: V) -> None:
        """Give `key` that value; `KeyExists` if it has one."""
        touched = self._of(table)
        text, val_text = touched.kind.entry(key, val, self._size_max)
        await self._read(touched, [text])
        if _val(touched, text) is not None:
            raise KeyExists(key, table=table.name)
        touched.written[text] = val_text

    async def items(
        self, table: Table[K, V], start: K | None = None, stop: K | None = None, prefix: Any = None
    ) -> AsyncIterator[tuple[K, V]]:
        """The entries with `start <= key < stop`, in key order; `prefix`: those whose keys begin with it. All
        are of the moment of the first one. Costs time for each key of a resident table; else it reads the
        parts that match, in bounded memory."""
        await self._tables.ready_to_filter(start, stop, prefix)
        touched, wanted = self._of(table), ReadRange(start, stop, prefix)
        condition_of(touched.kind, wanted)
        self._ahead = None
        await self._read(touched)
        touched.ranges.append(wanted)
        stack, view = self._tables.shards.stack, touched.member.view
        if isinstance(view.held, FullView):
            vals = {**view.held.vals, **touched.written}
            size = len(vals) * ENTRY_BYTES
            for entry in await stack.compute_few(size, entries_within, touched.kind, vals, wanted):
                yield entry
            return
        own, upper = dict(touched.written), view.upper  # no await since the ranges were noted
        async with _snapshot_before(upper, view.session, (touched.kind.name, wanted)) as snapshot:
            async for some in streamed(stack, touched.kind, snapshot, own, wanted):
                for entry in some:
                    yield entry

    # --- writes ----------------------------------------------------------------------------------

    def put(self, table: Table[K, V], key: K, val: V) -> None:
        """Give `key` that value."""
        touched = self._of(table)
        touched.written.update([touched.kind.entry(key, val, self._size_max)])

    def put_many(self, table: Table[K, V], entries: GivenEntries[K, V]) -> None:
        """Give keys their vals: a mapping, `(key, val)` pairs, or Arrow data."""
        touched = self._of(table)
        touched.written.update(touched.kind.entries(entries, self._size_max))

    def delete(self, table: Table[K, V], *keys: K) -> None:
        """Delete those of `keys` that are there."""
        touched = self._of(table)
        touched.written.update(dict.fromkeys(touched.kind.key_texts(keys)))

    def append(self, writer: WriteHandle[Any, Any], rows: Any, diff: int = 1) -> None:
        """Append `(key, val)` or `(key, val, diff)` rows to a plain shard with a wall clock. The transaction
        raises `UpperMismatch` if the shard is closed."""
        self._check()
        session = session_of(self._checked(writer))
        schema = session.schema
        tables = []
        for chunk in chunks_of(own_copy(rows)):
            tables.append(to_table(chunk, schema, columns=ROW, diff=diff))
            check_update_size(tables[-1], self._size_max)
        member = ShardParticipant(session)
        self.plain[member] = [*self.plain.get(member, ()), *tables]

    # --- inside ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended:
            raise InvalidUsage(UsageKind.CLOSED, "the transaction has ended")

    def _of(self, table: Table[K, V]) -> Touched:
        self._check()
        if (known := self._of_handles.get(id(table))) is not None and not is_closed(table):
            return known
        kind = kind_of(table, self._tables)
        touched = self.touched.get(kind.name)
        if touched is None:
            touched = self.touched[kind.name] = self._of_handles[id(table)] = Touched(kind, table)
        elif touched.kind is not kind and touched.kind.identity != kind.identity:
            text = f"table {kind.name!r} is used with two types in one transaction"
            raise InvalidUsage(UsageKind.INVALID_TYPE, text)
        return touched

    def _checked(self, writer: object) -> WriteHandle[Any, Any]:
        if not isinstance(writer, WriteHandle):
            raise TypeError(f"{shown(writer)} is not a write handle")
        shard = session_of(writer).shard
        if shard.stack is not self._tables.shards.stack:
            text = f"the writer of {shard.label} belongs to another client"
            raise InvalidUsage(UsageKind.INVALID_APPEND, text, shard_id=shard.id)
        if shard.state.finalized:
            raise ShardFinalized("it is finalized", shard_id=shard.id)
        if not shard.state.is_wall:
            text = f"{shard.label} has a logical clock: a transaction needs writers with clock='wall'"
            raise InvalidUsage(UsageKind.INVALID_CLOCK, text, shard_id=shard.id)
        return writer

    async def _read(self, touched: Touched, keys: Sequence[str] = ()) -> None:
        """Bring all tables that were read, and this one, to one moment, at which `keys` are known. What was
        read is still so, or the body runs again. After it nothing is awaited before the values are read."""
        if touched.table is None:
            await touched.open()
            self._check()
        touched.keep(keys)
        every = self.touched.values()
        members = [t.member for t in every if t is touched or t.read or t.ranges]
        while True:
            await self._cut.make(members)
            self._check()
            unknown = [(some, some.unknown(keys if some is touched else ())) for some in every]
            if not (jobs := [partial(some.know, found) for some, found in unknown if found]):
                break
            await run_bounded(LOOKS_AT_ONCE, jobs)
        ahead = self._ahead_of(members)
        for some in every:
            some.ahead = ahead
            some.check()

    def _ahead_of(self, members: Collection[TableParticipant]) -> Speculation | None:
        """What is undecided, if there is anything, and it is of one moment with these tables."""
        ahead = self._ahead
        if ahead is None or not (rests_on := ahead.refresh()):
            return None
        return ahead if self._cut.holds({*rests_on, *members}) else None

    # --- the end ---------------------------------------------------------------------------------

    def _close(self) -> None:
        """Let views forget what it read."""
        self.ended = True
        for touched in self.touched.values():
            touched.close()

    @property
    def _writes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.plain or [touched for touched in self.touched.values() if touched.written])

    def _check_ahead(self) -> None:
        """`Conflicted` if what waits already makes it so. The group commit would tell that later."""
        touched = [some for some in self.touched.values() if some.read]
        ahead = self._ahead_of([some.member for some in touched])
        if ahead is not None and not any(some.unknown() for some in touched):
            for some in touched:
                some.ahead = ahead
            _compare([(some, some.val_of, ()) for some in touched])

    def _action(self, result: Any, error: Exception | None) -> Action:
        """What the group commit does with the tables that are open: if all that was read is still so, it
        writes, or raises `error`."""
        touched = [some for some in self.touched.values() if some.table is not None]

        def act(*cells: Cells) -> Any:
            _compare([(some, own.get, own.before) for some, own in zip(touched, cells, strict=True)])
            if error is not None:
                raise error
            for some, of_table in zip(touched, cells, strict=True):
                of_table.written.update(some.written)
            return result

        return act


def _compare(
    reads: Iterable[tuple[Touched, Callable[[str], str | None], Iterable[str]]],
) -> None:
    """`Conflicted` if what was read is no longer so by these values and changes."""
    conflicts = [
        (some.kind.name, key) for some, val_of, more in reads for key in some.conflicts(val_of, more)
    ]
    if conflicts:
        raise Conflicted(conflicts)


def _val(touched: Touched, key: str) -> str | None:
    """The value of a key as the transaction sees it."""
    if key in touched.written:
        return touched.written[key]
    touched.read[key] = val = touched.val_of(key)
    return val


@asynccontextmanager
async def _snapshot_before(
    upper: Antichain, session: ReadSession[Any, Any], read: tuple[str, ReadRange]
) -> AsyncIterator[Snapshot[Any, Any] | None]:
    """The contents before `upper`, which a view shows; `RunAgain` if they are gone already."""
    if upper == minimum(None):
        yield None
        return
    try:
        snapshot = await session.snapshot(last_before(upper), wait=False)
    except SinceViolation as error:
        raise RunAgain([read]) from error
    async with snapshot:
        yield snapshot
