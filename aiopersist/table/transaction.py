"""Transactions: a function of the user reads and writes tables, and all of it happens at one moment.

The body runs against the views. It reads at one moment (`cut.py`), and its writes are kept. At the end the
group commit applies them, if all that the body read is still so: the keys, and the ranges. Else it is a
conflict, and the body runs again. Every table that was read or written takes part in the commit of a
transaction that writes, so the order of commits is the order of times.

A body that wrote nothing, or raised, is answered only if what it read was so at a look that began after it.
This is optimistic concurrency control (Kung and Robinson, 1981) with backward validation, by predicates for
ranges.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from aiopersist.data.jsonable import column_from_texts
from aiopersist.data.lazy import pa
from aiopersist.data.updates.consolidate import contents
from aiopersist.data.updates.convert import ROW, chunks_of, to_table
from aiopersist.data.updates.given import taken
from aiopersist.data.updates.sizes import check_update_size
from aiopersist.errors import InvalidUsage, KeyExists, UsageKind, shown
from aiopersist.table.cut import Cut
from aiopersist.table.filters import condition
from aiopersist.table.kind import Kind
from aiopersist.table.member import Member, PlainMember, TableMember
from aiopersist.table.open import OpenTable, OpenTables
from aiopersist.table.operation import Action, Cells, Conflicted
from aiopersist.table.table import Table, kind_of, opened
from aiopersist.write.handle import WriteHandle, session_of

K = TypeVar("K")
V = TypeVar("V")

ENTRY_BYTES = 64  # of an entry that is filtered and sorted, about


class RunAgain(BaseException):
    """Ends a body that has read what is no longer so. No `Exception`, so that the body does not catch it."""


class ReadRange(NamedTuple):
    """A range of keys that a transaction read."""

    start: Any
    stop: Any
    prefix: Any


@dataclass(eq=False)
class Touched:
    """What a transaction has read and written of one table."""

    kind: Kind[Any, Any]
    handle: Table[Any, Any]
    table: OpenTable | None = None
    """Opened by the first read, or at the end."""
    version: int = 0
    """Of the view when the reads were last known to be so."""
    read: dict[str, str | None] = field(default_factory=dict)
    ranges: list[ReadRange] = field(default_factory=list)
    written: dict[str, str | None] = field(default_factory=dict)

    async def open(self) -> OpenTable:
        """The table."""
        if self.table is None:
            table = await opened(self.handle)
            self.version, self.table = table.view.version, table
        return self.table

    @property
    def member(self) -> TableMember:
        assert self.table is not None
        return self.table.member

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
        return bool(entries) and _within(self.kind, entries, wanted).num_rows > 0

    def check(self) -> None:
        """`RunAgain` unless what was read is so in the view as it is now."""
        if self.table is not None and self.version != self.table.view.version:
            if self.conflicts(self.table.view.vals.get):
                raise RunAgain
            self.version = self.table.view.version


class Transaction:
    """What a body is given. Its reads see its own writes. It ends with the body."""

    def __init__(self, tables: OpenTables, cut: Cut) -> None:
        self._tables = tables
        self._cut = cut
        self._size_max = tables.shards.stack.settings.update_size_max
        self.touched: dict[str, Touched] = {}
        """By the name of the table."""
        self.plain: dict[Member, Sequence[pa.Table]] = {}
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
        """The val of `key`, or `None`."""
        return (await self.get_many(table, [key])).get(key)

    async def get_many(self, table: Table[K, V], keys: Iterable[K]) -> dict[K, V]:
        """The vals of those of `keys` that are there."""
        touched, wanted = self._of(table), list(keys)
        texts = touched.kind.key_texts(wanted) if wanted else []
        await self._read(touched)
        vals = [(key, _val(touched, text)) for key, text in zip(wanted, texts, strict=True)]
        return {key: touched.kind.val(val) for key, val in vals if val is not None}

    async def insert(self, table: Table[K, V], key: K, val: V) -> None:
        """Give `key` that val; `KeyExists` if it has one."""
        touched = self._of(table)
        text, val_text = touched.kind.entry(key, val, self._size_max)
        await self._read(touched)
        if _val(touched, text) is not None:
            raise KeyExists(key, table=table.name)
        touched.written[text] = val_text

    async def items(
        self, table: Table[K, V], start: K | None = None, stop: K | None = None, prefix: Any = None
    ) -> AsyncIterator[tuple[K, V]]:
        """The entries with `start <= key < stop`, in key order; `prefix`: those whose keys begin with it. All
        are of the moment of the first one. Costs time for each key of the table."""
        touched, wanted = self._of(table), ReadRange(start, stop, prefix)
        _condition(touched.kind, wanted)
        await self._read(touched)
        touched.ranges.append(wanted)
        vals = {**touched.member.vals, **touched.written}
        stack = self._tables.shards.stack
        for entry in await stack.compute_few(len(vals) * ENTRY_BYTES, _entries, touched.kind, vals, wanted):
            yield entry

    # --- writes ----------------------------------------------------------------------------------

    def put(self, table: Table[K, V], key: K, val: V) -> None:
        """Give `key` that val."""
        touched = self._of(table)
        touched.written.update([touched.kind.entry(key, val, self._size_max)])

    def put_many(self, table: Table[K, V], entries: Any) -> None:
        """Give keys their vals: a mapping, `(key, val)` pairs, or Arrow data."""
        touched = self._of(table)
        touched.written.update(touched.kind.entries(entries, self._size_max))

    def delete(self, table: Table[K, V], *keys: K) -> None:
        """Delete those of `keys` that are there."""
        touched = self._of(table)
        touched.written.update(dict.fromkeys(touched.kind.key_texts(keys)))

    def append(self, writer: WriteHandle[Any, Any], rows: Any, diff: int = 1) -> None:
        """Append `(key, val)` or `(key, val, diff)` rows to a plain shard with a wall clock."""
        self._check()
        session = session_of(self._checked(writer))
        schema = session.schema
        tables = []
        for chunk in chunks_of(taken(rows)):
            tables.append(to_table(chunk, schema, columns=ROW, diff=diff))
            check_update_size(tables[-1], self._size_max)
        member = PlainMember(session)
        self.plain[member] = [*self.plain.get(member, ()), *tables]

    # --- inside ----------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended:
            raise InvalidUsage(UsageKind.CLOSED, "the transaction has ended")

    def _of(self, table: Table[K, V]) -> Touched:
        self._check()
        kind = kind_of(table, self._tables)
        touched = self.touched.setdefault(kind.name, Touched(kind, table))
        if touched.kind.schema != kind.schema:
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
        if not shard.state.is_wall:
            text = f"{shard.label} has a logical clock: a transaction needs writers with clock='wall'"
            raise InvalidUsage(UsageKind.INVALID_CLOCK, text, shard_id=shard.id)
        return writer

    async def _read(self, touched: Touched) -> None:
        """Bring all tables that were read, and this one, to one moment. What was read is still so, or the
        body runs again. After it nothing is awaited before the vals are read."""
        await touched.open()
        self._check()
        members = [t.member for t in self.touched.values() if t is touched or t.read or t.ranges]
        while True:
            await self._cut.make(members)
            for some in self.touched.values():
                some.check()
            if self._cut.holds(members):
                return

    # --- the end ---------------------------------------------------------------------------------

    @property
    def writes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.plain) or any(touched.written for touched in self.touched.values())

    def action(self, result: Any, error: Exception | None) -> Action:
        """What the group commit does: if all that was read is still so, it writes, or raises `error`."""
        touched = list(self.touched.values())

        def act(*cells: Cells) -> Any:
            conflicts = [
                (some.kind.name, key)
                for some, of_table in zip(touched, cells, strict=True)
                for key in some.conflicts(of_table.get, of_table.before)
            ]
            if conflicts:
                raise Conflicted(conflicts)
            if error is not None:
                raise error
            for some, of_table in zip(touched, cells, strict=True):
                of_table.written.update(some.written)
            return result

        return act


def _val(touched: Touched, key: str) -> str | None:
    """The val of a key as the transaction sees it."""
    if key in touched.written:
        return touched.written[key]
    touched.read[key] = val = touched.member.vals.get(key)
    return val


def _condition(kind: Kind[Any, Any], wanted: ReadRange) -> Any:
    return condition(kind.schema, start=wanted.start, stop=wanted.stop, prefix=wanted.prefix, where=None)


def _within(kind: Kind[Any, Any], entries: Mapping[str, object], wanted: ReadRange) -> pa.Table:
    """The keys of `entries` within the range, as a column, and their numbers."""
    keys = column_from_texts(list(entries), kind.schema.key.codec.arrow_type)
    fields = [kind.schema.arrow_schema.field("key"), pa.field("number", pa.int64())]
    table = pa.table([keys, pa.array(range(len(entries)), pa.int64())], pa.schema(fields))
    chosen = _condition(kind, wanted)
    return table if chosen is None else table.filter(chosen)


def _entries(kind: Kind[K, V], vals: Mapping[str, str | None], wanted: ReadRange) -> list[tuple[K, V]]:
    """The entries within the range, in key order."""
    there = {key: val for key, val in vals.items() if val is not None}
    found = _within(kind, there, wanted)
    texts = list(there)
    chosen = {texts[number]: there[texts[number]] for number in found.column("number").to_pylist()}
    if not chosen:
        return []
    table = contents(kind.updates(chosen, dict.fromkeys(chosen), 0), kind.schema)
    keys, some = (field.decode(table.column(name)) for name, field in kind.columns())
    return list(zip(keys, some, strict=True))
