"""Goal: a stream has the contents and each later change once, whenever and wherever a client comes back; it
ends with its client and with its server, and its hold with it; a client that is too slow is told so."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.fastapi.attached import attached_to
from aiopersist.fastapi.patience import SLOW_S
from aiopersist.table.handle import opened
from tests.fastapi.caller import GUARD_S, Caller, running


class Item(BaseModel):
    count: int


stock = apf.table("stock", key=str, val=Item)
Stock = Annotated[ap.Table[str, Item], Depends(stock)]
COMMITS_MAX = 5


def application(location: str = "mem://") -> FastAPI:
    limits = ap.Settings(listen_queue_max=COMMITS_MAX, watch_timeout_s=0.05)
    app = FastAPI(lifespan=apf.lifespan(location, settings=limits))

    @app.get("/changes", response_class=apf.EventStream)
    async def changes(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, stock.changes)

    @app.get("/now")
    async def now(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, stock.changes, start="now", heartbeat_s=0.01)

    @app.get("/some")
    async def some(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, partial(stock.changes, keys=["a"]))

    @app.get("/from")
    async def given(request: Request, stock: Stock) -> apf.EventStream:
        return apf.event_stream(request, stock.changes, cursor=app.state.cursor)

    return app


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    app = application()
    async with running(app):
        yield app


async def put(app: FastAPI, **counts: int) -> None:
    await stock.of(app).put_many({key: Item(count=count) for key, count in counts.items()})


def said(caller: Caller) -> list[tuple[str, str, int | None, int | None]]:
    return [
        (e.name, e.data["key"], *(e.data[side] and e.data[side]["count"] for side in ("old", "new")))
        for e in caller.seen()
    ]


async def test_contents_then_changes(app: FastAPI) -> None:
    await put(app, a=1, b=2)
    async with Caller(app, "/changes") as caller:
        await caller.events(2)
        await put(app, a=3)
        await stock.of(app).delete("b")
        events = await caller.events(4)
    assert caller.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert caller.headers["cache-control"] == "no-store"
    assert said(caller) == [
        ("contents", "a", None, 1),
        ("contents", "b", None, 2),
        ("change", "a", 1, 3),
        ("change", "b", 2, None),
    ]
    assert len({event.id for event in events}) == 4
    assert [*events[2].data] == ["key", "old", "new", "time"]


async def test_a_client_may_come_back_behind_each_event(app: FastAPI) -> None:
    await put(app, a=1, b=2, c=3)
    async with Caller(app, "/changes") as caller:
        await caller.events(3)
        await put(app, a=2, c=4)
        await put(app, b=5)
        events = await caller.events(6)
        ids = caller.ids()
    assert len(ids) >= 7
    for number, event in enumerate(events):
        async with Caller(app, "/changes", event.id) as again:
            if number == 5:
                await put(app, d=1)
                events = [*events, *await again.events(1)]
            rest = await again.events(len(events) - number - 1)
            assert [e.data for e in rest] == [e.data for e in events[number + 1 :]], number
            assert [e.id for e in rest][-1] == events[-1].id
    async with Caller(app, "/changes", ids[0]) as again:  # of nothing but the opening
        assert [e.data for e in (await again.events(7))] == [e.data for e in events]


async def test_from_now_on_and_behind_what_the_first_connection_missed(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/now") as caller:
        last = await caller.until_id(1)
    await put(app, a=2)
    async with Caller(app, "/now", last) as caller:
        await caller.events(1)
        assert said(caller) == [("change", "a", 1, 2)]


async def test_a_cursor_that_the_application_keeps(app: FastAPI) -> None:
    await put(app, a=1)
    async with stock.of(app).changes(start="now") as feed:
        app.state.cursor = feed.cursor
    await put(app, a=2)
    async with Caller(app, "/from") as caller:
        (event,) = await caller.events(1)
    await put(app, a=3)
    async with Caller(app, "/from", event.id) as caller:  # a header comes before it
        await caller.events(1)
        assert said(caller) == [("change", "a", 2, 3)]
    app.state.cursor = "x"
    async with Caller(app, "/from") as caller:
        await caller.done()
    assert caller.status == 400
    assert b"the cursor" in caller.body


async def test_changes_of_some_keys_and_an_id_for_the_others(app: FastAPI) -> None:
    await put(app, a=1, b=1)
    async with Caller(app, "/some") as caller:
        await caller.events(1)
        before = len(caller.ids())
        await put(app, b=2)
        await caller.until_id(before + 1)
        await put(app, a=2)
        await caller.events(2)
        assert said(caller) == [("contents", "a", None, 1), ("change", "a", 1, 2)]
        assert len({*caller.ids()}) >= 4


async def test_nothing_was_ever_put(app: FastAPI) -> None:
    async with Caller(app, "/changes") as caller:
        await caller.until_id(1)
        await put(app, a=1)
        await caller.events(1)
        assert said(caller) == [("change", "a", None, 1)]


@pytest.mark.parametrize(
    "last", ["x", "~", "~1", "x~-1", "x~1e5", "contents.", "é", "a" * 60_000, "null", "1~²"]
)
async def test_an_id_that_is_none(app: FastAPI, last: str) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes", last) as caller:
        await caller.done()
    assert caller.status == 400
    assert caller.headers["content-type"] == "application/problem+json"
    assert b"Last-Event-ID" in caller.body
    assert b"Traceback" not in caller.body


async def test_an_id_of_another_table(app: FastAPI) -> None:
    other = apf.client_of(app).table("other", key=str, val=int)
    await other.put("a", 1)
    async with other.changes() as feed:
        step = await anext(feed)
    async with Caller(app, "/changes", step.cursor) as caller:
        await caller.done()
    assert caller.status == 400


async def test_history_that_is_gone() -> None:
    first, second = application("mem://gone"), application("mem://gone")
    async with running(first):
        await put(first, a=1)
        async with Caller(first, "/changes") as caller:
            (event,) = await caller.events(1)
        await put(first, a=2)
    async with ap.open("mem://gone") as client:
        await client.admin.retain("stock", 0)
        for _ in range(2):
            await client.admin.force_compaction("stock")
        async with running(second), Caller(second, "/changes", event.id) as caller:
            await caller.done()
    assert caller.status == 410
    assert b'"SinceViolation"' in caller.body
    assert b"Last-Event-ID" in caller.body


async def test_heartbeats_while_nothing_comes(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/now") as caller:
        await caller.heartbeats(3)
        await put(app, a=2)
        await caller.events(1)
        assert said(caller) == [("change", "a", 1, 2)]


async def test_the_hold_ends_with_the_client(app: FastAPI) -> None:
    await put(app, a=1)
    callers = [Caller(app, "/changes") for _ in range(3)]
    for caller in callers:
        await caller.__aenter__()
        await caller.events(1)
    assert await streams_that_hold(app) == 3
    for caller in callers:
        await caller.leave()
        assert caller.task.exception() is None
        assert not caller.ended
    assert await streams_that_hold(app) == 0


async def streams_that_hold(app: FastAPI, table: apf.AppTable[str, Any] = stock) -> int:
    """The needs of history beside that of the table's view."""
    hold = (await opened(table.of(app))).shard.hold
    return sum(hold._pins.values()) - 1


