"""The locations of a stash."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from aiopersist.testing import servers
from tests.stash.attack import LateProxy
from tests.stash.faults_kit import Way


@pytest.fixture(params=["mem", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return f"sqlite://{tmp_path}/st.db" if request.param == "sqlite" else f"mem://{uuid.uuid4().hex}"


@pytest.fixture
async def way(postgres_server: servers.PostgresServer, postgres_schema: str) -> AsyncIterator[Way]:
    settings = {"search_path": postgres_schema}
    admin = await asyncpg.connect(postgres_server.dsn(), server_settings=settings)
    async with LateProxy(postgres_server.host, postgres_server.port) as proxy:
        url = postgres_server.url(postgres_schema, host=proxy.host, port=proxy.port)
        yield Way(proxy, url, postgres_server.url(postgres_schema), admin)
    await admin.close()
