"""Transactions: a user's function reads and writes tables, and all of it happens at one moment.

The body reads the views and the speculation of undecided operations (`commit/plan.py`), as of one moment
(`consistent_read`). Its writes are collected. At its end the group commit applies them if all keys and ranges
that the body read are unchanged; otherwise it is a conflict, and the body runs again. Every table that was
read or written takes part in the commit of a transaction that writes, so the order of times is a serial
order.

If the body wrote nothing, or raised, its outcome counts only if its reads are valid by a read of the heads
that began after it. This is optimistic concurrency control (Kung and Robinson, 1981) with backward
validation, by predicates for ranges."""

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
from aiopersist.table.handle import acquired, is_closed, leave, schema_of
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.ranges import ReadRange, condition_of, entries_within, streamed, within
from aiopersist.table.schema import TableSchema, listed
from aiopersist.table.table import Table
from aiopersist.table.transaction.consistent_read import ConsistentRead
from aiopersist.table.view.contents import FullView
from aiopersist.write.handle import WriteHandle, session_of

K = TypeVar("K")
V = TypeVar("V")

FILTERED_ENTRY_BYTES = 64  # of an entry that is filtered and sorted, an estimate


class RunAgain(BaseException):
    """Ends a body whose reads have changed: `keys` as those of `Conflict`. It is no `Exception`, so that the
    body does not catch it."""

    def __init__(self, keys: Sequence[tuple[str, Any]] = ()) -> None:
        super().__init__("the reads of the transaction have changed")
        self.keys = keys

    @classmethod
    def within(cls, group: BaseExceptionGroup[Any]) -> RunAgain | None:
        """The first one that a task of the body raised."""
        for error in group.exceptions:
            inner = cls.within(error) if isinstance(error, BaseExceptionGroup) else error
            if isinstance(inner, cls):
                return inner
        return None


class Touched(Struct, eq=False):
    """The reads and writes of a transaction on one table."""

    schema: TableSchema[Any, Any]
    handle: Table[Any, Any]
    table: OpenTable | None = None
    """Opened by the first read, or at the end of the body."""
    version: int = 0
    """Of the view when the reads were last valid."""
    speculation: Speculation | None = None
    """Undecided writes that its reads see on top of the view."""
    participant: TableParticipant = None  # type: ignore[assignment]  # that of `table`, once it is open
    checked: tuple[int, int] | None = None
    """The versions of the view and of `speculation` for which the reads were checked last."""
    read: dict[str, str | None] = {}
    ranges: list[ReadRange] = []
    written: dict[str, str | None] = {}
    kept_keys: list[str] = []
    """The keys that the view keeps for it."""
    closed: bool = False

    async def open(self) -> OpenTable:
        """The table, open until `close`, even if the body closes its handle."""
        if self.table is None:
            table = await acquired(self.handle)
            if self.table is None and not self.closed:
                self.version, self.participant, self.table = table.view.version, table.participant, table
            else:  # another read has opened it, or the transaction has ended
                leave(self.handle, table)
        return self.table or table

    def val_of(self, key: str) -> str | None:
        """The value of a key that the view has in memory, without writes of the transaction."""
        contents, speculation = self.participant.view.contents, self.speculation
        return contents.val_of(key) if speculation is None else speculation.val_of(self.participant, key)

    def conflicts(self, val_of: Callable[[str], str | None], more: Iterable[str] = ()) -> list[Any]:
        """The keys and ranges whose reads have changed. `more`: keys written since the view."""
        texts = [key for key, val in self.read.items() if val_of(key) != val]
        conflicts: list[Any] = self.schema.keys(texts) if texts else []
        if self.ranges:
            changed = self.participant.view.changed_since(self.version)
            changed = None if changed is None else changed | set(more)
            conflicts += [r for r in self.ranges if changed is None or self._has_any(changed, r)]
        return conflicts

    def _has_any(self, keys: Iterable[str], read_range: ReadRange) -> bool:
        entries = dict.fromkeys(keys)
        return bool(entries) and within(self.schema, entries, read_range).num_rows > 0

    def keep(self, keys: Sequence[str]) -> None:
        """Let the view keep keys in memory until `close`."""
        view = self.participant.view
        if not view.is_resident and not self.closed:
            view.keep(keys)
            self.kept_keys += keys

    def unknown(self, keys: Sequence[str] = ()) -> list[str]:
        """The keys that the view must look up: of `keys`, and of the reads if they must be checked."""
        if self.table is None or self.table.view.is_resident:
            return []
        view = self.table.view
        return view.contents.unknown(keys if self.version == view.version else [*self.read, *keys])

    async def fetch(self, keys: Sequence[str]) -> None:
        """Have keys looked up and kept."""
        if not self.closed:
            self.keep(keys)
            await self.participant.view.fetch(keys)

    def check(self) -> None:
        """`RunAgain` if a read has changed. All keys must be in memory."""
        if self.table is None:
            return
        now = self.table.view.version, self.speculation.version if self.speculation else -1
        if self.checked != now:
            if conflicts := self.conflicts(self.val_of):
                raise RunAgain([(self.schema.name, key) for key in conflicts])
            self.version, self.checked = now[0], now

    def close(self) -> None:
        """Release the kept keys and the table."""
        if self.closed:
            return
        self.closed = True
        if self.kept_keys:
            self.participant.view.release(self.kept_keys)
        if self.table is not None:
            leave(self.handle, self.table)


