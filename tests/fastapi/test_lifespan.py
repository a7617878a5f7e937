"""Goal: an application has one client for its life in each process, and its requests get it and its tables;
where the lifespan did not run, the error says so."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends, FastAPI, Request, WebSocket
from fastapi.testclient import TestClient

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.fastapi.attached import attached_to
from tests.fastapi.caller import running

counts = apf.table("counts", key=str, val=int)
Counts = Annotated[ap.Table[str, int], Depends(counts)]
AppClient = Annotated[ap.Client, Depends(apf.client)]


def application(lifespan: Any = None) -> FastAPI:
    app = FastAPI(lifespan=lifespan)
    app.state.seen = []

    @app.put("/counts/{key}")
    async def put(key: str, count: int, table: Counts, client: AppClient, request: Request) -> int:
        request.app.state.seen.append((table, client))
        return await table.put(key, count)

    @app.get("/counts/{key}")
    async def get(key: str, table: Counts) -> int | None:
        return await table.get(key)

    return app


def test_requests_share_a_client_and_a_table() -> None:
    app = application(apf.lifespan("mem://"))
    with TestClient(app) as http:
        for count in (1, 2):
            assert http.put(f"/counts/a?count={count}").status_code == 200
        assert http.get("/counts/a").json() == 2
        assert len({id(table) for table, _ in app.state.seen}) == 1
        ((_, client),) = {*app.state.seen}
        assert apf.client_of(app) is client
        assert counts.of(app) is app.state.seen[0][0]


def test_each_run_has_a_client_of_its_own_which_is_closed() -> None:
    app = application(apf.lifespan("mem://"))
    for _ in range(2):
        with TestClient(app) as http:
            http.put("/counts/a?count=1")
    (_, first), (_, second) = app.state.seen
    assert first is not second
    assert first._stack.supervisor.closed
    assert second._stack.supervisor.closed


@pytest.mark.parametrize("lifespan", [None, apf.lifespan("mem://")], ids=["none", "not run"])
def test_without_a_lifespan_the_error_says_what_to_do(lifespan: Any) -> None:
    app = application(lifespan)
    for call in (
        lambda: TestClient(app).get("/counts/a"),
        lambda: apf.client_of(app),
        lambda: counts.of(app),
    ):
        with pytest.raises(RuntimeError, match=r"lifespan=apf\.lifespan.*with TestClient\(app\)"):
            call()


def test_behind_its_end_an_application_has_no_client() -> None:
    app = application(apf.lifespan("mem://"))
    with TestClient(app):
        pass
    with pytest.raises(RuntimeError, match="no client of aiopersist"):
        TestClient(app).get("/counts/a")


def test_two_applications_have_tables_of_their_own() -> None:
    one, two = application(apf.lifespan("mem://")), application(apf.lifespan("mem://"))
    with TestClient(one) as first, TestClient(two) as second:
        first.put("/counts/a?count=1")
        assert second.get("/counts/a").json() is None


async def test_an_own_lifespan_runs_within_that_of_the_client() -> None:
    said: list[str] = []

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        await counts.of(app).put("a", 1)
        said.append("begin")
        yield {"mine": "there"}
        assert await counts.of(app).get("a") == 1
        assert not attached_to(app).client._stack.supervisor.closed
        said.append("end")

    app = application(apf.lifespan("mem://", then=own))
    async with running(app) as state:
        assert state["mine"] == "there"
        client = apf.client_of(app)
    assert said == ["begin", "end"]
    assert client._stack.supervisor.closed


async def test_our_lifespan_runs_within_an_own_one() -> None:
    ours = apf.lifespan("mem://")

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[Any]:
        async with ours(app) as state:
            await counts.of(app).put("a", 1)
            yield state

    async with running(application(own)):
        pass


async def test_an_own_lifespan_that_fails_leaves_nothing_open() -> None:
    held: list[ap.Client] = []

    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[None]:
        held.append(apf.client_of(app))
        raise ZeroDivisionError
        yield

    app = application(apf.lifespan("mem://", then=own))
    with pytest.raises(ZeroDivisionError):
        async with running(app):
            pass
    assert held[0]._stack.supervisor.closed
    with pytest.raises(RuntimeError, match="no client of aiopersist"):
        apf.client_of(app)


def test_the_state_of_an_own_lifespan_reaches_requests() -> None:
    @asynccontextmanager
    async def own(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        yield {"mine": "there"}

    app = application(apf.lifespan("mem://", then=own))

    @app.get("/state")
    async def state(request: Request) -> str:
        mine: str = request.state.mine
        return mine

    with TestClient(app) as http:
        assert http.get("/state").json() == "there"


def test_a_mounted_application_has_the_client() -> None:
    inner, app = application(), application(apf.lifespan("mem://"))
    app.mount("/inner", inner)
    with TestClient(app) as http:
        http.put("/inner/counts/a?count=3")
        assert http.get("/counts/a").json() == 3


def test_a_websocket_has_the_table() -> None:
    app = application(apf.lifespan("mem://"))

    @app.websocket("/ws")
    async def put(socket: WebSocket, table: Counts) -> None:
        await socket.accept()
        await table.put("a", 5)
        await socket.send_text(str(await table.get("a")))
        await socket.close()

    with TestClient(app) as http, http.websocket_connect("/ws") as socket:
        assert socket.receive_text() == "5"


async def test_without_a_server_that_carries_state() -> None:
    app = application(apf.lifespan("mem://"))
    app.mount("/inspect", apf.inspector())
    async with (
        running(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http,
    ):
        assert (await http.put("/counts/a?count=1")).status_code == 200
        assert "counts" in (await http.get("/inspect/")).text


def test_the_environment_names_the_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPERSIST_LOCATION", str(tmp_path / "here"))
    with TestClient(application(apf.lifespan())) as http:
        http.put("/counts/a?count=1")
    assert (tmp_path / "here").is_dir()
    monkeypatch.delenv("AIOPERSIST_LOCATION")
    with pytest.raises(ap.InvalidLocation), TestClient(application(apf.lifespan())):
        pass


def test_a_reader_alone(tmp_path: Path) -> None:
    with TestClient(application(apf.lifespan(tmp_path))) as http:
        http.put("/counts/a?count=1")
    with TestClient(application(apf.lifespan(tmp_path, readonly=True))) as http:
        assert http.get("/counts/a").json() == 1
        with pytest.raises(ap.Unsupported):
            http.put("/counts/a?count=2")


def test_what_cannot_be_a_table_is_refused_at_once() -> None:
    with pytest.raises(TypeError):
        apf.table("t", key=str, val=object)
    with pytest.raises(ap.InvalidUsage):
        apf.table("t", key=str, val=int | None)
    with pytest.raises(ap.InvalidUsage):
        apf.table("", key=str, val=int)
    assert repr(counts) == "<AppTable 'counts'>"


def test_dependencies_add_nothing_to_the_schema_of_the_api() -> None:
    operation = application().openapi()["paths"]["/counts/{key}"]["get"]
    assert [one["name"] for one in operation["parameters"]] == ["key"]


async def test_a_signal_begins_the_end_and_reaches_the_server() -> None:
    reached: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: reached.append(number))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        app = application(apf.lifespan("mem://"))
        async with running(app):
            signal.raise_signal(signal.SIGTERM)
            async with asyncio.timeout(30):
                await attached_to(app).ending.wait()
        assert reached == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_a_signal_that_nobody_handles_is_left_alone() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        async with running(application(apf.lifespan("mem://"))):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
