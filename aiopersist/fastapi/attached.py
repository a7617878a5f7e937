"""What an application holds while it runs: its client, its tables, whether it is ending.

It lies on `app.state`, and in the state of each request: that reaches the applications that are mounted in
this one.
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

    def table(self, wanted: object, make: Callable[[Client], Table[Any, Any]]) -> Table[Any, Any]:
        """The table that `wanted` asks for: the same handle each time."""
        found = self._tables.get(wanted)
        if found is None:
            found = self._tables[wanted] = make(self.client)
        return found

    async def is_ready(self, within_s: float) -> bool:
        """Whether the stores answer within that time. Those who ask at once share the requests."""
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
        """Be what the application holds."""
        setattr(app.state, STATE, self)
        try:
            yield
        finally:
            if getattr(app.state, STATE, None) is self:
                delattr(app.state, STATE)


def attached_to(app: Starlette) -> Attached:
    """What the application holds; `RuntimeError` if it is not running."""
    found: Attached | None = getattr(app.state, STATE, None)
    if found is None:
        raise _not_running()
    return found


def find_attached(connection: HTTPConnection) -> Attached | None:
    """What the application of a request holds, or that in which it is mounted; `None` if neither does."""
    found: Attached | None = getattr(connection.app.state, STATE, None)
    return found or connection.scope.get("state", {}).get(STATE)


def attached(connection: HTTPConnection) -> Attached:
    """The same; `RuntimeError` if there is none."""
    found = find_attached(connection)
    if found is None:
        raise _not_running()
    return found


def _not_running() -> RuntimeError:
    return RuntimeError(
        "the application has no client of aiopersist: make it with FastAPI(lifespan=apf.lifespan(...)), and "
        "let its lifespan run (in tests: `with TestClient(app) as http:`)"
    )
