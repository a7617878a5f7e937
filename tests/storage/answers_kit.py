"""A server that always gives the same answer, and answers that are not the store's."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


class Server:
    """Answers every request with what `answer` says, and counts them."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if b"100-continue" in head:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                await reader.readexactly(int((LENGTH.search(head) or [0, 0])[1]))
                self.requests += 1
                is_head = head.startswith(b"head ")
                writer.write(self.answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if is_head else self.answer)
                await writer.drain()
                if not self.answer or b"Connection: close" in self.answer:
                    break
        writer.close()


LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)")
PAGES = {
    "page": b"<html><head><title>login</title></head><body>log in</body></html>",
    "words": b"upstream connect error or disconnect/reset before headers",
    "nothing": b"",
    "cut": b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Mess",
    "json": b'{"message": "Too Many Requests"}',
}
"""Bodies that no store writes."""


def foreign(status: int, page: str, *headers: str) -> bytes:
    """An answer of something between."""
    body = PAGES[page]
    kind = "text/html" if page == "page" else "text/plain"
    more = "".join(f"{header}\r\n" for header in headers)
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>m</Message></Error>"


def failure(status: bytes, code: bytes) -> bytes:
    body = ERROR % code
    return b"HTTP/1.1 %s x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


@contextlib.asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[str, Server]]:
    """The endpoint of a server that always gives this answer, and the server."""
    served = Server(answer)
    server = await asyncio.start_server(served, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", served
    server.close()


async def outcome_of(
    answer: bytes, opened: Callable[[str], Any], call: Callable[[Any], Awaitable[object]]
) -> tuple[object, int]:
    """What comes of a call of the store that is `opened` at the endpoint of a server that always gives this
    answer, and the number of requests."""
    async with answering(answer) as (endpoint, served):
        store = opened(endpoint)
        try:
            return await call(store), served.requests
        except Exception as error:
            return error, served.requests
        finally:
            await store.aclose()
