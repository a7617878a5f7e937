"""A client for the lifetime of an application, and dependencies for the client and tables."""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeAlias, TypeVar, overload

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.fastapi.attached import STATE, Attached, attached, attached_to
from aiopersist.shard.catalog import check_name
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.urls import Location
from aiopersist.table.schema import TableSchema
from aiopersist.table.table import Table

K = TypeVar("K")
V = TypeVar("V")

Lifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]
OwnLifespan: TypeAlias = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]


def lifespan(
    location: str | os.PathLike[str] | Location | None = None,
    *,
    blob: str | Blob | None = None,
    consensus: str | Consensus | None = None,
    settings: Settings | None = None,
    maintenance: bool = True,
    readonly: bool = False,
    then: OwnLifespan | None = None,
) -> Lifespan:
    """The lifespan of an application with a client: `FastAPI(lifespan=apf.lifespan())`. Each process of the
    application opens a client with these arguments (see `aiopersist.open`) at its start, and closes it at its
    end. Without a location, the environment names one.

    `then`: a lifespan of your own. It begins after the client is opened (`apf.client_of(app)` returns the
    client), and ends before the client is closed. Requests get the state that it yields."""

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[Mapping[str, Any]]:
        opening = open_client(
            location,
            blob=blob,
            consensus=consensus,
            settings=settings,
            maintenance=maintenance,
            readonly=readonly,
        )
        async with AsyncExitStack() as stack:
            attached_client = Attached(await stack.enter_async_context(opening))
            stack.enter_context(attached_client.on(app))
            stack.enter_context(attached_client.ending.on_signals())
            own = None if then is None else await stack.enter_async_context(then(app))
            stack.callback(attached_client.ending.begin)
            yield {**(own or {}), STATE: attached_client}

    return running


async def client(connection: HTTPConnection) -> Client:
    """The dependency for the client: `Annotated[ap.Client, Depends(apf.client)]`. `RuntimeError` if the
    lifespan of the application did not run. It also works in mounted applications."""
    return attached(connection).client


def client_of(app: Starlette) -> Client:
    """The client of a running application, outside of requests; `RuntimeError` if it is not running."""
    return attached_to(app).client


class AppTable(Generic[K, V]):
    """The dependency for a table, made by `apf.table`."""

    def __init__(self, name: str, key: Any, val: Any, resident: bool | None) -> None:
        TableSchema[K, V](check_name(name), key, val)  # refuses wrong types at once
        self.name = name
        self.key = key
        self.val = val
        self.resident = resident

    async def __call__(self, connection: HTTPConnection) -> Table[K, V]:
        """The table of the request's application. No request to the stores."""
        return attached(connection).table(self, self._open)

    def of(self, app: Starlette) -> Table[K, V]:
        """The table of a running application, outside of requests: `await stock.of(app)` opens it before the
        first request. `RuntimeError` if the application is not running."""
        return attached_to(app).table(self, self._open)

    def _open(self, client: Client) -> Table[K, V]:
        return client.table(self.name, self.key, self.val, resident=self.resident)

    def __repr__(self) -> str:
        return f"<AppTable {self.name!r}>"


@overload
def table(name: str, key: type[K], val: type[V], *, resident: bool | None = None) -> AppTable[K, V]: ...
@overload
def table(name: str, key: Any, val: Any, *, resident: bool | None = None) -> AppTable[Any, Any]: ...


def table(name: str, key: Any, val: Any, *, resident: bool | None = None) -> AppTable[Any, Any]:
    """A dependency for a table of the application: with `stock = apf.table("stock", key=str, val=Item)`, a
    parameter is `Annotated[ap.Table[str, Item], Depends(stock)]`. All requests of an application share one
    handle. It opens at its first use and closes with the client. Arguments and errors are those of
    `Client.table`; wrong types are refused at once."""
    return AppTable(name, key, val, resident)
