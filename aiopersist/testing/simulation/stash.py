"""A stash of a world: its tables lie beside the consensus store, and each call goes over the line of a
machine as a request does."""

import threading
from collections.abc import Awaitable, Mapping
from dataclasses import replace

from aiopersist.base.runtime import Runtime
from aiopersist.stash.memory import MemoryStore, StashTables
from aiopersist.stash.model import Fence, Loaded, Opener, Select, Sending, StoreChange, Verdict
from aiopersist.stash.store import Store
from aiopersist.storage.wrapper import Request
from aiopersist.testing.simulation.network import CONSENSUS, T, Wire


def copied(stashes: Mapping[str, StashTables]) -> dict[str, StashTables]:
    """The tables of all stashes as they are now."""
    return {name: _copied(tables) for name, tables in stashes.items()}


def _copied(tables: StashTables) -> StashTables:
    with tables.lock:
        openers, collections = dict(tables.openers), dict(tables.collections)
        return replace(tables, lock=threading.Lock(), openers=openers, wishes={}, collections=collections)


class SimulatedStashStore(Store):
    """A stash at the end of a line."""

    def __init__(self, tables: StashTables, line: Wire, runtime: Runtime) -> None:
        self._inner = MemoryStore(tables, runtime)
        self._line = line

    def _request(self, op: str, request: Request[T]) -> Awaitable[T]:
        return self._line.call(f"stash.{op}", request, CONSENSUS)

    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        return await self._request("take", lambda: self._inner.take(opener_id, token, nonce))

    async def enroll(self, opener_id: str, token: str) -> None:
        await self._request("enroll", lambda: self._inner.enroll(opener_id, token))

    async def load(self, select: Select) -> Loaded | None:
        return await self._request("load", lambda: self._inner.load(select))

    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        return await self._request("commit", lambda: self._inner.commit(opener, change, sending))

    async def token(self, opener_id: str) -> str | None:
        """Waits for no transaction that was sent: each is one step."""
        return await self._request("token", lambda: self._inner.token(opener_id))

    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        return await self._request("consolidate", lambda: self._inner.consolidate(opener, collection_id))

    async def forget(self, opener_id: str) -> None:
        await self._request("forget", lambda: self._inner.forget(opener_id))

    async def wish(self, opener_id: str, for_s: float, waited_s: float) -> None:
        await self._request("wish", lambda: self._inner.wish(opener_id, for_s, waited_s))

    def stand_back_s(self, opener_id: str, waited_s: float) -> float:
        return self._inner.stand_back_s(opener_id, waited_s)

    async def aclose(self) -> None:
        """The tables stay."""
