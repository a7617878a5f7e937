"""A collection as a constant of the program: opened when used, read and written as a table with a key.

Each write reads contents and frontiers of one moment, makes one batch of changes, and appends it; if another
append came first, it begins again.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, cast, overload

from aiopersist.base.frontier import Antichain
from aiopersist.base.user_functions import call_plain
from aiopersist.data.types.schema import Schema
from aiopersist.stash.collection import StashCollection, as_tuple, check_absence, check_keys, check_name
from aiopersist.stash.errors import NothingSealed, StaleLower
from aiopersist.stash.model import StoredRows
from aiopersist.stash.rows import Item, compute, encode
from aiopersist.stash.stash import Stash

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

Table = dict[str, Item]
"""Keys and values by the texts of the keys."""


class TypedCollection(Generic[K, V]):
    """A collection by name and types, with at most one value per key. Works with every stash.

    `InvalidUsage` if the values admit `None`, which says "absent" here; `TypeError` for types that cannot be
    stored. Reads raise `NothingSealed` until the first write."""

    @overload
    def __init__(self, name: str, key: type[K], val: type[V]) -> None: ...
    @overload
    def __init__(self: "TypedCollection[Any, Any]", name: str, key: Any, val: Any) -> None: ...

    def __init__(self, name: str, key: Any, val: Any) -> None:
        self.name = check_name(name)
        self._schema: Schema[K, V, Any] = Schema(key, val)
        check_absence(name, self._schema)
        check_keys(name, self._schema)

    def __repr__(self) -> str:
        return f"<TypedCollection {self.name!r}>"

    async def get(self, stash: Stash) -> StashCollection[K, V]:
        """The collection in that stash; creates it if it is not there."""
        return await stash._collection(self.name, self._schema, is_table=True)

    async def upper(self, stash: Stash) -> Antichain:
        """Times before it are complete."""
        return await stash.upper(await self.get(stash))

    async def peek_one(self, stash: Stash) -> dict[K, V]:
        """All keys and their values, in key order."""
        return await stash.peek_one(await self.get(stash))

    async def peek_key_one(self, stash: Stash, key: K) -> V | None:
        """The value of a key, or `None`."""
        return await stash.peek_key_one(await self.get(stash), key)

    async def insert_without_overwrite(self, stash: Stash, key: K, val: V) -> V:
        """Insert the entry, unless the key is there. Returns the value that the key has afterwards. One
        append; none if the key is there."""
        new_items = await self._keyed([(key, val)])

        def plan(table: Table) -> tuple[StoredRows | None, V]:
            return (new_items.rows(1), val) if not table else (None, table[new_items.only].val)

        return await self._append(stash, plan, key=new_items.only)

    async def insert_many_without_overwrite(
        self, stash: Stash, entries: Iterable[tuple[K, V]] | Mapping[K, V]
    ) -> dict[K, V]:
        """Insert the entries whose keys are not there; of a key given twice the first entry counts. Returns
        the values that the given keys have afterwards. One append; none if no key is new."""
        new_items = await self._keyed(_pairs(entries), first=True)

        def plan(table: Table) -> tuple[StoredRows | None, dict[K, V]]:
            new = {text: item for text, item in new_items.items.items() if text not in table}
            return (
                KeyedItems(new).rows(1) if new else None,
                {item.key: table.get(text, item).val for text, item in new_items.items.items()},
            )

        return await self._append(stash, plan)

    async def upsert_key(self, stash: Stash, key: K, val: V) -> None:
        """Give the key that value. One append."""
        new_items = await self._keyed([(key, val)])
        await self._append(stash, lambda table: (new_items.instead_of(table), None), key=new_items.only)

    async def upsert(self, stash: Stash, entries: Iterable[tuple[K, V]] | Mapping[K, V]) -> None:
        """Give the keys those values; of a key given twice the last entry counts. One append."""
        new_items = await self._keyed(_pairs(entries))
        await self._append(stash, lambda table: (new_items.instead_of(table), None))

    async def delete(self, stash: Stash, predicate: Callable[[K, V], bool]) -> list[tuple[K, V]]:
        """Delete and return the entries for which `predicate` is true, in key order. One append; none if
        nothing matches."""

        def plan(table: Table) -> tuple[StoredRows | None, list[tuple[K, V]]]:
            gone = {text: item for text, item in table.items() if call_plain(predicate, item.key, item.val)}
            return KeyedItems(gone).rows(-1) if gone else None, [(key, val) for key, val, _ in gone.values()]

        return await self._append(stash, plan)

    # --- inside ----------------------------------------------------------------------------------

    async def _keyed(self, pairs: list[Any], *, first: bool = False) -> "KeyedItems":
        """The pairs `(key, val)`, checked; of several of a key the last, or the first."""
        return await compute(len(pairs), partial(keyed, pairs, self._schema, self.name, first=first))

    async def _append(
        self, stash: Stash, plan: Callable[[Table], tuple[StoredRows | None, T]], *, key: str | None = None
    ) -> T:
        """Change the table, or only one key. From the contents, `plan` gives rows (their times do not
        matter), or `None` for no append, and the result."""
        c = await self.get(stash)
        async with stash._turns[c.id]:
            while True:
                try:
                    now, table = await stash._contents(c, key)
                except NothingSealed:
                    now, table = (await stash._head(c)).frontiers, None
                rows, result = (StoredRows(), None) if table is None else plan(table)
                if rows is None:
                    return cast(T, result)
                try:
                    await stash._append_rows(c, now, rows)
                except StaleLower:  # another opener's append came first
                    continue
                if table is not None:
                    return cast(T, result)


@dataclass(frozen=True)
class KeyedItems:
    """Entries by the texts of their keys."""

    items: Table

    @property
    def only(self) -> str:
        """The text of the only key."""
        (text,) = self.items
        return text

    def rows(self, diff: int) -> StoredRows:
        """An update for each entry; the append sets their time."""
        count = len(self.items)
        return StoredRows(
            list(self.items), [item.text for item in self.items.values()], [0] * count, [diff] * count
        )

    def instead_of(self, table: Table) -> StoredRows:
        """These entries, after retractions of the values that their keys have."""
        return KeyedItems({text: table[text] for text in self.items if text in table}).rows(-1) + self.rows(1)


def keyed(pairs: list[Any], schema: Schema[Any, Any, Any], name: str, *, first: bool = False) -> KeyedItems:
    """The pairs `(key, val)`, checked; of several of a key the last, or the first."""
    rows = encode([(pair, 0, 1) for pair in pairs], schema, name)
    items: Table = {}
    for (key, val), key_text, val_text in zip(pairs, rows.keys, rows.vals, strict=True):
        if not first or key_text not in items:
            items[key_text] = Item(key, val, val_text)
    return KeyedItems(items)


def _pairs(entries: Any) -> list[Any]:
    return list(map(as_tuple, entries.items() if isinstance(entries, Mapping) else entries))
