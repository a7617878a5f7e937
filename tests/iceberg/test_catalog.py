"""Goal: engines attach to the catalog, find the published tables at their newest version, and write
nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

import aiopersist as ap
from aiopersist import fastapi as apf
from aiopersist.storage.urls import open_blob
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome
from tests.iceberg.kit import SETTINGS, by_pyiceberg, contents, of_arrow
from tests.support.schemas import SCHEMA


@asynccontextmanager
async def served(client: ap.Client) -> AsyncIterator[str]:
    """The address of an application with the catalog."""
    app = FastAPI()
    app.include_router(apf.iceberg_catalog(client))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve([sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}/iceberg"
        finally:
            server.should_exit = True
            await serving


def attached(address: str) -> RestCatalog:
    return RestCatalog("test", uri=address)


async def append(client: ap.Client, rows: int) -> None:
    async with client.writer("orders", SCHEMA) as w:
        time: Any = w.upper.time
        await w.compare_and_append([(f"{time}-{n}", n, time, 1) for n in range(rows)], time, time + 1)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[ap.Client]:
    async with ap.open(tmp_path, settings=SETTINGS) as client:
        yield client


def look(address: str) -> dict[str, Any]:
    """What pyiceberg sees, in a thread of its own: its calls block."""
    catalog = attached(address)
    table = catalog.load_table("aiopersist.orders")
    return {
        "namespaces": catalog.list_namespaces(),
        "tables": catalog.list_tables("aiopersist"),
        "exists": [catalog.table_exists(f"aiopersist.{name}") for name in ("orders", "other")],
        "rows": of_arrow(table.scan().to_arrow()),
        "location": table.metadata_location,
    }


async def test_pyiceberg_attaches(client: ap.Client) -> None:
    await append(client, 3)
    async with served(client) as address:
        assert (await asyncio.to_thread(lambda: attached(address).list_tables("aiopersist"))) == []
        published = await client.publish("orders")
        seen = await asyncio.to_thread(look, address)
        assert seen == {
            "namespaces": [("aiopersist",)],
            "tables": [("aiopersist", "orders")],
            "exists": [True, False],
            "rows": await contents(client, "orders"),
            "location": published.metadata,
        }
        await append(client, 2)
        published = await client.publish("orders")
        seen = await asyncio.to_thread(look, address)
        assert (seen["rows"], seen["location"]) == (await contents(client, "orders"), published.metadata)
        await client.unpublish("orders")
        with pytest.raises(NoSuchTableError):
            await asyncio.to_thread(look, address)


def write(address: str) -> None:
    table = attached(address).load_table("aiopersist.orders")
    table.append(table.scan().to_arrow())


async def test_engines_cannot_write(client: ap.Client) -> None:
    await append(client, 3)
    published = await client.publish("orders")
    async with served(client) as address:
        with pytest.raises(Exception, match=r"read-only|does not support|not supported"):
            await asyncio.to_thread(write, address)
        with pytest.raises(Exception, match=r"read-only|does not support|not supported"):
            await asyncio.to_thread(lambda: attached(address).drop_table("aiopersist.orders"))
        assert (await asyncio.to_thread(look, address))["location"] == published.metadata


async def test_errors_are_those_of_the_specification(client: ap.Client) -> None:
    await append(client, 1)
    await client.publish("orders")
    async with served(client) as address, httpx.AsyncClient(base_url=address) as http:
        config = (await http.get("/v1/config")).json()
        assert len(config["endpoints"]) == 6 and not config["defaults"] and not config["overrides"]
        for path, kind, status in (
            ("/v1/namespaces/x", "NoSuchNamespaceException", 404),
            ("/v1/namespaces/x/tables", "NoSuchNamespaceException", 404),
            ("/v1/namespaces/aiopersist/tables/x", "NoSuchTableException", 404),
            ("/v1/namespaces/aiopersist/tables/%2E%2E", "NoSuchTableException", 404),
            ("/v1/namespaces/aiopersist/views", "UnsupportedOperationException", 406),
        ):
            answer = await http.get(path)
            assert answer.status_code == status, path
            assert answer.json()["error"] | {"message": ""} == {"message": "", "type": kind, "code": status}
        for method in ("POST", "DELETE", "PUT", "PATCH"):
            answer = await http.request(method, "/v1/namespaces/aiopersist/tables/orders")
            assert answer.status_code == 406
        assert (await http.head("/v1/namespaces/x")).status_code == 404
        assert (await http.get("/v1/namespaces?parent=aiopersist")).json() == {"namespaces": []}
        with pytest.raises(NoSuchNamespaceError):
            await asyncio.to_thread(lambda: attached(address).list_tables("other"))
        with pytest.raises(NoSuchTableError, match=r"'orders' in the namespace 'aiopersist\.eu'"):
            await asyncio.to_thread(lambda: attached(address).load_table("aiopersist.eu.orders"))


@pytest.mark.parametrize("name", ["v99", "v007", "v\u0663\u0664", "v0", "v123456789012345678901"], ids=ascii)
@pytest.mark.parametrize("data", [b"", b"junk", b"\xff", b"[1]", b'{"properties": {}}'])
async def test_metadata_of_somebody_else(tmp_path: Path, client: ap.Client, name: str, data: bytes) -> None:
    await append(client, 1)
    published = await client.publish("orders")
    folder = tmp_path / "blob/iceberg/orders/metadata"
    (folder / f"{name}.metadata.json").write_bytes(data)
    (folder / "version-hint.text").write_bytes(b"")
    async with served(client) as address, httpx.AsyncClient(base_url=address, timeout=20) as http:
        answer = await http.get("/v1/namespaces/aiopersist/tables/orders")
        assert answer.json()["metadata-location"] == published.metadata
        await append(client, 1)
        second = await client.publish("orders")
        assert second.version == (100 if name == "v99" else 2)
        answer = await http.get("/v1/namespaces/aiopersist/tables/orders")
        assert answer.json()["metadata-location"] == second.metadata
        assert by_pyiceberg(second.location) == await contents(client, "orders")  # by the hint
        (folder / f"v{second.version}.metadata.json").write_bytes(data)
        for version in range(second.version):
            (folder / f"v{version}.metadata.json").unlink(missing_ok=True)
        answer = await http.get("/v1/namespaces/aiopersist/tables/orders")
        assert answer.json()["error"]["type"] == "NoSuchTableException"


async def test_a_store_that_does_not_answer(tmp_path: Path) -> None:
    faults = Faults()
    settings = ap.Settings(retry_timeout_s=0.05)
    async with ap.open(tmp_path, settings=SETTINGS) as client:
        await append(client, 1)
        await client.publish("orders")
    blob = FaultyBlob(open_blob(f"file://{tmp_path}/blob"), faults)
    async with ap.open(blob=blob, consensus=f"sqlite://{tmp_path}/state.db", settings=settings) as client:
        async with served(client) as address, httpx.AsyncClient(base_url=address) as http:
            assert (await http.get("/v1/namespaces/aiopersist/tables/orders")).status_code == 200
            faults.rates = {Outcome.REFUSED: 1.0}
            answer = await http.get("/v1/namespaces/aiopersist/tables/orders")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, 503)
            faults.heal()
