"""pgbouncer, or the reason why there is none."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiopersist.testing import servers
from aiopersist.testing.pgbouncer import pgbouncer, pgbouncer_path

REQUIRED = os.environ.get("AIOPERSIST_TEST_REQUIRE_PGBOUNCER") == "1"


@contextmanager
def pooler(
    postgres: servers.PostgresServer, mode: str = "transaction", *, port: int | None = None, **options: object
) -> Iterator[servers.PostgresServer]:
    """See `aiopersist.testing.pgbouncer`; skips the test if there is none, unless one is required."""
    if pgbouncer_path() is None:
        if REQUIRED:
            pytest.fail("AIOPERSIST_TEST_REQUIRE_PGBOUNCER=1, and there is none: apt-get install pgbouncer")
        pytest.skip("there is no pgbouncer: apt-get install pgbouncer")
    with pgbouncer(postgres, mode, port=port, **options) as server:
        yield server


@pytest.fixture(scope="session")
def bouncer(postgres_server: servers.PostgresServer) -> Iterator[servers.PostgresServer]:
    """The real Postgres behind a pgbouncer in transaction mode: all clients share three connections."""
    with pooler(postgres_server, default_pool_size=3) as server:
        yield server
