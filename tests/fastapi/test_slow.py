"""Goal: clients that take nothing cost little memory, for a bounded time, and they are not too many."""

import asyncio
import re
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

import pyarrow as pa
import pytest
from fastapi import Depends, FastAPI, Request

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.fastapi.sender import STEP_BYTES
from aiopersist.read.feed import UpdateFeed
from aiopersist.shard.turns import TURNS
from tests.fastapi.caller import GUARD_S, Caller, running
from tests.fastapi.test_stream import streams_that_hold

stock = apf.table("stock", key=str, val=str)
Stock = Annotated[ap.Table[str, str], Depends(stock)]
ROWS, MAX = 20_000, 2


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    app = FastAPI(lifespan=apf.lifespan("mem://", maintenance=False))

    @app.get("/stock")
    async def changes(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, stock.changes)

    @app.get("/impatient")
    async def impatient(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, stock.changes, send_timeout_s=0.05, heartbeat_s=0.01)

    @app.get("/few")
    async def few(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, stock.changes, streams_max=MAX)

    async with running(app):
        await stock.of(app).put_many((f"key{n:08}", f"{n:0150}") for n in range(ROWS))
        yield app


async def until(ready: Callable[[], Any]) -> None:
    async with asyncio.timeout(GUARD_S):
        while not ready():
            await asyncio.sleep(0.01)


async def test_a_client_that_takes_nothing_keeps_little_memory(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a step as columns, and some events, neither all of its changes nor all of the table; what was
    read ahead is let go, and read again."""
    was_let_go = asyncio.Event()

    async def let_go(feed: UpdateFeed[Any, Any]) -> None:
        await original(feed)
        was_let_go.set()

    original = UpdateFeed._let_go
    monkeypatch.setattr(UpdateFeed, "_let_go", let_go)
    async with Caller(app, "/stock") as caller:  # imports, and caches
        await caller.events(1)
    columns = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        async with Caller(app, "/stock") as caller:
            await caller.events(1)
            caller.reading.clear()
            was_let_go.clear()
            async with asyncio.timeout(GUARD_S):
                await was_let_go.wait()
            held = tracemalloc.get_traced_memory()[0] - len(caller.body)
            columns = pa.total_allocated_bytes() - columns
            caller.reading.set()
            await until(lambda: caller.body.count(b"event: contents") == ROWS)
            ids = re.findall(rb"^id: (.*)$", caller.body, re.MULTILINE)
    finally:
        tracemalloc.stop()
    assert held < STEP_BYTES
    assert columns < 1.5 * STEP_BYTES
    assert len(set(ids)) == ROWS + 1  # and that of the opening


async def test_a_client_that_takes_nothing_is_given_up(app: FastAPI) -> None:
    """Goal: within a time, though nobody commits; and its hold ends with it."""
    async with Caller(app, "/impatient") as caller:
        await caller.events(1)
        caller.reading.clear()
        await caller.done()
        assert not caller.ended
        assert await streams_that_hold(app, stock) == 0
        last = caller.ids()[-1]
    async with Caller(app, "/impatient", last) as caller:  # and may come back
        await caller.events(1)


async def test_a_client_that_has_gone_is_sent_no_more(app: FastAPI) -> None:
    """Goal: a server takes what is sent to a client that has gone, at once; yet the loop does not stand still
    until a step was made into events."""
    caller = Caller(app, "/stock")
    await caller.__aenter__()
    await caller.events(1)
    caller.reading.clear()
    size = len(caller.body)
    await asyncio.sleep(0)
    caller.reading.set()
    await caller.leave()
    assert caller.body.count(b"event: contents") < ROWS // 2, size


async def test_a_process_has_so_many_streams(app: FastAPI) -> None:
    """Goal: one more is told to come back, in a way that it understands; the others go on."""
    first, second = Caller(app, "/few"), Caller(app, "/few")
    for caller in (first, second):
        await caller.__aenter__()
        await caller.events(1)
    async with Caller(app, "/few") as third:
        await third.done()
        assert (third.status, third.headers["retry-after"]) == (503, "5")
    async with Caller(app, "/few", accept="text/event-stream") as third:
        await third.done()
        assert (third.status, third.body[:13]) == (200, b"retry: 3000\n\n")
        assert [(event.name, event.data["status"]) for event in third.seen()] == [("problem", 503)]
    async with Caller(app, "/stock") as third:  # which may have more
        await third.events(1)
    await first.leave()
    async with Caller(app, "/few") as third:
        await third.events(1)
    await second.leave()


async def test_many_streams_read_in_turns(app: FastAPI) -> None:
    """Goal: of many clients at once that take the contents, few have more in memory than a step."""
    turns = apf.client_of(app)._stack.turns
    callers = [Caller(app, "/stock") for _ in range(3 * TURNS)]
    for caller in callers:
        caller.one_by_one = True
        await caller.__aenter__()
    for _ in range(6):
        for caller in callers:
            caller.reading.set()
        await asyncio.sleep(0.01)
        assert len(turns._ahead) <= TURNS
    for caller in callers:
        caller.one_by_one = False
        caller.reading.set()
    for caller in callers:
        await until(lambda caller=caller: caller.body.count(b"event: contents") == ROWS)
        assert len(set(re.findall(rb"^id: (.*)$", caller.body, re.MULTILINE))) == ROWS + 1
        await caller.leave()
    assert not turns._ahead
