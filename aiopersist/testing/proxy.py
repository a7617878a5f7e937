"""A TCP proxy in front of a real server, which loses requests and answers as networks do.

    async with TcpProxy("127.0.0.1", 5432) as proxy:
        ... connect to proxy.host, proxy.port ...
        lost = proxy.swallow_answers_then_cut(completes_command)
        ... send a statement: the server carries it out, the client gets no answer ...
        await lost

Everything is real but the network: the proxy forwards, delays, holds back or drops bytes, and refuses or cuts
connections. It counts connections, refusals, cuts and bytes.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from aiopersist.base.runtime import SYSTEM

CHUNK_BYTES = 64 * 1024


def completes_command(answer: bytes) -> bool:
    """Whether Postgres reports a finished statement in `answer`, other than `BEGIN`, `SET` and `LISTEN`. It
    sends the report after the commit of a statement outside a transaction. `answer` must begin with a
    message."""
    at = 0
    while at + 5 <= len(answer):
        length = int.from_bytes(answer[at + 1 : at + 5], "big")
        tag = answer[at + 5 : at + 1 + length]
        if answer[at : at + 1] == b"C" and not tag.startswith((b"BEGIN", b"SET", b"LISTEN")):
            return True
        at += 1 + length
    return False


class TcpProxy:
    """Controls take effect at once, for open connections and for new ones."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.host = "127.0.0.1"
        self.port = 0  # known once it is entered
        self.delay_s = 0.0  # before each chunk, in both directions
        self.changed: Callable[[bytes], bytes] = bytes  # what becomes of each chunk of a request
        self.answered: Callable[[bytes], bytes] = bytes  # what becomes of each chunk of an answer
        self.refusing = False
        self.accepted = 0
        self.refused = 0
        self.cuts = 0
        self.bytes_to_server = 0
        self.bytes_to_client = 0
        self._requests = _open_gate()
        self._answers = _open_gate()
        self._links: set[_Link] = set()
        self._swallow: tuple[Callable[[bytes], bool], asyncio.Future[bytes]] | None = None
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._links)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        links = list(self._links)
        for link in links:
            link.cut()
        await asyncio.gather(*(link.ended.wait() for link in links))

    def cut(self) -> int:
        """Cut all connections on both sides, and return their number. Bytes that are held back are lost."""
        links = list(self._links)
        for link in links:
            link.cut()
        self.cuts += len(links)
        return len(links)

    def cut_clients(self) -> int:
        """Cut only the clients' side, and return the number of connections: requests that are held back still
        reach the server when they are released."""
        for link in self._links:
            link.cut_client()
        self.cuts += len(self._links)
        return len(self._links)

    def refuse(self) -> None:
        """Reset every new connection, until `accept()`. Open ones stay."""
        self.refusing = True

    def accept(self) -> None:
        """Take new connections again."""
        self.refusing = False

    def hold_requests(self) -> None:
        """Bytes from client to server wait here, until `release_requests()`."""
        self._requests.clear()

    def release_requests(self) -> None:
        """Send the requests that were held back, in order."""
        self._requests.set()

    def hold_answers(self) -> None:
        """Bytes from server to client wait here, until `release_answers()`."""
        self._answers.clear()

    def release_answers(self) -> None:
        """Deliver the answers that were held back, in order."""
        self._answers.set()

    def swallow_answers_then_cut(self, when: Callable[[bytes], bool] = bool) -> "asyncio.Future[bytes]":
        """Drop the first answer for which `when(bytes)` holds, and cut its connection: the server did the
        work and the client does not learn of it. The future gets the lost bytes; cancel it to forward
        again."""
        lost: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._swallow = (when, lost)
        return lost

    def _is_swallowed(self, answer: bytes) -> bool:
        if self._swallow is None:
            return False
        when, lost = self._swallow
        if lost.done():
            self._swallow = None
            return False
        if not when(answer):
            return False
        self._swallow = None
        self.cuts += 1
        lost.set_result(answer)
        return True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing:
            self.refused += 1
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(*self.target)
        except OSError:
            self.refused += 1
            writer.transport.abort()
            return
        self.accepted += 1
        link = _Link(self, (reader, writer), (server_reader, server_writer))
        self._links.add(link)
        try:
            await link.run()
        finally:
            self._links.discard(link)
            link.ended.set()


_Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _Link:
    """A client's connection, and the connection to the server that belongs to it."""

    def __init__(self, proxy: TcpProxy, client: _Side, server: _Side) -> None:
        self.proxy = proxy
        self.client_reader, self.client_writer = client
        self.server_reader, self.server_writer = server
        self.was_cut = asyncio.Event()
        self.ended = asyncio.Event()

    def cut(self) -> None:
        self.was_cut.set()
        self.cut_client()
        self.server_writer.transport.abort()

    def cut_client(self) -> None:
        self.client_writer.transport.abort()

    async def run(self) -> None:
        pumps = asyncio.gather(self._requests(), self._answers())
        cut = asyncio.ensure_future(self.was_cut.wait())
        ends: tuple[asyncio.Future[Any], ...] = (pumps, cut)
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            self.cut()

    async def _requests(self) -> None:
        while data := await _read(self.client_reader):
            await self._pause(self.proxy._requests)
            data = self.proxy.changed(data)
            self.proxy.bytes_to_server += len(data)
            await _write(self.server_writer, data)
        await self.proxy._requests.wait()
        _close(self.server_writer)

    async def _answers(self) -> None:
        while data := await _read(self.server_reader):
            await self._pause(self.proxy._answers)
            if self.proxy._is_swallowed(data):
                self.cut()
                return
            data = self.proxy.answered(data)
            self.proxy.bytes_to_client += len(data)
            await _write(self.client_writer, data)  # after a cut nothing arrives
        _close(self.client_writer)

    async def _pause(self, gate: asyncio.Event) -> None:
        if self.proxy.delay_s:
            await SYSTEM.sleep(self.proxy.delay_s)
        await gate.wait()


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(CHUNK_BYTES)
    except OSError:
        return b""


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if writer.is_closing():
        return
    with suppress(OSError):
        writer.write(data)
        await writer.drain()


def _close(writer: asyncio.StreamWriter) -> None:
    if writer.can_write_eof() and not writer.is_closing():
        writer.write_eof()
