"""A hold that never expires: a critical since. Its opaque number fences earlier owners."""

import asyncio
from typing import Any

from aiopersist.base.errors import OpaqueMismatch, shown
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.shard.attempt import Slot
from aiopersist.shard.catalog import ShardId, check_name
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import CriticalReader
from aiopersist.state.retention import DowngradeCritical, RegisterCritical, ReleaseCritical


class SinceHandle(Resource):
    """Holds history at `since` until the owner of the opaque moves it, even while no process runs."""

    def __init__(self, shard: Shard, reader: str, record: CriticalReader, scope: Scope) -> None:
        self._shard = shard
        self._reader = reader
        self._record = record
        self._scope = scope
        self._slot = Slot()
        self._turn = asyncio.Lock()

    @classmethod
    async def _open(cls, shard: Shard, reader: str, opaque: int, scope: Scope) -> "SinceHandle":
        """Open the hold of that id, or create it at the shard's since. One commit for a new hold."""
        own = Scope(f"the critical since {reader!r}", scope, shard.id)
        try:
            command = RegisterCritical(reader, _opaque(opaque))
            record: CriticalReader = await commit(shard.register, command)
        except BaseException:
            own.close()
            raise
        return cls(shard, reader, record, own)

    @property
    def shard_id(self) -> ShardId:
        return self._shard.id

    @property
    def since(self) -> Antichain:
        """The frontier that it holds, as last seen by this handle."""
        return self._record.since

    @property
    def opaque(self) -> int:
        """The owner's token, as last seen by this handle."""
        return self._record.opaque

    async def compare_and_downgrade_since(
        self, expected_opaque: int, new_opaque: int, new_since: Antichain | Time
    ) -> Antichain:
        """If the opaque is `expected_opaque`, set it to `new_opaque`, which fences earlier owners, and move
        the hold to its join with `new_since`; returns the join. `OpaqueMismatch` if another owner has taken
        over. One commit."""
        with self._scope.call():
            target = self._shard.checked_frontier(new_since)
            async with self._turn:
                await settle(self._slot)
                command = DowngradeCritical(
                    self._reader, _opaque(expected_opaque), _opaque(new_opaque), target
                )
                try:
                    self._record = await commit(self._shard.register, command, self._slot)
                except OpaqueMismatch:
                    self._record = self._shard.state.critical.get(self._reader, self._record)
                    raise
                return self._record.since

    async def release(self, expected_opaque: int) -> None:
        """End the hold if its opaque is `expected_opaque`, and close the handle; its id is free afterwards.
        The shard's since stays until another hold or `retain` moves it. `OpaqueMismatch` if another owner has
        taken over or released the hold. One commit."""
        with self._scope.call():
            async with self._turn:
                await settle(self._slot)
                command = ReleaseCritical(self._reader, _opaque(expected_opaque))
                await commit(self._shard.register, command, self._slot)
        await self.aclose()

    async def aclose(self) -> None:
        """Close the handle; the hold stays until `release` ends it. Idempotent."""
        self._scope.close()

    def __repr__(self) -> str:
        return f"<SinceHandle {self._reader} of {self.shard_id}: since {self.since}, opaque {self.opaque}>"


def _opaque(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError(f"{shown(value)} is not an opaque: give an int of 64 bits")
    return value


def open_since(shards: Shards, name: str, critical_reader_id: str, opaque: int) -> Opening[SinceHandle]:
    """See `Client.critical_since`."""

    async def open_handle() -> SinceHandle:
        reader = check_name(critical_reader_id)
        shard = await shards.existing(name)
        return await SinceHandle._open(shard, reader, opaque, shards.scope)

    return shards.opening(open_handle, f"client.critical_since({name!r}, ...)")
