"""The inspector and metrics of `aiopersist.web` in an application, for its client."""

import asyncio
from typing import Any

import anyio
from fastapi import APIRouter
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiopersist.client.client import Client
from aiopersist.fastapi.attached import STATE, Attached, attached
from aiopersist.fastapi.ending import LAST_WORDS_S

EVENT_STREAM = b"text/event-stream"


def inspector(*, token: str | None = None) -> ASGIApp:
    """The inspector of the application's client: `app.mount("/inspect", apf.inspector())`. It is read-only.

    Without `token`, everybody who reaches its pages sees all contents of the location. With `token`, visitors
    open the address with `?token=...`, or send `Authorization: Bearer ...`."""
    from aiopersist.web import inspector  # not every application needs its templates

    return _Inside(inspector(_client, token=token))


def metrics(*, path: str = "/metrics") -> APIRouter:
    """A router with `GET /metrics` for Prometheus, for the application's client:
    `app.include_router(apf.metrics())`. Each worker process counts for itself, and a scrape reaches one of
    them. Its readers see counts, but no names of shards, keys or locations."""
    from aiopersist.web import metrics_router

    return metrics_router(_client, path=path)


def _client(connection: HTTPConnection) -> Client:
    return attached(connection).client


class _Inside:
    """An application in another one. It uses the outer client, and its streams end with the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outer = attached(HTTPConnection(scope)) if scope["type"] in ("http", "websocket") else None
        if outer is None:
            await self._app(scope, receive, send)
            return
        inner = {**scope, "state": {**scope.get("state", {}), STATE: outer}}
        stream = _ResponseInside(send)
        with anyio.CancelScope() as unless_ended:
            ends = asyncio.create_task(stream.cancel_at_end(outer, unless_ended))
            try:
                await self._app(inner, receive, stream.send)
            finally:
                ends.cancel()
        await stream.finish()


class _ResponseInside:
    """The response of an application; knows whether it is an unfinished stream of events."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_stream = asyncio.Event()
        self._ended = False

    async def send(self, message: Message) -> None:
        """Pass on a message."""
        if message["type"] == "http.response.start":
            headers: dict[bytes, Any] = dict(message.get("headers", ()))
            if headers.get(b"content-type", b"").startswith(EVENT_STREAM):
                self._is_stream.set()
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def cancel_at_end(self, attached: Attached, scope: anyio.CancelScope) -> None:
        """Cancel the scope when the server ends, if the response is a stream."""
        await attached.ending.wait()
        await self._is_stream.wait()
        scope.cancel()

    async def finish(self) -> None:
        """End a stream that was cancelled, unless the client does not take it."""
        if self._is_stream.is_set() and not self._ended:
            with anyio.move_on_after(LAST_WORDS_S):
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
