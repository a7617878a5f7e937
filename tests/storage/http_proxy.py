"""A proxy that understands HTTP: it answers in place of a server, before or after that has done the work, or
changes an answer."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)
CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked\r\n", re.IGNORECASE)


class Cut(bytes):
    """The begin of an answer, behind which the connection ends."""


class Sent(NamedTuple):
    """A request."""

    method: str
    target: str
    """With the query, as text without escapes."""
    data: bytes


class Got(NamedTuple):
    """An answer of the server."""

    head: bytes
    body: bytes

    @property
    def status(self) -> int:
        return int(self.head.split(b" ", 2)[1])


class HttpProxy:
    """In front of the server at an address. `instead` may answer a request that then is not passed on;
    `after` may change what the client gets, or send nothing and cut the connection (`b""`)."""

    def __init__(self, host: str, port: int) -> None:
        self.instead: Callable[[Sent], bytes | None] = lambda sent: None
        self.after: Callable[[Sent, Got], bytes] = lambda sent, got: got.head + got.body
        self.sent: list[Sent] = []
        self._target = host, port
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError):
                while answer := await self._answer(reader, writer):
                    writer.write(answer)
                    await writer.drain()
                    if isinstance(answer, Cut):
                        break
        finally:
            self._serving.discard(task)
            writer.close()

    async def aclose(self) -> None:
        """Cut all connections."""
        if serving := {*self._serving}:
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"100-continue" in head.lower():
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, head)
        method, target, _ = head.partition(b"\r\n")[0].decode().split(" ")
        sent = Sent(method, unquote(unquote(target)), body)
        self.sent.append(sent)
        if (answer := self.instead(sent)) is not None:
            return answer
        there, back = await asyncio.open_connection(*self._target)
        try:
            back.write(head + body)
            got = await there.readuntil(b"\r\n\r\n")
            while got.startswith(b"HTTP/1.1 100"):
                got = await there.readuntil(b"\r\n\r\n")
            no_body = method == "HEAD" or Got(got, b"").status in (204, 304)
            return self.after(sent, Got(got, b"" if no_body else await _body(there, got)))
        finally:
            back.close()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if CHUNKED.search(head) is None:
        length = LENGTH.search(head)
        return await reader.readexactly(int(length[1])) if length else b""
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if size == 0:
            return body


@asynccontextmanager
async def http_proxy(url: str) -> AsyncIterator[tuple[HttpProxy, str]]:
    """A proxy before the endpoint of the URL of a location, and the URL through it."""
    endpoint = url.partition("endpoint=")[2].partition("&")[0]
    there = urlsplit(unquote(endpoint))
    proxy = HttpProxy(str(there.hostname), int(there.port or 80))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    way = f"{there.scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}{there.path}"
    try:
        yield proxy, url.replace(endpoint, way)
    finally:
        server.close()
        await proxy.aclose()
