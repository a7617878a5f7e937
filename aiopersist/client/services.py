"""The inside of a client: its shards, and the objects of the packages that carry out its calls.

A process imports only the packages that its calls need: a call imports its package, on a worker thread if
that takes longer than a millisecond (`calling`, `later`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar
from weakref import ref

from aiopersist.base.errors import Error
from aiopersist.base.resource import Closeable, Opening, Root
from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.client.gauges import observed
from aiopersist.data.lazy import are_imported, avoid_polars
from aiopersist.maintenance.upkeep import Upkeep
from aiopersist.measure.providers import Measures
from aiopersist.shard import catalog
from aiopersist.shard.shards import Shards
from aiopersist.storage.identity import check_in_time
from aiopersist.storage.layers import wrap_stores
from aiopersist.storage.readonly import refuse
from aiopersist.storage.urls import Stores, again, open_stores

if TYPE_CHECKING:
    from aiopersist.maintenance.background import Maintenance
    from aiopersist.maintenance.rounds import Rounds
    from aiopersist.stash.stash import Stash
    from aiopersist.table.open import OpenTables
    from aiopersist.table.transaction.transact import Transactions

H = TypeVar("H", bound=Closeable)


class Services:
    """See the header. `maintenance`: also in the background."""

    def __init__(self, stores: Stores, settings: Settings, runtime: Runtime, maintenance: bool) -> None:
        readonly = stores.readonly
        measures = Measures.new(runtime.monotonic, enabled=settings.metrics)
        blob, consensus, self.metrics = wrap_stores(*stores.guarded(), settings, runtime, measures)
        self.metrics.begin(settings.client_name)
        hasty = settings.model_copy(update={"retry_timeout_s": settings.open_timeout_s, "metrics": False})
        hasty_blob, hasty_consensus, _ = wrap_stores(*stores.guarded(), hasty, runtime)
        self._hasty = hasty_blob.uncached, hasty_consensus
        self._stores = stores
        self._failed: list[Error] = []
        self.shards = Shards(blob, consensus, measures, settings, runtime, readonly=readonly)
        self.stack = self.shards.stack
        self.calls = self.shards.calls
        self._upkeep = Upkeep(self.stack, background=maintenance and not readonly)
        self.shards.on_new = self._upkeep.add
        self.stack.twin.open, self.stack.twin.check = self._twin, partial(again, stores)
        self.metrics.observe = partial(observed, self.shards, partial(_waiting_in_tables, ref(self)))

    async def ping(self) -> None:
        """As `Client.ping`."""
        create, deadline_s = not self.stack.readonly, self.stack.settings.open_timeout_s
        runtime, measure = self.stack.runtime, self.stack.clock.measure
        await check_in_time(*self._hasty, runtime, create=create, deadline_s=deadline_s, beside=measure)

    async def close(self) -> None:
        """Close every handle and all that this client opened."""
        await self.stack.twin.aclose(self.stack.compute)
        self._failed = await self.shards.release()
        await self._upkeep.aclose()
        self.shards.scope.close()
        await self.stack.supervisor.aclose()
        self.stack.threads.end()
        self.metrics.end()
        for store in self._stores.opened:
            await store.aclose()

    async def _twin(self) -> Services:
        """A second client on these stores, in another event loop."""
        runtime, settings = self.stack.runtime, self.stack.settings.model_copy(update={"metrics": False})
        stores = open_stores(again(self._stores), runtime=runtime, readonly=self._stores.readonly)
        twin = Services(stores, settings, runtime, maintenance=False)
        twin.stack.threads.begin = avoid_polars
        avoid_polars()
        return twin

    def raise_failed(self) -> None:
        """Raise, once, the first error that the closing of a handle raised."""
        failed, self._failed = self._failed, []
        if failed:
            raise failed[0]

    def later(self, module: str, opening: Callable[[], Opening[H]], call: str) -> Opening[H]:
        """The result of `opening`, which needs `module`: a thread imports it first if it is not imported."""
        if are_imported([module]):
            return opening()

        async def opened() -> H:
            self.calls.check()
            await self.stack.imported(module)
            return await opening()

        return Opening(opened, call)

    def stash(self, name: str, exclusive: bool, readonly: bool, savepoint: bool) -> Opening[Stash]:
        """As `Client.stash`."""
        from aiopersist.stash.open import Mode, opened, stash_beside

        mode = Mode(exclusive, readonly, savepoint).checked()
        if self.stack.readonly and not readonly:
            refuse("a stash that is not opened with readonly=True")
        stores, settings, runtime = self._stores, self.stack.settings, self.stack.runtime
        place = stash_beside(stores.consensus_url, stores.consensus, name, runtime=runtime, settings=settings)
        opener = partial(opened, place, mode, settings, runtime, self.shards.scope, self.stack.metrics)
        return self.shards.opening(opener, "client.stash(...)")

    @asynccontextmanager
    async def calling(self, *modules: str) -> AsyncIterator[None]:
        """Surrounds a call that `modules` carry out."""
        with self.calls.call():
            await self.stack.imported(*modules)
            yield

    @property
    def maintenance(self) -> Maintenance:
        return self._upkeep.now()

    @cached_property
    def rounds(self) -> Rounds:
        from aiopersist.maintenance.rounds import Rounds

        maintenance = self.maintenance
        return Rounds(self.stack, lambda shard: maintenance.of(self.shards.at(catalog.id_of(shard))))

    @cached_property
    def tables(self) -> OpenTables:
        from aiopersist.table.open import OpenTables

        return OpenTables(self.shards)

    @cached_property
    def transactions(self) -> Transactions:
        from aiopersist.table.transaction.transact import Transactions

        return Transactions(self.tables)

    @property
    def has_tables(self) -> bool:
        return "tables" in vars(self)


class BaseClient(Root):
    """The life of a client, without its calls."""

    def __init__(self, stores: Stores, settings: Settings, runtime: Runtime, maintenance: bool) -> None:
        self._services = Services(stores, settings, runtime, maintenance)
        self._shards, self._stack = self._services.shards, self._services.stack
        self._calls = self._services.calls

    async def aclose(self) -> None:
        """Close every handle, and release the resources of the client. Idempotent; goes on in the background
        if the caller is cancelled. Raises, at the end, what the closing of a subscription raises."""
        if self._closing is None or not self._closing.done():
            self._calls.check_place()
        await self._close_once(self._services.close)
        self._services.raise_failed()


def _waiting_in_tables(services: ref[Services]) -> int:
    """The number of operations that wait for a group commit. By a weak reference, since metrics outlive a
    dropped client."""
    alive = services()
    return alive.tables.group.queueing if alive is not None and alive.has_tables else 0
