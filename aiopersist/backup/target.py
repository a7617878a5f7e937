"""The copy: finds or creates it, and appends to it."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from math import inf
from typing import Any

from msgspec.structs import asdict

from aiopersist.base.errors import InvalidUsage, OpaqueMismatch, UsageKind
from aiopersist.base.frontier import Antichain, minimum
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.parts.upload import Upload
from aiopersist.shard.catalog import ShardId, find
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.copying import (
    AppendCopied,
    CopyMark,
    CopySchemas,
    CreateCopy,
    MoveCopy,
    is_copy,
    mark_of,
    opaque_of,
)
from aiopersist.state.lifecycle import Finalize
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.retention import ReleaseCritical
from aiopersist.storage.readonly import refuse
from aiopersist.write.pending import PendingAppend
from aiopersist.write.session import Session
from aiopersist.write.staged import StagingContext

Tables = Callable[[], "AsyncGenerator[pa.Table, None]"]
"""Returns the updates; may be called again."""


class CopyAppend(PendingAppend, eq=False):
    """An append of a copier; `updates` are `Tables`. Its times may be any distance ahead of the clock, as
    those of the source are."""

    mark: CopyMark | None = None

    def _take(self) -> None:
        """`_fill` reads them."""

    @property
    def can_begin_again(self) -> bool:
        return True

    async def _fill(self, upload: Upload) -> None:
        async with aclosing(self.updates()) as tables:
            async for table in tables:
                await upload.add(table)

    def command_of(self, batch: HollowBatch) -> AppendCopied:
        arguments = asdict(super().command_of(batch))
        return AppendCopied(**{**arguments, "ahead_max_s": inf, "mark": self.mark})


async def open_copy(shards: Shards, name: str, source: Shard) -> Shard:
    """The copy of `source` with that name; creates it if necessary. `INVALID_COPY` for another shard."""
    if shards.stack.readonly:
        refuse("a copy to its location")
    existing = await find(shards.stack, name, ShardId)
    copy = await shards.named(name)
    if copy.id == source.id:
        text = f"{source.label} cannot be a copy of itself: choose another name or another location"
        raise InvalidUsage(UsageKind.INVALID_COPY, text, shard_id=source.id)
    if await copy.register.refresh() is None:
        least = minimum(source.schema(source.state.schema_id).time_length)
        await commit(copy.register, CreateCopy(copy.id, source.state, least))
        if existing is None and await find(shards.stack, name, ShardId) != copy.id:  # as `open_or_create`
            await commit(copy.register, Finalize(copy.id))
    check_copy(await copy.open(), copy, source)
    return copy


def check_copy(state: State, copy: Shard, source: Shard) -> None:
    """`INVALID_COPY` unless `state` is of a copy that only copiers have written."""
    if is_copy(state, source.id):
        return
    if mark_of(source.id) in state.critical:
        text = f"{copy.label} was a copy of {source.label}, but has other writes since: it cannot follow it"
    else:
        text = f"{copy.label} exists, and is not a copy of {source.label}: choose another name"
    raise InvalidUsage(UsageKind.INVALID_COPY, text, shard_id=copy.id)


@asynccontextmanager
async def writing(
    copy: Shard, source: State, schema: Schema[Any, Any, Any], shards: Shards
) -> AsyncIterator[Session]:
    """A writer of the copy by `schema`, the newest one of the source."""
    await commit(copy.register, CopySchemas(source.schemas))
    session = Session(StagingContext(copy, schema, copy.schema_id(schema), shards.scope))
    try:
        await session.ensure_registered()
        yield session
    finally:
        await session.aclose()


async def move_since(copy: Shard, source: str, since: Antichain) -> None:
    """Move the copy's since to the source's. One commit if it moves."""
    await commit(copy.register, MoveCopy(CopyMark(mark_of(source), since, is_exact=True)))


async def detach(copy: Shard, source: str) -> None:
    """End the mark, and with it the hold: the copy becomes an independent shard."""
    state = await copy.open()
    if (mark := state.critical.get(mark_of(source))) is None:
        raise OpaqueMismatch(opaque_of(state.upper), None, shard_id=copy.id)
    await commit(copy.register, ReleaseCritical(mark_of(source), mark.opaque))
