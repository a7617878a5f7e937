"""What the parts of the client share: the client is put together of one for each layer that it opens."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

from aiopersist.resource import Handle, Scope
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack

H = TypeVar("H", bound=Handle)

SHARDS_KEPT = 8


def labels(shards: WeakValueDictionary[str, Shard]) -> Callable[[str], str | None]:
    """What the user calls the shard of an id, of those that are open. It keeps no client alive."""

    def label_of(shard_id: str) -> str | None:
        shard = shards.get(shard_id)
        return None if shard is None else shard.label

    return label_of


class ClientPart(ABC):
    """See the header."""

    _calls: Scope
    _scope: Scope
    _stack: Stack
    _recent: deque[Shard]
    """Shards that pieces of work from elsewhere were about, `SHARDS_KEPT` of them: no handle keeps them, and
    their states are not to be loaded anew for each piece."""

    @abstractmethod
    def _shard(self, shard_id: ShardId, name: str | None = None) -> Shard:
        """The shard of that id, be it there or not; `name` is what the user calls it."""

    @abstractmethod
    async def _existing(self, name: str) -> Shard:
        """The shard of that name or id, as it is now; `UnknownShard`."""

    @abstractmethod
    async def _opened(self, opener: Callable[[], Awaitable[H]]) -> H:
        """What `opener` gives, as a handle of the client."""

    async def _for_a_piece(self, name: str) -> Shard:
        """`_existing`, for a piece of work from elsewhere."""
        shard = await self._existing(name)
        self._recent.append(shard)
        return shard
