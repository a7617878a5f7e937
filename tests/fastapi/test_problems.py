"""Goal: each error has a status that says what a client can do, and a body that gives nothing away."""

import inspect
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, WebSocket
from fastapi.responses import PlainTextResponse
from fastapi.testclient import TestClient

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.base import errors
from aiopersist.fastapi.problems import OF_CLIENTS, ROWS, row_of

SECRET = "postgres://user:pass@db/x"
ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.Error)]
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "CodecMismatch": (SECRET, SECRET),
    "SchemaMismatch": (1, 2),
    "UpperMismatch": (1, 2),
    "SinceViolation": (1, 2),
    "NotReadable": (1, 2),
    "OpaqueMismatch": (1, 2),
    "Conflict": ([("t", SECRET)],),
    "DiffOverflow": (SECRET, SECRET),
    "NegativeMultiplicity": (SECRET, SECRET),
}
STATUS = {
    404: {"UnknownShard", "UnknownTag"},
    409: {"KeyExists", "TagExists", "Conflict", "UpperMismatch", "SchemaMismatch", "OpaqueMismatch"}
    | {"AlreadyAppended", "BatchExpired"},
    410: {"SinceViolation", "LeaseExpired", "SubscriptionExpired", "ShardFinalized"},
    422: {"InvalidUpdate"},
    425: {"NotReadable"},
    503: {"StorageUnavailable", "Indeterminate"},
}
OF_PROGRAMS = {"CodecMismatch", "IncompatibleSchema", "InvalidLocation", "Unsupported", "Corruption"} | {
    "MissingPart",
    "DiffOverflow",
    "NegativeMultiplicity",
    "Error",
    "InvalidUsage",  # of most kinds
}


def made(cls: type[errors.Error]) -> errors.Error:
    if cls is errors.InvalidUsage:
        return cls(ap.UsageKind.CLOSED, SECRET)
    if cls is errors.KeyExists:
        return errors.KeyExists(SECRET, table="t")
    return cls(
        *ARGUMENTS.get(cls.__name__, ("the value is too long" if cls is ap.InvalidUpdate else SECRET,))
    )


def application(error: Exception) -> FastAPI:
    app = FastAPI()
    apf.add_exception_handlers(app)

    @app.get("/")
    async def fails() -> None:
        raise error

    return app


async def answered(app: FastAPI) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.get("/")


def test_every_error_has_a_row() -> None:
    assert {*ALL} == {*ROWS}
    assert set().union(*STATUS.values()) | OF_PROGRAMS == {cls.__name__ for cls in ALL}


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
async def test_the_answer_to_each_error(cls: type[errors.Error]) -> None:
    answer = await answered(application(made(cls)))
    wanted = next((status for status, names in STATUS.items() if cls.__name__ in names), 500)
    assert answer.status_code == wanted
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    assert ("retry-after" in answer.headers) == (wanted == 503)
    if wanted != 500:
        assert answer.headers["content-type"] == "application/problem+json"
        body = answer.json()
        assert [*body] == ["type", "title", "status", "detail", "error"]
        assert (body["status"], body["error"]) == (wanted, cls.__name__)


@pytest.mark.parametrize("kind", ap.UsageKind)
async def test_the_answer_to_each_kind_of_wrong_usage(kind: ap.UsageKind) -> None:
    answer = await answered(application(ap.InvalidUsage(kind, "why", shard_id="s1")))
    assert answer.status_code == (422 if kind in OF_CLIENTS else 500)
    assert ("why" in answer.text) == (kind in OF_CLIENTS)
    assert "s1" not in answer.text


def test_a_class_without_a_row_has_that_of_the_class_above() -> None:
    class Own(ap.Conflict):
        pass

    assert row_of(Own([])) is ROWS[ap.Conflict]


async def test_a_fault_of_the_program_goes_on_to_the_server() -> None:
    app = application(ap.Corruption(SECRET))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        with pytest.raises(ap.Corruption):
            await http.get("/")


async def test_a_handler_of_the_application_comes_first() -> None:
    app = application(ap.Conflict([]))

    @app.exception_handler(ap.Conflict)
    async def own(request: Any, error: Exception) -> Any:
        return PlainTextResponse("own", 418)

    assert (await answered(app)).status_code == 418


async def test_a_refused_value_is_told_at_a_bounded_length() -> None:
    answer = await answered(application(ap.InvalidUpdate("x" * 10_000, row=3)))
    assert answer.json()["detail"].startswith("row 3: xxx")
    assert len(answer.text) < 1000


async def test_after_how_long_to_try_again() -> None:
    app = FastAPI()
    apf.add_exception_handlers(app, retry_after_s=7)

    @app.get("/")
    async def fails() -> None:
        raise ap.StorageUnavailable(SECRET)

    assert (await answered(app)).headers["retry-after"] == "7"


def test_an_error_in_a_websocket_goes_on() -> None:
    app = FastAPI()
    apf.add_exception_handlers(app)

    @app.websocket("/ws")
    async def fails(socket: WebSocket) -> None:
        await socket.accept()
        raise ap.Conflict([])

    with TestClient(app) as http, pytest.raises(ap.Conflict), http.websocket_connect("/ws") as socket:
        socket.receive_text()