async def test_the_end_of_the_server_ends_streams_and_their_holds(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes") as caller:
        await caller.events(1)
        attached_to(app).ending.begin()
        await caller.done()
        assert caller.ended
        assert await streams_that_hold(app) == 0
    async with Caller(app, "/changes") as caller:  # one that comes late is sent elsewhere
        await caller.done()
        assert (caller.status, caller.headers["retry-after"]) == (503, "5")
    async with Caller(app, "/changes", accept="text/event-stream") as caller:  # a browser comes back
        await caller.done()
        assert caller.status == 200
        assert caller.body.startswith(b"retry: 3000\n\n")
        assert [event.data["detail"] for event in caller.seen()] == ["this server is ending: connect again"]


async def test_the_end_of_the_lifespan_ends_streams() -> None:
    app = application()
    async with running(app):
        await put(app, a=1)
        caller = Caller(app, "/changes")
        await caller.__aenter__()
        await caller.events(1)
    await caller.done()
    assert caller.ended


async def test_a_server_that_cancels_a_stream_is_obeyed(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes") as caller:
        await caller.events(1)
        caller.task.cancel()
        await asyncio.wait({caller.task}, timeout=GUARD_S)
        assert caller.task.cancelled()
        assert await streams_that_hold(app) == 0


async def test_a_client_that_is_too_slow_is_told_so(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes") as caller:
        await caller.events(1)
        caller.reading.clear()
        await put(app, a=2)  # is what it does not take
        for count in range(3, 4 + COMMITS_MAX):
            await put(app, a=count)
        await until_no_hold(app)
        assert not caller.task.done()
        caller.reading.set()
        await caller.done()
        assert caller.ended
        events = caller.seen()
        assert events[-1].name == "cut-off"
        assert events[-1].data["commits"] == COMMITS_MAX
        assert events[-1].id == events[-2].id
    async with Caller(app, "/changes", events[-1].id) as again:  # and goes on where it was
        rest = await again.events(1)
        while (rest := again.seen())[-1].data["new"]["count"] < 3 + COMMITS_MAX:
            await asyncio.sleep(0.01)
    chain = [event.data for event in [*events[:-1], *rest]]
    assert [one["new"] for one in chain[:-1]] == [one["old"] for one in chain[1:]]


async def until_no_hold(app: FastAPI) -> None:
    async with asyncio.timeout(GUARD_S):
        while await streams_that_hold(app):
            await asyncio.sleep(0.01)


async def test_a_client_that_takes_no_heartbeat_is_too_slow_as_well(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/now") as caller:
        await caller.heartbeats(1)
        caller.reading.clear()
        await asyncio.sleep(0.05)  # heartbeats are due by now
        for count in range(2, 12 + COMMITS_MAX):
            await put(app, a=count)
        await until_no_hold(app)
        caller.reading.set()
        await caller.done()
        assert caller.seen()[-1].name == "cut-off"


async def test_a_client_that_takes_contents_slowly_is_not_cut_off(app: FastAPI) -> None:
    """They are all of one time: what counts is what comes while it takes some of them."""
    await put(app, **{f"k{number:04}": number for number in range(2000)})
    async with Caller(app, "/changes") as caller:
        caller.one_by_one = True
        for number in range(6):
            for count in range(COMMITS_MAX - 3):
                await put(app, a=10 * number + count)
            await asyncio.sleep(2 * SLOW_S)  # so that commits are counted
            caller.reading.set()
        caller.one_by_one = False
        caller.reading.set()
        await caller.events(2000)
        assert {event.name for event in caller.seen()} <= {"contents", "change"}


async def test_a_stuck_client_does_not_keep_a_server_from_ending(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes") as caller:
        await caller.events(1)
        caller.reading.clear()
        await put(app, a=2)
        attached_to(app).ending.begin()
        await caller.done()
        assert not caller.ended


async def test_a_table_that_is_dropped_ends_its_streams(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes") as caller:
        await caller.events(1)
        await apf.client_of(app).admin.drop("stock")
        await caller.done()
    assert caller.ended
    last = caller.seen()[-1]
    assert last.name == "problem"
    assert last.data["status"] == 410
    assert last.data["error"] == "ShardFinalized"


async def test_a_fault_of_the_program_is_left_to_the_server(app: FastAPI) -> None:
    await put(app, a=1)
    async with Caller(app, "/changes") as caller:
        await caller.events(1)
        await apf.client_of(app).aclose()
        with pytest.raises(ap.InvalidUsage):
            await caller.done()


async def test_an_own_client_without_our_lifespan() -> None:
    app = FastAPI()
    async with ap.open("mem://") as client:
        table = client.table("t", key=str, val=int)
        await table.put("a", 1)

        @app.get("/changes")
        async def changes(request: Request) -> apf.EventStream:
            return apf.event_stream(request, table.changes)

        async with Caller(app, "/changes") as caller:
            await caller.events(1)


async def test_behind_a_middleware(app: FastAPI) -> None:
    other = application()

    @other.middleware("http")
    async def counted(request: Request, call_next: Any) -> Any:
        answer = await call_next(request)
        answer.headers["x-seen"] = "1"
        return answer

    async with running(other):
        await put(other, a=1)
        async with Caller(other, "/changes") as caller:
            await caller.events(1)
            await put(other, a=2)
            await caller.events(2)
        assert caller.headers["x-seen"] == "1"
        await until_no_hold(other)


def test_the_schema_of_the_api_says_what_comes() -> None:
    paths = application().openapi()["paths"]
    answers = paths["/changes"]["get"]["responses"]
    assert [*answers["200"]["content"]] == ["text/event-stream"]
    assert "parameters" not in paths["/changes"]["get"]
