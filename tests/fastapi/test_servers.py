"""Goal: requests and streams work under uvicorn and hypercorn, in the loop of the test, a server that is told
to end does so with a stream open, and a client that takes nothing is given up."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import httpx
import hypercorn.asyncio
import hypercorn.config
import pytest
import uvicorn
from fastapi import Depends, FastAPI, Request

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.table.handle import opened
from tests.fastapi.backend import streaming
from tests.fastapi.test_slow import until

GUARD_S = 30.0
counts = apf.table("counts", key=str, val=int)
Counts = Annotated[ap.Table[str, int], Depends(counts)]


def application() -> FastAPI:
    app = FastAPI(lifespan=apf.lifespan("mem://"))
    app.include_router(apf.health)

    @app.put("/counts/{key}")
    async def put(key: str, count: int, table: Counts) -> int:
        return await table.put(key, count)

    @app.get("/changes", response_class=apf.EventStream)
    async def changes(request: Request, table: Counts) -> apf.EventStream:
        return apf.event_stream(request, table.changes)

    @app.get("/impatient", response_class=apf.EventStream)
    async def impatient(request: Request, table: Counts) -> apf.EventStream:
        return apf.event_stream(request, table.changes, send_timeout_s=0.2)

    return app


def bound() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


@asynccontextmanager
async def by_hypercorn(app: FastAPI, sock: socket.socket) -> AsyncIterator[None]:
    config = hypercorn.config.Config()
    config.bind = [f"fd://{sock.detach()}"]  # which hypercorn closes
    config.graceful_timeout = 1
    end = asyncio.Event()
    application: Any = app
    serving = asyncio.create_task(hypercorn.asyncio.serve(application, config, shutdown_trigger=end.wait))
    yield
    end.set()
    async with asyncio.timeout(GUARD_S):
        await serving


@asynccontextmanager
async def by_uvicorn(app: FastAPI, sock: socket.socket) -> AsyncIterator[None]:
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve([sock]))
    yield
    server.should_exit = True
    async with asyncio.timeout(GUARD_S):
        await serving


@pytest.mark.parametrize("serve", [by_uvicorn, by_hypercorn])
async def test_requests_and_a_stream_that_goes_on(serve: Any) -> None:
    app, sock = application(), bound()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with serve(app, sock), httpx.AsyncClient(base_url=url, timeout=GUARD_S) as http:
        assert (await http.get("/readyz")).status_code == 200
        await http.put("/counts/a?count=1")
        async with streaming(http, "/changes", "") as events:
            assert (await anext(events)).data is None
            event = await anext(events)
            assert event.name == "contents"
        await http.put("/counts/a?count=2")
        async with streaming(http, "/changes", event.id) as events:
            await anext(events)
            assert (await anext(events)).data["new"] == 2
        assert (await http.get("/changes", headers={"Last-Event-ID": "x"})).status_code == 400


@pytest.mark.parametrize("serve", [by_uvicorn, by_hypercorn])
async def test_a_client_that_takes_nothing_is_given_up(serve: Any) -> None:
    """Goal: also where the socket is full; and its hold on history ends."""
    app, sock = application(), bound()
    port = sock.getsockname()[1]
    async with serve(app, sock), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        assert (await http.get("/readyz", timeout=GUARD_S)).status_code == 200
        table = counts.of(app)
        await table.put_many((f"{n:0200}", n) for n in range(20_000))
        hold = (await opened(table)).shard.hold
        before = sum(hold._pins.values())
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(b"GET /impatient HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: sum(hold._pins.values()) > before)
            await until(lambda: sum(hold._pins.values()) == before)
