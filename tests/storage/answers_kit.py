"""A server that always gives the same answer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any


class Server:
    """Answers every request without a body with what `answer` says, and counts them."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.requests = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                writer.write(self.answer)
                await writer.drain()
                if b"Connection: close" in self.answer:
                    break
        writer.close()


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
