"""Goal: `/livez` asks no store; `/readyz` says within its time whether both answer, however many ask; the
inspector and the metrics are those of the application's client."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.fastapi import probes
from aiopersist.fastapi.attached import attached_to
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.fastapi.caller import Caller, running


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
async def app(faults: Faults) -> AsyncIterator[FastAPI]:
    blob, consensus = FaultyBlob(MemoryBlob("h"), faults), FaultyConsensus(MemoryConsensus("h"), faults)
    settings = ap.Settings(retry_timeout_s=0.01, open_timeout_s=0.2)
    app = FastAPI(lifespan=apf.lifespan(blob=blob, consensus=consensus, settings=settings, maintenance=False))
    app.include_router(apf.health)
    async with running(app):
        yield app


def served(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_a_process_that_lives_asks_no_store(app: FastAPI, faults: Faults) -> None:
    before = faults.calls.total()
    async with served(app) as http:
        answer = await http.get("/livez")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert answer.headers["cache-control"] == "no-store"
    assert faults.calls.total() == before


async def test_ready_while_the_stores_answer(app: FastAPI, faults: Faults) -> None:
    async with served(app) as http:
        assert (await http.get("/readyz")).status_code == 200
        faults.rates = {Outcome.REFUSED: 1.0}
        answer = await http.get("/readyz")
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert answer.json()["status"] == 503
        assert (await http.get("/livez")).status_code == 200
        faults.heal()
        assert (await http.get("/readyz")).status_code == 200


async def test_those_who_ask_at_once_share_the_requests(app: FastAPI, faults: Faults) -> None:
    async with served(app) as http:
        before = faults.calls.total()
        await http.get("/readyz")
        one = faults.calls.total() - before
        answers = await asyncio.gather(*(http.get("/readyz") for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert faults.calls.total() - before <= 4 * one


async def test_a_store_that_does_not_answer_in_time(
    app: FastAPI, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(probes, "READY_S", 0.05)
    async with served(app) as http:
        faults.latency_s = (3600.0, 3600.0)
        assert (await http.get("/readyz")).status_code == 503


async def test_not_ready_as_soon_as_the_server_ends(app: FastAPI) -> None:
    attached_to(app).ending.begin()
    async with served(app) as http:
        assert (await http.get("/readyz")).status_code == 503
        assert (await http.get("/livez")).status_code == 200


def test_they_are_no_part_of_the_schema() -> None:
    app = FastAPI()
    app.include_router(apf.health)
    app.include_router(apf.metrics())
    assert app.openapi()["paths"] == {}


def pages() -> FastAPI:
    app = FastAPI(lifespan=apf.lifespan("mem://"))
    app.mount("/inspect", apf.inspector())
    app.mount("/closed", apf.inspector(token="secret"))
    app.include_router(apf.metrics())
    return app


def test_the_inspector_and_the_metrics_of_the_client() -> None:
    app = pages()
    with TestClient(app) as http:
        assert http.portal is not None
        http.portal.call(apf.client_of(app).table("stock", str, int).put, "a", 1)
        assert "stock" in http.get("/inspect/").text
        assert http.get("/inspect/shard?name=stock").status_code == 200
        assert http.get("/closed/").status_code == 401
        assert "aiopersist_commit_duration_seconds_count" in http.get("/metrics").text


async def test_a_live_page_of_the_inspector_ends_with_the_server() -> None:
    app = pages()
    async with running(app):
        await apf.client_of(app).table("stock", str, int).put("a", 1)
        async with Caller(app, "/inspect/live?name=stock") as caller:
            await caller.begun()
            assert caller.status == 200, caller.body
            attached_to(app).ending.begin()
            await caller.done()
            assert caller.ended
