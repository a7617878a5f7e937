"""Serves the inspector of a location with uvicorn.

On a loopback address only this machine reaches it, and requests must name a loopback host. On any other
address visitors need a token, from the environment or generated here and printed once.
"""

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from aiopersist.base.runtime import SYSTEM
from aiopersist.base.settings import PREFIX, TOKEN_NAME
from aiopersist.client.client import Client
from aiopersist.web.app import inspector
from aiopersist.web.guard import LOOPBACK_NAMES, HostCheck
from aiopersist.web.reading import warm_up_reading

TOKEN = PREFIX + TOKEN_NAME
CLOSE_S = 3  # then live changes are cut off


async def serve(client: Client, host: str, port: int, *, write: bool, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `tell` gets the address as soon as it can be opened. Port 0 takes a free
    port. `OSError` if it cannot listen there."""
    await client._stack.compute(warm_up_reading)
    with bound(host, port) as listening:
        token = token_for(host)
        config = uvicorn.Config(
            application(client, host, token, write=write),
            log_level="warning",
            access_log=False,  # addresses may contain the token
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=CLOSE_S,
        )
        server = _Server(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.end)
        tell(address(listening, token))
        await server.serve([listening])


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=128)


def address(listening: socket.socket, token: str | None) -> str:
    """The address to open in a browser."""
    host, port = listening.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def token_for(host: str) -> str | None:
    """The token of the environment; without one, a new token, or `None` on a loopback address."""
    return os.environ.get(TOKEN) or (None if is_loopback(host) else SYSTEM.token())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def application(client: Client, host: str, token: str | None, *, write: bool) -> ASGIApp:
    """The inspector, with the checks that its address needs."""
    app = inspector(client, write=write, token=token)
    return HostCheck(app, {*LOOPBACK_NAMES, host.lower()}) if is_loopback(host) else app


class _Server(uvicorn.Server):
    """Ends by `end`. Uvicorn's own handlers would end the process before the client is closed."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Answer running requests, then end."""
        self.should_exit = True
