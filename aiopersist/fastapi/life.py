"""A client for the life of an application, and dependencies that give it and its tables to requests."""

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
    application opens a client as it starts, by `aiopersist.open` with these arguments, and closes it as it
    ends; without a location the environment names one.

    `then`: an own lifespan, which runs within the life of the client: it begins behind its opening
    (`apf.client_of(app)` gives the client), and ends before its closing. The state that it yields reaches the
    requests."""

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
            held = Attached(await stack.enter_async_context(opening))
            stack.enter_context(held.on(app))
            stack.enter_context(held.ending.on_signals())
            own = None if then is None else await stack.enter_async_context(then(app))
            stack.callback(held.ending.begin)
            yield {**(own or {}), STATE: held}

    return running


async def client(connection: HTTPConnection) -> Client:
    """The dependency of the client: `Annotated[ap.Client, Depends(apf.client)]`. `RuntimeError` if the
    lifespan of the application did not run. Applications that are mounted in this one reach it, too."""
    return attached(connection).client


def client_of(app: Starlette) -> Client:
    """The client of a running application, outside of requests; `RuntimeError` if it is not running."""
    return attached_to(app).client


class AppTable(Generic[K, V]):
    """The dependency of a table, made by `apf.table`."""

    def __init__(self, name: str, key: Any, val: Any, resident: bool | None) -> None:
        TableSchema[K, V](check_name(name), key, val)  # refuses at once what cannot be a table
        self.name = name
        self.key = key
        self.val = val
        self.resident = resident

    async def __call__(self, connection: HTTPConnection) -> Table[K, V]:
        """The table of the application of that request. No request to the stores."""
        return attached(connection).table(self, self._made)

    def of(self, app: Starlette) -> Table[K, V]:
        """The table of a running application, outside of requests: `await stock.of(app)` opens it ahead of
        the first one. `RuntimeError` if the application is not running."""
        return attached_to(app).table(self, self._made)

    def _made(self, client: Client) -> Table[K, V]:
        return client.table(self.name, self.key, self.val, resident=self.resident)

    def __repr__(self) -> str:
        return f"<AppTable {self.name!r}>"


@overload
def table(name: str, key: type[K], val: type[V], *, resident: bool | None = None) -> AppTable[K, V]: ...
@overload
def table(name: str, key: Any, val: Any, *, resident: bool | None = None) -> AppTable[Any, Any]: ...


def table(name: str, key: Any, val: Any, *, resident: bool | None = None) -> AppTable[Any, Any]:
    """A dependency that gives each application its table of that name: with `stock = apf.table("stock",
    key=str, val=Item)` a parameter is `Annotated[ap.Table[str, Item], Depends(stock)]`. All requests of an
    application share one handle, which opens at its first use and is closed with the client. Arguments and
    errors are those of `Client.table`; wrong types are refused at once."""
    return AppTable(name, key, val, resident)
