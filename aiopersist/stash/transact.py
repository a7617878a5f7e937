"""Read and change several tables at one moment: for changes that follow from a read.

1. Read all the tables, in one request: their contents, and the revision of each.
2. Let the caller's function change them in memory (`TableTransaction`).
3. Commit its changes, if every table still has that revision, also a table that was only read; else begin
   again. So a change always follows from the contents at the time of its write.

Changes are found by comparing stored texts: those that were read, and those of the tables at the end. So a
retraction always names a row that exists, whatever `__eq__` says, even if a codec writes one value in several
ways, and even if a value was changed in place.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, overload

from aiopersist.base.frontier import TIME_MAX, Antichain, int_time
from aiopersist.base.user_functions import call_plain
from aiopersist.stash import rules
from aiopersist.stash.collection import StashCollection, stored_of
from aiopersist.stash.errors import StashError
from aiopersist.stash.model import Move, Select, StoreChange, Stored, StoredRows
from aiopersist.stash.rows import Item, by_key, compute, contents_by_key
from aiopersist.stash.stash import Stash
from aiopersist.stash.table import TableTransaction
from aiopersist.stash.typed import KeyedItems, TypedCollection, keyed

T = TypeVar("T")
K1 = TypeVar("K1")
V1 = TypeVar("V1")
K2 = TypeVar("K2")
V2 = TypeVar("V2")
K3 = TypeVar("K3")
V3 = TypeVar("V3")


@overload
async def transact(
    stash: Stash, change: Callable[[TableTransaction[K1, V1]], T], table: TypedCollection[K1, V1], /
) -> T: ...
@overload
async def transact(
    stash: Stash,
    change: Callable[[TableTransaction[K1, V1], TableTransaction[K2, V2]], T],
    one: TypedCollection[K1, V1],
    two: TypedCollection[K2, V2],
    /,
) -> T: ...
@overload
async def transact(
    stash: Stash,
    change: Callable[[TableTransaction[K1, V1], TableTransaction[K2, V2], TableTransaction[K3, V3]], T],
    one: TypedCollection[K1, V1],
    two: TypedCollection[K2, V2],
    three: TypedCollection[K3, V3],
    /,
) -> T: ...
@overload
async def transact(stash: Stash, change: Callable[..., T], /, *tables: TypedCollection[Any, Any]) -> T: ...


async def transact(stash: Stash, change: Callable[..., T], /, *tables: TypedCollection[Any, Any]) -> T:
    """Call `change` with a `TableTransaction` of each table, all as they are at one moment, and make its
    changes durable at one moment; returns what `change` returned.

    If another append came in between, `change` is called again with the new contents: so it must be a
    function, not a coroutine, and have no other effects. An error that it raises ends the transaction, and
    nothing is written. Nothing is appended to a table that it did not change; a value that it changed in
    place is changed. `StashError` if two keys of a table would be stored as one. A table in which nothing was
    sealed is empty. `change` itself must keep a rule of uniqueness. Two requests; one without changes."""
    stash._session.writing()
    collections = [await table.get(stash) for table in tables]
    if len({c.id for c in collections}) < len(collections):
        raise StashError("a table is named twice in one transaction")
    async with AsyncExitStack() as turns:
        for c in sorted(collections, key=lambda c: c.id):  # one order: no deadlock
            await turns.enter_async_context(stash._turns[c.id])
        while True:
            await stash._session.yield_to_others(c.id for c in collections)
            done, result = await _attempt(stash, change, collections)
            if done:
                return result


async def _attempt(
    stash: Stash, change: Callable[..., T], collections: Sequence[StashCollection[Any, Any]]
) -> tuple[bool, T]:
    """Whether the transaction is done, and what `change` returned."""
    with stash._scope.call():
        read = [await _begun(c, stored) for c, stored in await _load(stash, collections)]
        result = call_plain(change, *(table.transaction for table in read))
        moves = {table.c.id: move for table in read if (move := await _move(table)) is not None}
        expected = {table.c.id: table.stored.revision for table in read}
        return not moves or await stash._session.attempt(StoreChange(expected, moves)), result


class _ReadTable(NamedTuple):
    """A table as it was read, and the transaction that changes it."""

    c: StashCollection[Any, Any]
    stored: Stored
    contents: dict[str, Item]
    """By the texts of the keys."""
    transaction: TableTransaction[Any, Any]


async def _load(
    stash: Stash, collections: Sequence[StashCollection[Any, Any]]
) -> list[tuple[StashCollection[Any, Any], Stored]]:
    loaded = await stash._session.load(Select(tuple(c.id for c in collections)))
    return [
        (c, stored_of(c, [stored for stored in loaded.collections if stored.id == c.id])) for c in collections
    ]


async def _begun(c: StashCollection[Any, Any], stored: Stored) -> _ReadTable:
    """The contents at upper, the time of the change, with the updates that wait there to be sealed."""
    upper = int_time(stored.frontiers.upper)
    time = TIME_MAX if upper is None else upper

    def begun() -> _ReadTable:
        table = contents_by_key(stored.rows, c.schema, time, c.name)
        return _ReadTable(c, stored, table, TableTransaction(by_key(table, c.name)))

    return await compute(len(stored.rows), begun)


async def _move(table: _ReadTable) -> Move | None:
    """The rows to append; `None` for no change."""
    c, now = table.c, table.stored.frontiers
    pairs = table.transaction._end()
    rows = await compute(len(pairs) + len(table.contents), partial(_changes, table, pairs))
    if not rows:
        return None
    time = rules.next_time(c.name, now)
    at, beyond = Antichain(time), Antichain(time + 1)
    frontiers = rules.appended(c.name, now, at, beyond, at, [time])
    return Move(frontiers, replace(rows, times=[time] * len(rows)))


def _changes(table: _ReadTable, pairs: list[tuple[Any, Any]]) -> StoredRows:
    """The updates from the stored pairs to these; `StashError` if two of their keys are stored as one."""
    c, before = table.c, table.contents
    now = keyed(pairs, c.schema, c.name).items
    if len(now) < len(pairs):
        raise StashError(f"collection {c.name!r}: two keys of the table would be stored as one")
    removed = {text: item for text, item in before.items() if text not in now or now[text].text != item.text}
    added = {text: item for text, item in now.items() if text not in before or before[text].text != item.text}
    return KeyedItems(removed).rows(-1) + KeyedItems(added).rows(1)
