"""The client and the tables of a running application, and whether it is ending.

They are on `app.state` and in the state of each request, where mounted applications find them.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import HTTPConnection

from aiopersist.base.errors import Error
from aiopersist.client.client import Client
from aiopersist.fastapi.ending import Ending
from aiopersist.table.table import Table

STATE = "aiopersist"
"""The attribute of `app.state`, and the key in the state of a request."""


class Attached:
    """See the header."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.ending = Ending()
        self._tables: dict[object, Table[Any, Any]] = {}
        self._asking: asyncio.Task[bool] | None = None

    def table(self, app_table: object, make: Callable[[Client], Table[Any, Any]]) -> Table[Any, Any]:
        """The table of an `AppTable`: the same handle each time."""
        handle = self._tables.get(app_table)
        if handle is None:
            handle = self._tables[app_table] = make(self.client)
        return handle

    async def is_ready(self, within_s: float) -> bool:
        """Whether the stores answer in time. Concurrent calls share the requests."""
        if self._asking is None or self._asking.done():
            supervisor = self.client._stack.supervisor
            self._asking = supervisor.spawn(self._ping(), "ask whether the stores answer", abandon=True)
        asking = self._asking
        await asyncio.wait({asking}, timeout=within_s)
        return asking.done() and not asking.cancelled() and asking.result()

    async def _ping(self) -> bool:
        try:
            await self.client.ping()
        except Error:
            return False
        return True

    @contextmanager
    def on(self, app: Starlette) -> Iterator[None]:
        """Attach this to the application."""
        setattr(app.state, STATE, self)
        try:
            yield
        finally:
            if getattr(app.state, STATE, None) is self:
                delattr(app.state, STATE)


def attached_to(app: Starlette) -> Attached:
    """The `Attached` of the application; `RuntimeError` if it is not running."""
    return _running(getattr(app.state, STATE, None))


def find_attached(connection: HTTPConnection) -> Attached | None:
    """The `Attached` of a request's application or of the one around it; `None` if there is none."""
    own: Attached | None = getattr(connection.app.state, STATE, None)
    return own or connection.scope.get("state", {}).get(STATE)


def attached(connection: HTTPConnection) -> Attached:
    """The same, but `RuntimeError` if there is none."""
    return _running(find_attached(connection))


def _running(attached: Attached | None) -> Attached:
    if attached is None:
        raise RuntimeError(
            "the application has no client of aiopersist: create it with FastAPI(lifespan=apf.lifespan(...)) "
            "and run its lifespan (in tests: `with TestClient(app) as http:`)"
        )
    return attached
