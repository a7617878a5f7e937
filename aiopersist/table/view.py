"""The contents of a table by key, in memory, as of the shard's upper that this process has seen last.

The view stands at a frontier. To *catch up* with a newer state it fetches the updates since then, as a listen
does, and holds since back so far. Own commits are applied without reading them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

from aiopersist.data.lazy import pa
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.consolidate import contents
from aiopersist.errors import LeaseExpired, ShardFinalized, SinceViolation
from aiopersist.frontier import Antichain, minimum
from aiopersist.parts.fetch import Selection
from aiopersist.read.interval import batches_of, hold_for
from aiopersist.read.session import ReadSession
from aiopersist.read.snapshot import groups
from aiopersist.shard.hold import Need
from aiopersist.shard.instant import as_int
from aiopersist.state.model import State
from aiopersist.table.kind import Kind

RECENT_KEYS_MAX = 65_536  # remembered, for transactions that read ranges
FEW = 512  # rows that take less time than reaching a thread


class View:
    """See the header."""

    def __init__(self, kind: Kind[Any, Any], session: ReadSession[Any, Any]) -> None:
        self.kind = kind
        self.session = session
        self.upper = minimum(None)
        """Everything before this frontier is in `vals`."""
        self.vals: dict[str, str] = {}
        self._need: Need | None = None
        self._turn = asyncio.Lock()
        self.bytes = 0
        """About the bytes of the texts."""
        self.version = 0
        """Rises with every change of `vals`."""
        self.foreign = 0
        """Rises with every commit of another process that it takes."""
        self._recent: deque[tuple[int, tuple[str, ...]]] = deque()
        """The keys of the last changes, by version."""
        self._recent_keys = 0

    @property
    def is_behind(self) -> bool:
        """Whether the newest state that this process knows has more."""
        return self.session.shard.state.upper != self.upper

    async def open(self) -> None:
        """Read the contents."""
        async with self._turn:
            await self._load()

    async def catch_up(self) -> None:
        """Bring the view to the newest state that this process knows. Requests only for parts in blobs."""
        if not self.is_behind:
            return
        async with self._turn:
            while self.is_behind:
                try:
                    await self._catch_up(self.session.shard.state)
                except (LeaseExpired, SinceViolation):  # nothing held its history: begin anew
                    await self._load()

    def committed(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        """A commit of this process replaced `lower` by `upper`, with these changes."""
        if self.upper == lower:  # else it caught up with it already
            self._put(changes)
            self._move(upper)

    def changed_since(self, version: int) -> set[str] | None:
        """The keys that changed after that version; `None` if this is not remembered."""
        if version == self.version:
            return set()
        if not self._recent or self._recent[0][0] > version + 1:
            return None
        return {key for at, keys in self._recent if at > version for key in keys}

    def close(self) -> None:
        """Hold nothing any more."""
        if self._need is not None:
            self.session.hold.drop(self._need)

    # --- inside ----------------------------------------------------------------------------------

    async def _load(self) -> None:
        shard = self.session.shard
        while True:
            state = await shard.open()
            if state.upper == minimum(None):
                need, upper, table = await self.session.need(state.upper, 0), state.upper, None
                break
            try:
                async with await self.session.snapshot(None, wait=False) as snapshot:
                    upper = Antichain(as_int(snapshot.as_of) + 1)
                    need = await self.session.need(hold_for(upper, None), snapshot.as_of)
                    table = await snapshot.to_arrow()
                break
            except SinceViolation:
                continue
        vals: dict[str, str] = {}
        if table is not None and table.num_rows:
            stack = shard.stack
            keys, texts = await stack.compute(self.kind.texts, table)
            vals = dict(zip(keys, texts, strict=True))
        self.close()
        self.vals, self.upper, self._need = vals, upper, need
        self.version, self.foreign = self.version + 1, self.foreign + 1
        self._recent.clear()
        self._recent_keys = 0
        self.bytes = sum(map(len, vals)) + sum(map(len, vals.values()))

    async def _catch_up(self, state: State) -> None:
        session, shard, lower = self.session, self.session.shard, self.upper
        if state.finalized:
            raise ShardFinalized("it is finalized", shard_id=shard.id)
        assert self._need is not None
        session.hold.check(self._need.reader)
        if not session.hold.keeps and not state.since <= hold_for(lower, None):
            raise SinceViolation(None, state.since, shard_id=shard.id)
        release = shard.register.pin(state.seqno)
        try:
            batches = batches_of(state, lower, state.upper, None)
            named = [(batch, part) for batch in batches for part in batch.parts]
            selection = Selection(lower=lower, upper=state.upper)
            reader = self._need.reader
            tables = [await session.fetch.table(group, selection, reader) for group in groups(named)]
        finally:
            release()
        table = concat(tables, self.kind.schema)
        size = 0 if table.num_rows <= FEW else inf
        changes = await shard.stack.compute_few(size, self._changes, table) if table.num_rows else {}
        if self.upper == lower:  # else a commit of our own was applied meanwhile
            self.foreign += 1
            self._put(changes)
            self._move(state.upper)

    def _changes(self, updates: pa.Table) -> dict[str, str | None]:
        """The new vals by key, of updates in any order."""
        net = contents(updates, self.kind.schema)
        keys, vals = self.kind.texts(net)
        diffs = net.column("diff").to_pylist()
        changes: dict[str, str | None] = dict.fromkeys(
            key for key, diff in zip(keys, diffs, strict=True) if diff < 0
        )
        changes.update((key, val) for key, val, diff in zip(keys, vals, diffs, strict=True) if diff > 0)
        return changes

    def _put(self, changes: Mapping[str, str | None]) -> None:
        if not changes:
            return
        self.version += 1
        self._recent.append((self.version, tuple(changes)))
        self._recent_keys += len(changes)
        while self._recent_keys > RECENT_KEYS_MAX:
            self._recent_keys -= len(self._recent.popleft()[1])
        for key, val in changes.items():
            old = self.vals.pop(key, None) if val is None else self.vals.get(key)
            if old is not None:
                self.bytes -= len(old) + (len(key) if val is None else 0)
            if val is not None:
                self.bytes += len(val) + (len(key) if old is None else 0)
                self.vals[key] = val

    def _move(self, upper: Antichain) -> None:
        self.upper = upper
        if self._need is not None:
            self.session.hold.move(self._need, hold_for(upper, None))
