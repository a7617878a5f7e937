"""A collection as a constant of the program: opened when used, read and written as a table with a key.

Each write reads contents and frontiers of one moment, makes one batch of what is to change, and appends it;
if somebody else's append came first it does so again, on what is there then.
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar, overload

from aiopersist.data.codec import Schema
from aiopersist.frontier import Antichain
from aiopersist.stash.collection import AppendBatch, StashCollection, check_absence, check_name
from aiopersist.stash.errors import NothingSealed, StaleLower
from aiopersist.stash.rows import encode_key
from aiopersist.stash.stash import Stash, batch_at, one_of_key, one_per_key

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

Changes = list[tuple[Any, Any, int]]
"""`(key, val, diff)`"""


class TypedCollection(Generic[K, V]):
    """A collection by name and types, with at most one val per key. Works with every stash.

    `InvalidUsage` if the vals admit `None`, which says "absent" here, `TypeError` for types that cannot be
    stored. Reads raise `NothingSealed` until the first write."""

    @overload
    def __init__(self, name: str, key: type[K], val: type[V]) -> None: ...
    @overload
    def __init__(self: "TypedCollection[Any, Any]", name: str, key: Any, val: Any) -> None: ...

    def __init__(self, name: str, key: Any, val: Any) -> None:
        self.name = check_name(name)
        self._schema: Schema[K, V, Any] = Schema(key, val)
        check_absence(name, self._schema)

    def __repr__(self) -> str:
        return f"<TypedCollection {self.name!r}>"

    async def get(self, stash: Stash) -> StashCollection[K, V]:
        """The collection in that stash; created if it is not there."""
        return await stash._collection(self.name, self._schema)

    async def upper(self, stash: Stash) -> Antichain:
        """Times before it are complete."""
        return await stash.upper(await self.get(stash))

    async def peek_one(self, stash: Stash) -> dict[K, V]:
        """All keys and their vals, in key order."""
        return await stash.peek_one(await self.get(stash))

    async def peek_key_one(self, stash: Stash, key: K) -> V | None:
        """The val of a key, or `None`."""
        return await stash.peek_key_one(await self.get(stash), key)

    async def insert_without_overwrite(self, stash: Stash, key: K, val: V) -> V:
        """The val that the key has afterwards: the one it had, or else `val`. One append, none if the key is
        there."""

        def plan(there: V | None) -> tuple[Changes | None, V]:
            return ([(key, val, 1)], val) if there is None else (None, there)

        return await self._write_key(stash, key, plan)

    async def insert_many_without_overwrite(self, stash: Stash, entries: Iterable[tuple[K, V]]) -> dict[K, V]:
        """The vals that the given keys have afterwards; of a key given twice the first entry counts. One
        append, none if nothing is new."""
        wanted: dict[K, V] = {}
        for key, val in entries:
            wanted.setdefault(key, val)

        def plan(there: dict[K, V]) -> tuple[Changes | None, dict[K, V]]:
            new: Changes = [(key, val, 1) for key, val in wanted.items() if key not in there]
            return new or None, {key: there.get(key, val) for key, val in wanted.items()}

        return await self._write(stash, plan)

    async def upsert_key(self, stash: Stash, key: K, val: V) -> None:
        """Give the key that val. One append."""

        def plan(there: V | None) -> tuple[Changes | None, None]:
            old: Changes = [] if there is None else [(key, there, -1)]
            return [*old, (key, val, 1)], None

        await self._write_key(stash, key, plan)

    async def upsert(self, stash: Stash, entries: Iterable[tuple[K, V]]) -> None:
        """Give the keys those vals; of a key given twice the last entry counts. One append."""
        wanted = dict(entries)

        def plan(there: dict[K, V]) -> tuple[Changes | None, None]:
            old: Changes = [(key, there[key], -1) for key in wanted if key in there]
            return [*old, *((key, val, 1) for key, val in wanted.items())], None

        await self._write(stash, plan)

    async def delete(self, stash: Stash, predicate: Callable[[K, V], bool]) -> list[tuple[K, V]]:
        """Delete and return the entries for which `predicate` holds, in key order. One append, none if there
        are none."""

        def plan(there: dict[K, V]) -> tuple[Changes | None, list[tuple[K, V]]]:
            gone = [(key, val) for key, val in there.items() if predicate(key, val)]
            changes: Changes = [(key, val, -1) for key, val in gone]
            return changes or None, gone

        return await self._write(stash, plan)

    # --- inside ----------------------------------------------------------------------------------

    async def _write(self, stash: Stash, plan: Callable[[dict[K, V]], tuple[Changes | None, T]]) -> T:
        """Change the table as `plan` says: from its contents to changes, `None` for no append, and what to
        return."""
        return await self._append(stash, None, lambda c, contents: plan(one_per_key(c, contents)))

    async def _write_key(
        self, stash: Stash, key: K, plan: Callable[[V | None], tuple[Changes | None, T]]
    ) -> T:
        """The same from the val of one key."""
        c = await self.get(stash)
        text = encode_key(key, c.schema, c.name)
        return await self._append(stash, text, lambda c, contents: plan(one_of_key(c.name, key, contents)))

    async def _append(
        self,
        stash: Stash,
        key: str | None,
        plan: Callable[[StashCollection[K, V], list[tuple[K, V, int]]], tuple[Changes | None, T]],
    ) -> T:
        c = await self.get(stash)
        while True:
            try:
                now, contents = await stash._peek(c, key)
            except NothingSealed:
                await _retried(stash, await stash.make_batch(c))
                continue
            changes, result = plan(c, contents)
            if changes is None:
                return result
            batch = batch_at(c, now)
            for change in changes:
                c.append_to_batch(batch, *change)
            if await _retried(stash, batch):
                return result


async def _retried(stash: Stash, batch: AppendBatch) -> bool:
    """Append; whether it was the first at that upper."""
    try:
        await stash.append([batch])
    except StaleLower:
        return False
    return True
