"""A caller of an ASGI application that reads as far as it is told to, without a server in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

from tests.fastapi.backend import Event, events_in

GUARD_S = 30.0


class Caller:
    """One request. `reading` says whether it takes what it is sent."""

    def __init__(
        self, app: Any, path: str, last: str = "", state: dict[str, Any] | None = None, accept: str = ""
    ) -> None:
        self._app = app
        path, _, query = path.partition("?")
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (b"host", b"test"),
                *([(b"last-event-id", last.encode())] if last else []),
                *([(b"accept", accept.encode())] if accept else []),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": state or {},
        }
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.comments = 0
        self.ended = False
        """Whether the last message was sent."""
        self.reading = asyncio.Event()
        self.reading.set()
        self.one_by_one = False
        """Whether it takes one message whenever it is told to read."""
        self._last = last
        self._gone = asyncio.Event()
        self._news = asyncio.Event()
        self._asked = False

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """Go, as a client does, and wait until the application noticed."""
        self._gone.set()
        async with asyncio.timeout(GUARD_S):
            await asyncio.wait({self.task})

    async def begun(self) -> Self:
        """The head of the response came."""
        await self._until(lambda: self.status)
        return self

    async def done(self) -> Self:
        """The application has returned."""
        async with asyncio.timeout(GUARD_S):
            await self.task
        return self

    def seen(self) -> list[Event]:
        """What came so far, as events with data."""
        return [event for event in self._all() if event.data is not None]

    def ids(self) -> list[str]:
        """The last id, as it changed."""
        return [event.id for event in self._all()]

    async def events(self, count: int) -> list[Event]:
        """So many events, once they came."""
        await self._until(lambda: len(self.seen()) >= count)
        return self.seen()

    async def until_id(self, count: int) -> str:
        await self._until(lambda: len(self.ids()) >= count)
        return self.ids()[-1]

    async def heartbeats(self, count: int) -> None:
        await self._until(lambda: self.body.count(b"\n:\n") + self.body.startswith(b":\n") >= count)

    def _all(self) -> list[Event]:
        whole = self.body[: self.body.rfind(b"\n\n") + 2].decode()
        return [*events_in(whole.split("\n")[:-1], self._last)]

    async def _until(self, ready: Any) -> None:
        async with asyncio.timeout(GUARD_S):
            while not ready():
                assert not (self.task.done() and not self.task.cancelled() and self.task.exception())
                assert not self.task.done() or ready(), self.body
                self._news.clear()
                waits = [asyncio.create_task(self._news.wait()), self.task]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                waits[0].cancel()

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()  # before anything is taken, as uvicorn does
        assert not self.ended
        if self.one_by_one:
            self.reading.clear()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body", False)
        self._news.set()


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[Any]:
    """The application in its lifespan."""
    async with app.router.lifespan_context(app) as state:
        yield state
