"""Goal: a client comes back by an id that a stream like this one gave, in any process. An id that anybody
made, edited, or was given elsewhere is refused before anything is read, and nobody is alarmed."""

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, Request

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.fastapi.events import EventPlace
from aiopersist.fastapi.ids import SEPARATOR, TAG_CHARS, EventIds
from aiopersist.read.cursor import text_of, values_of
from aiopersist.storage.identity import location_key
from tests.fastapi.caller import Caller, running

stock = apf.table("stock", key=str, val=int)
Stock = Annotated[ap.Table[str, int], Depends(stock)]


def application(location: str, *, readonly: bool = False) -> FastAPI:
    app = FastAPI(lifespan=apf.lifespan(location, readonly=readonly, maintenance=False))

    @app.get("/{name}")
    async def changes(request: Request, stock: Stock, name: str) -> apf.EventStream:
        shown: dict[str, tuple[Any, dict[str, Any]]] = {
            "all": (stock.changes, {}),
            "again": (stock.changes, {}),
            "now": (stock.changes, {"start": "now"}),
            "tea": (partial(stock.changes, keys=["tea"]), {}),
            "tea-now": (partial(stock.changes, keys=["tea"]), {"start": "now"}),
            "milk": (partial(stock.changes, keys=["milk"]), {}),
            "hers": (stock.changes, {"bound_to": "her"}),
            "his": (stock.changes, {"bound_to": "him"}),
        }
        what, options = shown[name]
        return apf.event_stream(request, what, **options)

    return app


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    app = application("mem://ids")
    async with running(app):
        table = stock.of(app)
        await table.put("card", 4111)
        await table.delete("card")
        await table.put("tea", 1)
        yield app


async def id_of(app: Any, path: str) -> str:
    async with Caller(app, path) as caller:
        return await caller.until_id(1)


async def status_of(app: Any, path: str, last: str) -> int:
    async with Caller(app, path, last) as caller:
        await caller.begun()
        if caller.status == 400:
            await caller.done()
            assert b"it was not issued by a stream like this one: start again" in caller.body
        return caller.status


async def test_an_edited_id_reads_nothing(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: with `start="now"` the id of a row that was deleted before is of no use, whatever tag it has."""
    caplog.set_level(logging.WARNING)
    good = await id_of(app, "/now")
    tag, _, place = good.partition(SEPARATOR)
    version, shard, _, _, _, seqno, commit = values_of(place)
    places = [
        [version, shard, [0], None, 0, seqno, commit],
        [version, shard, [1], 1, 1, seqno, commit],
        [version, shard, [0], None, 0, 2**70, "x"],
        [version, shard, [[1, 2]], None, 0, seqno, commit],
        [version, shard, [0], {"a": 1}, 1, seqno, commit],
    ]
    bad = [text for values in places for text in (text_of(values), f"{tag}{SEPARATOR}{text_of(values)}")]
    bad += [
        place,
        f"{good}~1",
        f"{good}~{'9' * 15}",
        good[1:],
        "A" + good,
        good.replace(SEPARATOR, "~"),
        tag,
        SEPARATOR,
    ]
    bad += [
        "contents.x",
        f"{tag}{SEPARATOR}contents.{text_of(places[0])}",
        "é" * 30,
        "a" * 60_000,
        good.swapcase(),
    ]
    for last in bad:
        assert await status_of(app, "/now", last) == 400, last
    assert caplog.records == []
    assert await status_of(app, "/now", good) == 200


async def test_an_id_is_good_for_streams_that_show_the_same(app: FastAPI) -> None:
    """Goal: neither other keys, nor another beginning, nor another user."""
    names = ["all", "now", "tea", "tea-now", "milk", "hers", "his"]
    for given in names:
        last = await id_of(app, f"/{given}")
        assert [name for name in names if await status_of(app, f"/{name}", last) == 200] == [given]
    assert await status_of(app, "/again", await id_of(app, "/all")) == 200


async def test_all_processes_of_a_location_agree() -> None:
    """Goal: also those that only read, and one that comes later; another location does not."""
    async with running(application("mem://agreed")) as _:
        pass
    first = application("mem://agreed")
    async with running(first):
        await stock.of(first).put("tea", 1)
        last = await id_of(first, "/all")
        reader = application("mem://agreed", readonly=True)
        async with running(reader):
            assert await status_of(reader, "/all", last) == 200
            assert await status_of(first, "/all", await id_of(reader, "/all")) == 200
    async with ap.open("mem://agreed") as one, ap.open("mem://other") as other:
        blobs = one._stack.blob, other._stack.blob
        keys = {await location_key(blob, purpose) for blob in blobs for purpose in ("a", "b")}
        assert len(keys) == 4
        assert await location_key(blobs[0], "a") in keys


async def test_texts_that_run_together_are_others(app: FastAPI) -> None:
    blob, place = apf.client_of(app)._stack.blob, EventPlace("x")
    texts = [("a", "b"), ("ab", ""), ("", "ab"), ('a","b',), ("b", "a"), ()]
    ids = [(await EventIds.of(blob, *of_what)).text(place) for of_what in texts]
    assert len(set(ids)) == len(texts)
    assert {len(text) for text in ids} == {TAG_CHARS + 2}