class Transaction:
    """The argument of a body. Its reads see its own writes. It ends with the body."""

    def __init__(
        self, tables: OpenTables, consistent_read: ConsistentRead, speculation: Speculation | None = None
    ) -> None:
        self._tables = tables
        self._consistent_read = consistent_read
        self._speculation = speculation
        self._size_max = tables.shards.stack.settings.update_size_max
        self.touched: dict[str, Touched] = {}
        """By the name of the table."""
        self._of_handles: dict[int, Touched] = {}  # by their identity
        self.appends: dict[Participant, Sequence[pa.Table]] = {}
        """The rows for shards that are not tables."""
        self.ended = False
        self.done_at: int | None = None

    @property
    def time(self) -> int:
        """The time of the commit, after it; if it wrote nothing, the greatest time that it read."""
        if self.done_at is None:
            raise InvalidUsage(UsageKind.OUTCOME_PENDING, "a transaction has no time until it is committed")
        return self.done_at

    # --- reads -----------------------------------------------------------------------------------

    async def get(self, table: Table[K, V], key: K) -> V | None:
        """The value of `key`, or `None`."""
        touched = self._of(table)
        text = touched.schema.key_text(key)
        await self._read(touched, [] if text in touched.written else [text])
        if (val := _val(touched, text)) is None:
            return None
        return await self._tables.shards.stack.compute_few(len(val), touched.schema.val, val)

    async def get_many(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        """The values of the existing ones of `keys`."""
        touched, keys = self._of(table), listed(keys)
        texts = touched.schema.key_texts(keys) if keys else []
        await self._read(touched, [text for text in texts if text not in touched.written])
        pairs = zip(keys, texts, strict=True)
        vals = [(key, val) for key, text in pairs if (val := _val(touched, text)) is not None]
        return await self._tables.decoded(touched.schema, vals)

    async def insert(self, table: Table[K, V], key: K, val: V) -> None:
        """Give `key` that value; `KeyExists` if it has one."""
        touched = self._of(table)
        text, val_text = touched.schema.entry(key, val, self._size_max)
        await self._read(touched, [text])
        if _val(touched, text) is not None:
            raise KeyExists(key, table=table.name)
        touched.written[text] = val_text

    async def items(
        self, table: Table[K, V], start: K | None = None, stop: K | None = None, prefix: Any = None
    ) -> AsyncIterator[tuple[K, V]]:
        """The entries with `start <= key < stop`, in key order; `prefix`: only keys that begin with it. All
        are as of the moment of the first one. Takes time for each key of a resident table; of any other table
        it reads the parts that match, in bounded memory."""
        await self._tables.ready_to_filter(start, stop, prefix)
        touched, read_range = self._of(table), ReadRange(start, stop, prefix)
        condition_of(touched.schema, read_range)
        self._speculation = None
        await self._read(touched)
        touched.ranges.append(read_range)
        stack, view = self._tables.shards.stack, touched.participant.view
        if isinstance(view.contents, FullView):
            vals = {**view.contents.vals, **touched.written}
            size = len(vals) * FILTERED_ENTRY_BYTES
            for entry in await stack.compute_few(size, entries_within, touched.schema, vals, read_range):
                yield entry
            return
        own, upper = dict(touched.written), view.upper  # without an await since the range was recorded
        async with _snapshot_before(upper, view.session, (touched.schema.name, read_range)) as snapshot:
            async for entries in streamed(stack, touched.schema, snapshot, own, read_range):
                for entry in entries:
                    yield entry

    # --- writes ----------------------------------------------------------------------------------

    def put(self, table: Table[K, V], key: K, val: V) -> None:
        """Give `key` that value."""
        touched = self._of(table)
        touched.written.update([touched.schema.entry(key, val, self._size_max)])

    def put_many(self, table: Table[K, V], entries: GivenEntries[K, V]) -> None:
        """Give keys their values: a mapping, `(key, val)` pairs, or Arrow data."""
        touched = self._of(table)
        touched.written.update(touched.schema.entries(entries, self._size_max))

    def delete(self, table: Table[K, V], *keys: K) -> None:
        """Delete the existing ones of `keys`."""
        touched = self._of(table)
        touched.written.update(dict.fromkeys(touched.schema.key_texts(keys)))

    def append(self, writer: WriteHandle[Any, Any], rows: Any, diff: int = 1) -> None:
        """Append `(key, val)` or `(key, val, diff)` rows to a shard with a wall clock that is no table.
        The transaction raises `UpperMismatch` if the shard is closed."""
        self._check()
        session = session_of(self._checked(writer))
        tables = []
        for chunk in chunks_of(own_copy(rows)):
            tables.append(to_table(chunk, session.schema, columns=ROW, diff=diff))
            check_update_size(tables[-1], self._size_max)
        participant = ShardParticipant(session)
        self.appends[participant] = [*self.appends.get(participant, ()), *tables]

    # --- inside ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended:
            raise InvalidUsage(UsageKind.CLOSED, "the transaction has ended")

    def _of(self, table: Table[K, V]) -> Touched:
        self._check()
        if (touched := self._of_handles.get(id(table))) is not None and not is_closed(table):
            return touched
        schema = schema_of(table, self._tables)
        touched = self.touched.get(schema.name)
        if touched is None:
            touched = self.touched[schema.name] = self._of_handles[id(table)] = Touched(schema, table)
        elif touched.schema is not schema and touched.schema.identity != schema.identity:
            text = f"table {schema.name!r} is used with two types in one transaction"
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
        """Bring this table, and all tables that were read, to one moment, with `keys` in memory. The body
        runs again if earlier reads have changed. The values must be read without an await in between."""
        if touched.table is None:
            await touched.open()
            self._check()
        touched.keep(keys)
        every = self.touched.values()
        participants = [t.participant for t in every if t is touched or t.read or t.ranges]
        while True:
            await self._consistent_read.make(participants)
            self._check()
            missing = [(t, t.unknown(keys if t is touched else ())) for t in every]
            if not (jobs := [partial(t.fetch, unknown) for t, unknown in missing if unknown]):
                break
            await run_bounded(LOOKS_AT_ONCE, jobs)
        speculation = self._speculation_on(participants)
        for each in every:
            each.speculation = speculation
            each.check()

    def _speculation_on(self, participants: Collection[TableParticipant]) -> Speculation | None:
        """The speculation, if there is one and it shows one moment with these tables."""
        speculation = self._speculation
        if speculation is None or not (tables := speculation.refresh()):
            return None
        return speculation if self._consistent_read.holds({*tables, *participants}) else None

    # --- the end ---------------------------------------------------------------------------------

    def _close(self) -> None:
        """Release what it keeps in views."""
        self.ended = True
        for touched in self.touched.values():
            touched.close()

    @property
    def _writes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.appends or [touched for touched in self.touched.values() if touched.written])

    def _check_speculation(self) -> None:
        """`Conflicted` if a waiting operation changes the reads. The group commit would raise it later."""
        tables = [touched for touched in self.touched.values() if touched.read]
        speculation = self._speculation_on([touched.participant for touched in tables])
        if speculation is not None and not any(touched.unknown() for touched in tables):
            for touched in tables:
                touched.speculation = speculation
            _compare([(touched, touched.val_of, ()) for touched in tables])

    def _action(self, result: Any, error: Exception | None) -> Action:
        """The function that the group commit runs on the open tables: if all reads are still valid, it
        writes, or raises `error`."""
        tables = [touched for touched in self.touched.values() if touched.table is not None]

        def act(*cells: Cells) -> Any:
            _compare([(touched, own.get, own.before) for touched, own in zip(tables, cells, strict=True)])
            if error is not None:
                raise error
            for touched, own in zip(tables, cells, strict=True):
                own.written.update(touched.written)
            return result

        return act


def _compare(
    reads: Iterable[tuple[Touched, Callable[[str], str | None], Iterable[str]]],
) -> None:
    """`Conflicted` if reads have changed by these values and writes."""
    conflicts = [
        (touched.schema.name, key)
        for touched, val_of, more in reads
        for key in touched.conflicts(val_of, more)
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
    """The contents before `upper`, the frontier of a view; `RunAgain` if their history is gone."""
    if upper == minimum(None):
        yield None
        return
    try:
        snapshot = await session.snapshot(last_before(upper), wait=False)
    except SinceViolation as error:
        raise RunAgain([read]) from error
    async with snapshot:
        yield snapshot
