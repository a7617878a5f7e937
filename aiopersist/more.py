"""What a client opens beside writers and readers of shards: what stands on top of them, and stashes."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiopersist.indexed.indexed import Indexed
from aiopersist.indexed.open import opened
from aiopersist.resource import Handle, Opening, Scope
from aiopersist.shard.stack import Stack
from aiopersist.stash.open import DEFAULT_NAME, Mode, place_beside
from aiopersist.stash.open import opened as open_place
from aiopersist.stash.stash import Stash
from aiopersist.storage.readonly import refuse
from aiopersist.storage.urls import Stores

H = TypeVar("H", bound=Handle)


class OpensMore(ABC):
    """A part of the client."""

    _scope: Scope
    _stack: Stack
    _stores: Stores

    @abstractmethod
    async def _opened(self, opener: Callable[[], Awaitable[H]]) -> H:
        """What `opener` gives, as a handle of the client."""

    def indexed(self, name: str, *, readonly: bool = False, background: bool = True) -> Opening[Indexed]:
        """The `Indexed` of that name, made on first use; it takes over from the instance before it.
        `readonly`: any number of these follow along; `UnknownStream` if it is not there. `background=False`:
        its maintenance is done by hand (`step`). Two commits (one for a reader), and a request for its name.
        """
        return Opening(
            lambda: self._opened(
                lambda: opened(self._stack, self._scope, name, readonly=readonly, background=background)
            ),
            f"client.indexed({name!r})",
        )

    def stash(
        self,
        name: str = DEFAULT_NAME,
        *,
        exclusive: bool = True,
        readonly: bool = False,
        savepoint: bool = False,
    ) -> Opening[Stash]:
        """The stash of that name in the consensus database of this location; modes and errors are those of
        `aiopersist.stash.open`. `Unsupported` if the consensus store was given as an instance."""
        mode = Mode(exclusive, readonly, savepoint)
        mode.check()
        if self._stack.readonly and not readonly:
            refuse("a stash that is not opened with readonly=True")
        stack, stores = self._stack, self._stores
        place = place_beside(
            stores.consensus_url, stores.consensus, name, runtime=stack.runtime, settings=stack.settings
        )

        async def open_stash() -> Stash:
            return await open_place(place, mode, stack.settings, stack.runtime, self._scope)

        return Opening(lambda: self._opened(open_stash), "client.stash(...)")
