"""A pinned state of a shard, and reads of it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiopersist.base.errors import SinceViolation
from aiopersist.base.supervisor import RELEASE_DEADLINE_S
from aiopersist.data.lazy import pa
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.parts.runs import merged, plan_runs
from aiopersist.read.session import ReadSession
from aiopersist.shard.hold import HistoryPin
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import HollowBatch, State


@dataclass(frozen=True, slots=True)
class PinnedState:
    """A state whose blobs stay, and reads of it by its newest schema."""

    shard: Shard
    state: State
    session: ReadSession[Any, Any]

    def updates(
        self,
        batches: tuple[HollowBatch, ...],
        selection: Selection,
        on_slab: "Callable[[pa.Table], None]" = lambda slab: None,
    ) -> "AsyncGenerator[pa.Table, None]":
        """The updates of batches of the state, sorted and consolidated, in bounded memory."""
        fetch = Fetch(self.shard, self.session.schema, cached=False)
        runs = plan_runs([(batch, part) for batch in batches for part in batch.parts])
        return merged(fetch, runs, selection, self.session.hold.reader, final=False, on_slab=on_slab)


@asynccontextmanager
async def pinned(shard: Shard, shards: Shards, *, holds: bool) -> AsyncIterator[PinnedState]:
    """The newest state of the shard; `holds`: keep its history, too. Two commits, and one to end it."""
    await shard.hold.acquire()
    try:
        pin = await _pin_history(shard) if holds else None
        await shard.open()
        state = shard.state  # no await from here to the pin
        release = shard.register.pin(state.seqno)
        session: ReadSession[Any, Any] = ReadSession(shard, shard.schema(state.schema_id), shards.scope, None)
        try:
            yield PinnedState(shard, state, session)
        finally:
            session.scope.close()
            release()
            if pin is not None:
                shard.hold.drop(pin)
    finally:
        await asyncio.wait([shard.hold.release_soon()], timeout=RELEASE_DEADLINE_S)


async def _pin_history(shard: Shard) -> HistoryPin:
    """A hold at the shard's since. Since may move before the hold is registered; then this tries again."""
    while True:
        try:
            return await shard.hold.need((await shard.open()).since)
        except SinceViolation:
            continue
