"""The calls of a stash. Each is one transaction: plan with `rules`, commit through the `session`."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, overload

from aiopersist.base.errors import shown
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Root, Scope
from aiopersist.data.types.schema import Schema
from aiopersist.stash import rules
from aiopersist.stash.collection import (
    AppendBatch,
    Entry,
    Ready,
    StashCollection,
    TableChanged,
    advance_of,
    batch_at,
    check_absence,
    check_keys,
    check_name,
    checked,
    int_frontier,
    listed,
    stored_of,
)
from aiopersist.stash.errors import StashError
from aiopersist.stash.migrate import migrate
from aiopersist.stash.model import Codecs, Frontiers, Move, Select, StoreChange, Stored, StoredRows
from aiopersist.stash.rows import (
    Item,
    by_key,
    check_codecs,
    check_table,
    codecs,
    compute,
    contents_by_key,
    decode,
    decode_at,
    encode,
    encode_key,
)
from aiopersist.stash.session import StashSession

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


class Stash(Root):
    """Named collections, read whole and written in transactions. Serves many tasks at once; their changes
    take turns.

    Every call is one transaction and, as a rule, one request. A change is durable when its call returns; the
    change of a cancelled call may still happen. A refused call raises `StashError` and has changed nothing;
    with `is_unrecoverable` once another opener has taken over.
    """

    def __init__(
        self, session: StashSession, scope: Scope, release: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._session = session
        self._scope = scope
        self._release = release
        self._collections: dict[int, StashCollection[Any, Any]] = {}
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        """A lock per collection, by id, for tasks that read it and then append to it. Without it, the append
        of one such task would make those of all others begin again."""

    async def aclose(self) -> None:
        """Close it; idempotent. A change under way finishes first, also if the caller is cancelled. Calls
        that wait end with `CLOSED`, also the call that made that change."""
        self._scope.close()
        await self._close_once(self._released)

    async def confirm_leadership(self) -> None:
        """Raise an unrecoverable `StashError` if another opener has taken over. Does nothing for an opener
        that cannot be fenced. One request."""
        with self._scope.call():
            if self._session.can_be_fenced:
                await self._session.load(Select(ids=(), rows=False))

    async def migrate(self, steps: Sequence["Step"]) -> int:
        """Bring the stash from its version (0 for a new one) to `len(steps)`, and return that. Step `i`, an
        `async def step(tx)`, leads from version `i` to `i + 1`; `tx` has all calls of a stash. A step and its
        version are one transaction: if the step fails, nothing changes. If another opener changes the stash
        meanwhile, the step runs again, so it must have no other effects than those on `tx`."""
        with self._scope.call():
            return await migrate(self._session, tuple(steps), StashTransaction)

    # --- collections -----------------------------------------------------------------------------

    @overload
    async def collection(self, name: str, key: type[K], val: type[V]) -> StashCollection[K, V]: ...
    @overload
    async def collection(self, name: str, key: Any, val: Any) -> StashCollection[Any, Any]: ...

    async def collection(self, name: str, key: Any, val: Any) -> StashCollection[Any, Any]:
        """The collection of that name; created empty, with `since = upper = {0}`, if it is not there.
        `CodecMismatch` if it is stored with other types, `TypeError` for types that cannot be stored."""
        return await self._collection(check_name(name), Schema(key=key, val=val))

    async def _collection(
        self, name: str, schema: Schema[K, V, Any], *, is_table: bool = False
    ) -> StashCollection[K, V]:
        """One request the first time: the name, id and codecs of a collection never change."""
        with self._scope.call():
            for opened in self._collections.values():
                if opened.name == name and opened.schema == schema:
                    return self._opened(opened.id, name, schema, opened.codecs, is_table)
            while True:
                loaded = await self._session.load(Select(name=name, rows=False))
                if loaded.collections:
                    (stored,) = loaded.collections
                    check_codecs(name, stored.codecs, schema)
                    return self._opened(stored.id, name, schema, stored.codecs, is_table)
                await self._create(name, schema)

    async def since(self, c: StashCollection[K, V]) -> Antichain:
        """Times before it are advanced to it."""
        return (await self._head(c)).frontiers.since

    async def upper(self, c: StashCollection[K, V]) -> Antichain:
        """Times before it are complete."""
        return (await self._head(c)).frontiers.upper

    # --- reading ---------------------------------------------------------------------------------

    async def iter(self, c: StashCollection[K, V]) -> list[Entry[K, V]]:
        """All entries `((key, val), time, diff)`, consolidated, in the order of (key, value, time). Times are
        at or beyond since, and may be beyond upper. `StashError` if since is empty."""
        with self._scope.call():
            stored = await self._load(c)
            since = rules.readable_since(c.name, stored.frontiers)
            return await compute(len(stored.rows), partial(decode, stored.rows, c.schema, since))

    async def iter_key(self, c: StashCollection[K, V], key: K) -> list[tuple[V, int, int]]:
        """The entries of a key: `(val, time, diff)`, in the order of (value, time)."""
        with self._scope.call():
            stored = await self._load(c, encode_key(key, c.schema, c.name))
            since = rules.readable_since(c.name, stored.frontiers)
            entries = await compute(len(stored.rows), partial(decode, stored.rows, c.schema, since))
            return [(val, time, diff) for (_, val), time, diff in entries]

    async def peek_timestamp(self, c: StashCollection[K, V]) -> int:
        """The last sealed time; `NothingSealed` if no sealed time can be read."""
        return rules.last_sealed(c.name, (await self._head(c)).frontiers)

    async def peek(self, c: StashCollection[K, V]) -> list[tuple[K, V, int]]:
        """The contents at the last sealed time: `(key, val, diff)` in order, consolidated."""
        with self._scope.call():
            stored = await self._load(c)
            time = rules.last_sealed(c.name, stored.frontiers)
            return await compute(len(stored.rows), partial(decode_at, stored.rows, c.schema, time))

    async def peek_one(self, c: StashCollection[K, V]) -> dict[K, V]:
        """`peek` as a dict, in key order; `StashError` if a key is there twice or a diff is not 1."""
        checked(c)
        check_keys(c.name, c.schema)
        _, table = await self._contents(c)
        return by_key(table, c.name)

    async def peek_key_one(self, c: StashCollection[K, V], key: K) -> V | None:
        """The value of a key at the last sealed time; `None` if the key is absent, `StashError` if it has
        several values or a diff is not 1. Other keys do not matter."""
        checked(c)
        check_absence(c.name, c.schema)
        text = encode_key(key, c.schema, c.name)
        _, table = await self._contents(c, text)
        return table[text].val if table else None

    # --- writing ---------------------------------------------------------------------------------

    async def update(self, c: StashCollection[K, V], data: tuple[K, V], time: int, diff: int) -> None:
        """Add one entry; its time must be at or beyond upper."""
        await self.update_many(c, [(data, time, diff)])

    async def update_many(self, c: StashCollection[K, V], entries: Iterable[Entry[K, V]]) -> None:
        """Add entries as `iter` gives them, all or none; every time must be at or beyond upper."""
        with self._scope.call():
            self._session.writing()
            rows = await self._encoded(listed(entries), checked(c))
            if rows:
                await self._moves(
                    [c], lambda now, _: Move(rules.updated(c.name, now.frontiers, rows.times), rows)
                )

    async def seal(self, c: StashCollection[K, V], upper: Antichain | Time) -> None:
        """Advance upper; it may stay, but not go back."""
        await self.seal_batch([(c, upper)])

    async def compact(self, c: StashCollection[K, V], since: Antichain | Time) -> None:
        """Advance since, at most to upper: from now on earlier times are advanced to it."""
        await self.compact_batch([(c, since)])

    async def consolidate(self, c: StashCollection[K, V]) -> None:
        """Sum equal entries in the tables, and delete those that sum to zero; delete all, once since is
        empty. Readers see no difference."""
        await self.consolidate_batch([c])

    async def seal_batch(self, seals: Iterable[tuple[StashCollection[Any, Any], Antichain | Time]]) -> None:
        """Seal several in order, in one transaction: if one fails, none is sealed."""
        await self._advance(seals, rules.sealed)

    async def compact_batch(
        self, compactions: Iterable[tuple[StashCollection[Any, Any], Antichain | Time]]
    ) -> None:
        """Compact several in order, in one transaction: if one fails, none is compacted."""
        await self._advance(compactions, rules.compacted)

    async def consolidate_batch(self, collections: Iterable[StashCollection[Any, Any]]) -> None:
        """Consolidate several in order."""
        with self._scope.call():
            self._session.writing()
            for c in tuple(collections):
                await self._load(c, rows=False)
                await self._session.consolidate(c.id)

    async def append(self, batches: Iterable[AppendBatch]) -> None:
        """Append to several collections: all of it happens, or nothing. Each batch's `lower` must be the
        upper of its collection (else `StaleLower`), and its entries at or beyond `lower`; then upper becomes
        `upper`, and since becomes `compact`. A batch of a table must leave one value per key. Call
        `collection` on this stash for each before. One request, for a few thousand entries; none for no
        batches."""
        with self._scope.call():
            items = [(batch, self._collection_of(batch), listed(batch.entries)) for batch in batches]
            if not items:
                return
            self._session.writing()
            collections = [c for _, c, _ in items]
            if twice := [name for name, times in Counter(c.name for c in collections).items() if times > 1]:
                raise StashError(f"collection {twice[0]!r}: it is named twice in one append")
            bounds = [tuple(map(int_frontier, (b.lower, b.upper, b.compact))) for b, _, _ in items]
            encoded = [await self._encoded(entries, c) for _, c, entries in items]
            ready = dict(zip(collections, zip(bounds, encoded, strict=True), strict=True))
            tables = {c: b._base for b, c, _ in items if b._base is not None and b._base.id == c.id}
            await self._append_checked(ready, tables)

    async def make_batch(
        self, c: StashCollection[K, V], upper: Antichain | Time | None = None
    ) -> AppendBatch:
        """See `StashCollection.make_batch`."""
        with self._scope.call():
            return batch_at(c, await self._load(c, rows=checked(c).is_table), upper)

    # --- inside ----------------------------------------------------------------------------------

    async def _released(self) -> None:
        if self._release is not None:
            await self._release()

    def _opened(
        self, cid: int, name: str, schema: Schema[K, V, Any], codecs: Codecs, is_table: bool
    ) -> StashCollection[K, V]:
        collection = self._collections[cid] = StashCollection(cid, name, schema, codecs, is_table=is_table)
        return collection

    async def _create(self, name: str, schema: Schema[Any, Any, Any]) -> None:
        """Create it, unless another opener has created it meanwhile."""
        if self._session.opener is None:
            raise StashError(f"collection {name!r}: it is not there, and the stash was opened read-only")
        loaded = await self._session.load(Select(rows=False))
        cid = 1 + max((stored.id for stored in loaded.collections), default=0)
        await self._session.attempt(StoreChange({}, {}, created=(Stored(cid, name, codecs(schema)),)))

    async def _moves(
        self,
        collections: Sequence[StashCollection[Any, Any]],
        move: Callable[[Stored, StashCollection[Any, Any]], Move],
    ) -> None:
        def plan(seen: Mapping[int, Stored]) -> StoreChange:
            found_by_id = {c.id: stored_of(c, [seen[c.id]] if c.id in seen else []) for c in collections}
            moves = {c.id: move(found_by_id[c.id], c) for c in collections}
            return StoreChange({cid: stored.revision for cid, stored in found_by_id.items()}, moves)

        await self._session.change([c.id for c in collections], plan)

    async def _advance(
        self,
        steps: Iterable[tuple[StashCollection[Any, Any], Antichain | Time]],
        rule: Callable[[str, Frontiers, Antichain], Frontiers],
    ) -> None:
        """One transaction for all: if one step fails, none is applied."""
        with self._scope.call():
            self._session.writing()
            advances = [advance_of(step) for step in steps]
            if not advances:
                return

            def move(stored: Stored, c: StashCollection[Any, Any]) -> Move:
                now = stored.frontiers
                for other, time in advances:
                    now = rule(c.name, now, time) if other.id == c.id else now
                return Move(now)

            await self._moves([c for c, _ in advances], move)

    async def _contents(
        self, c: StashCollection[Any, Any], key: str | None = None
    ) -> tuple[Frontiers, dict[str, Item]]:
        """The contents at the last sealed time, all or those of the key with that text, and the frontiers of
        the same moment."""
        with self._scope.call():
            stored = await self._load(c, key)
            time = rules.last_sealed(c.name, stored.frontiers)
            work = partial(contents_by_key, stored.rows, c.schema, time, c.name)
            return stored.frontiers, await compute(len(stored.rows), work)

    async def _append_rows(self, c: StashCollection[Any, Any], now: Frontiers, rows: StoredRows) -> None:
        """Append the rows at the upper of `now`, if that is still the upper, and seal it."""
        time = rules.next_time(c.name, now)
        at, beyond = Antichain(time), Antichain(time + 1)
        with self._scope.call():
            self._session.writing()
            await self._append_encoded({c: ((at, beyond, at), replace(rows, times=[time] * len(rows)))})

    async def _append_checked(self, ready: Ready, tables: Mapping[StashCollection[Any, Any], Stored]) -> None:
        """Append, unless a table would have several values of a key. `tables` holds them as they were last
        read; a table that has changed since is read again."""
        bases = dict(tables)
        while True:
            for c, base in bases.items():
                (lower, upper, compact), rows = ready[c]
                rules.appended(c.name, base.frontiers, lower, upper, compact, rows.times)
                both = base.rows + rows
                await compute(len(both), partial(check_table, both, c.schema, upper, c.name))
            try:
                return await self._append_encoded(ready, {c.id: b.revision for c, b in bases.items()})
            except TableChanged:
                bases = {c: await self._load(c) for c in bases}

    async def _append_encoded(self, ready: Ready, at: Mapping[int, int] | None = None) -> None:
        """Append to each collection its rows and set its frontiers; `TableChanged` if one has lost the
        revision that it had `at` its check."""

        def move(now: Stored, c: StashCollection[Any, Any]) -> Move:
            (lower, upper, compact), rows = ready[c]
            frontiers = rules.appended(c.name, now.frontiers, lower, upper, compact, rows.times)
            if at and at.get(c.id, now.revision) != now.revision:
                raise TableChanged
            return Move(frontiers, rows)

        await self._moves(list(ready), move)

    async def _head(self, c: StashCollection[Any, Any]) -> Stored:
        with self._scope.call():
            return await self._load(c, rows=False)

    async def _load(
        self, c: StashCollection[Any, Any], key: str | None = None, *, rows: bool = True
    ) -> Stored:
        select = Select((checked(c).id,), rows=rows, key=key)
        return stored_of(c, (await self._session.load(select)).collections)

    async def _encoded(self, entries: Any, c: StashCollection[Any, Any]) -> StoredRows:
        size = len(entries) if isinstance(entries, list) else 0
        return await compute(size, partial(encode, entries, c.schema, c.name))

    def _collection_of(self, batch: AppendBatch) -> StashCollection[Any, Any]:
        if not isinstance(batch, AppendBatch):
            raise TypeError(f"{shown(batch)} is not an AppendBatch")
        cid, made_by = batch.collection_id, batch._collection
        collection = self._collections.get(cid) if type(cid) is int else None
        if collection is None:
            raise StashError(f"collection {cid!r}: call `collection` on this stash first")
        return collection if made_by is None or made_by.id != cid else made_by


class MemoryStash(Stash):
    """A stash in memory: nothing is durable."""


class SqliteStash(Stash):
    """A stash in a SQLite file, for the processes of one host."""


class PostgresStash(Stash):
    """A stash in a schema of a Postgres database."""


class StashTransaction(Stash):
    """The stash that a migration step gets: its changes become durable all at once."""

    async def migrate(self, steps: Sequence["Step"]) -> int:
        raise StashError("a migration cannot begin within another one")


Step = Callable[[StashTransaction], Awaitable[Any]]
"""A step of a migration."""
