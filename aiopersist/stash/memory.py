"""A stash in memory: the specification in its shortest form, and a backend that passes the same suite. Also
the copy that a migration step or a `savepoint` changes (`DraftStore`).
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from aiopersist.base.frontier import int_time
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.data.updates.consolidate import DIFF_MAX, DIFF_MIN
from aiopersist.stash.model import (
    Fence,
    Frontiers,
    Loaded,
    Move,
    Opener,
    Select,
    Sending,
    StoreChange,
    Stored,
    StoredRows,
    Verdict,
    holds,
    judge,
)
from aiopersist.stash.store import STASH, Store
from aiopersist.storage.wishes import HeardWishes, Wish


@dataclass
class StashTables:
    """What the stores of one stash share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    fence: Fence | None = None
    version: int = 0
    openers: dict[str, str] = field(default_factory=dict)
    wishes: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By opener, until when it wishes to go first, and since when it waits."""
    collections: dict[int, Stored] = field(default_factory=dict)
    """Each with all its rows."""

    @classmethod
    def of(cls, loaded: Loaded) -> "StashTables":
        """A copy of a whole stash."""
        return cls(
            fence=loaded.fence,
            version=loaded.version,
            collections={stored.id: stored for stored in loaded.collections},
        )

    def select(self, select: Select) -> list[Stored]:
        matches = (
            [stored for cid, stored in self.collections.items() if select.ids is None or cid in select.ids]
            if select.name is None
            else [stored for stored in self.collections.values() if stored.name == select.name]
        )
        return [replace(stored, rows=_selected(stored.rows, select)) for stored in matches]

    def apply(self, change: StoreChange) -> None:
        for cid, move in change.moves.items():
            self.collections[cid] = moved(self.collections[cid], move)
        for created in change.created:
            self.collections[created.id] = replace(created, added=len(created.rows))
        if change.version is not None:
            self.version = change.version[1]


def moved(stored: Stored, move: Move) -> Stored:
    """The collection after the move."""
    return replace(
        stored,
        frontiers=move.frontiers,
        revision=stored.revision + 1,
        added=stored.added + len(move.rows),
        rows=stored.rows + move.rows,
    )


class MemoryStore(Store):
    """A stash in `tables`. Each call is a short step under their lock, without an await inside: it has
    happened entirely, or has not begun."""

    def __init__(self, tables: StashTables, runtime: Runtime = SYSTEM) -> None:
        self._tables = tables
        self._runtime = runtime
        self._heard = HeardWishes(runtime)

    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        async with self._step() as tables:
            fence = tables.fence or Fence(0, "")
            if nonce is not None and fence.nonce != nonce:
                fence = Fence(fence.epoch + 1, nonce)
            tables.fence = fence
            tables.openers.setdefault(opener_id, token)
            return fence

    async def enroll(self, opener_id: str, token: str) -> None:
        async with self._step() as tables:
            tables.openers.setdefault(opener_id, token)

    async def load(self, select: Select) -> Loaded | None:
        async with self._step() as tables:
            if tables.fence is None:
                return None
            return Loaded(tables.fence, tables.version, tuple(tables.select(select)))

    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        async with self._step() as tables:
            assert tables.fence is not None  # there is an opener
            self._heard.hear([STASH], self._wished(tables))
            token = tables.openers.get(opener.id)
            verdict = judge(
                opener, tables.fence, sending, token, holds(change, tables.collections, tables.version)
            )
            if verdict is Verdict.APPLIED and token != sending.token:
                tables.openers[opener.id] = sending.token
                tables.apply(change)
            return verdict

    async def token(self, opener_id: str) -> str | None:
        async with self._step() as tables:
            return tables.openers.get(opener_id)

    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        async with self._step() as tables:
            if tables.fence != opener.fence:
                return None
            stored = tables.collections[collection_id]
            rows = consolidated(stored.rows, stored.frontiers)
            tables.collections[collection_id] = replace(stored, rows=rows, added=0, summed=len(rows))
            return len(rows)

    async def forget(self, opener_id: str) -> None:
        async with self._step() as tables:
            tables.openers.pop(opener_id, None)
            tables.wishes.pop(opener_id, None)

    async def wish(self, opener_id: str, for_s: float, waited_s: float) -> None:
        async with self._step() as tables:
            now = self._runtime.monotonic()
            tables.wishes[opener_id] = now + for_s, now - waited_s

    def _wished(self, tables: StashTables) -> list[Wish]:
        """The wishes that last; others are dropped."""
        now = self._runtime.monotonic()
        tables.wishes = {who: wish for who, wish in tables.wishes.items() if wish[0] > now}
        return [Wish(STASH, who, until - now, now - since) for who, (until, since) in tables.wishes.items()]

    async def aclose(self) -> None:
        await asyncio.sleep(0)  # noqa: TID251  # no time passes

    @asynccontextmanager
    async def _step(self) -> AsyncIterator[StashTables]:
        """The tables, locked. Other tasks run first, as in every call of a store that does I/O."""
        await asyncio.sleep(0)  # noqa: TID251  # no time passes
        with self._tables.lock:
            yield self._tables


class DraftStore(MemoryStore):
    """A stash in memory that begins as a copy, and gathers its changes. Not shared, so without tokens."""

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(StashTables.of(loaded))
        self._before = {stored.id: stored.revision for stored in loaded.collections}
        self._touched: dict[int, StoredRows] = {}
        self.to_consolidate: set[int] = set()
        """Collections to consolidate after the gathered change."""

    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        with self._tables.lock:
            if not holds(change, self._tables.collections, self._tables.version):
                return Verdict.CONFLICT
            self._tables.apply(change)
            for cid, move in change.moves.items():
                self._touched[cid] = self._touched.get(cid, StoredRows()) + move.rows
            for created in change.created:
                self._touched[created.id] = created.rows
            return Verdict.APPLIED

    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        self.to_consolidate.add(collection_id)
        return await super().consolidate(opener, collection_id)

    def gathered(self, version: tuple[int, int]) -> StoreChange:
        """All changes as one, against the contents with which the copy began."""
        now = self._tables.collections
        old = {cid: rows for cid, rows in self._touched.items() if cid in self._before}
        return StoreChange(
            expected=self._before,
            moves={cid: Move(now[cid].frontiers, rows) for cid, rows in old.items()},
            created=tuple(
                Stored(cid, now[cid].name, now[cid].codecs, now[cid].frontiers, rows=rows)
                for cid, rows in self._touched.items()
                if cid not in self._before
            ),
            version=version,
        )


def consolidated(rows: StoredRows, frontiers: Frontiers) -> StoredRows:
    """At most one row per (key, value, time), unless the sum needs more; times advanced to since."""
    since = int_time(frontiers.since)
    if since is None:
        return StoredRows()
    groups: dict[tuple[str, str, int], list[int]] = {}
    for key, val, time, diff in rows:
        groups.setdefault((key, val, max(time, since)), []).append(diff)
    return StoredRows.of(_sums(groups.items()))


def _sums(groups: Iterable[tuple[tuple[str, str, int], list[int]]]) -> Iterable[tuple[str, str, int, int]]:
    for group, diffs in groups:
        total = sum(diffs)
        left = [total] if DIFF_MIN <= total <= DIFF_MAX else diffs
        yield from ((*group, diff) for diff in left if diff)


def _selected(rows: StoredRows, select: Select) -> StoredRows:
    if not select.rows:
        return StoredRows()
    if select.key is None:
        return rows
    return rows.where([key == select.key for key in rows.keys])
