"""Goal: a standby, which may lack acknowledged commits, is never taken for the primary."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.storage.postgres.consensus import PostgresConsensus
from aiopersist.testing import servers
from tests.support.schemas import SCHEMA

SETTINGS = ap.Settings(inline_writes_single_max_bytes=0, retry_timeout_s=1.0)


@asynccontextmanager
async def standby_of(server: servers.PostgresServer) -> AsyncIterator[servers.PostgresServer]:
    """A standby with the present data of `server`."""
    standby = servers.postgres_standby(server)
    try:
        yield await asyncio.to_thread(standby.__enter__)
    finally:
        await asyncio.to_thread(standby.__exit__, None, None, None)


@pytest.mark.slow
async def test_what_a_standby_does_not_know_is_no_leak(
    postgres_server: servers.PostgresServer, postgres_schema: str, tmp_path: Path
) -> None:
    """Goal: a client whose URL names a primary and a standby sees all appends and keeps their blobs,
    whichever server answers first; with standbys alone it waits for a primary."""
    blob, url = f"file://{tmp_path}", postgres_server.url(postgres_schema)
    async with await ap.open(blob=blob, consensus=url, settings=SETTINGS) as client:
        async with client.writer("t", SCHEMA) as w:
            await w.write([("early", 1)])
        async with standby_of(postgres_server) as standby, client.writer("t", SCHEMA) as w:
            await w.write([("late", 1)])
            alone = standby.url(postgres_schema)
            both = alone.replace("/postgres?", f",{postgres_server.host}:{postgres_server.port}/postgres?")
            async with await ap.open(
                blob=blob, consensus=both, settings=SETTINGS, maintenance=False
            ) as other:
                assert await other.upper("t") == await client.upper("t") == ap.Antichain(2)
                assert (await other.sweep_leaked_blobs(dry_run=False)).keys == ()
            await is_passed_over(PostgresConsensus(alone))
            lags = f"{alone}&target_session_attrs=standby"
            async with await ap.open(blob=blob, consensus=lags, settings=SETTINGS, readonly=True) as reader:
                assert await reader.upper("t") == ap.Antichain(1)
        async with client.reader("t") as r, r.snapshot() as s:
            assert await s.rows() == [("early", 1, 1), ("late", 1, 1)]


async def is_passed_over(store: PostgresConsensus) -> None:
    with pytest.raises(ap.StorageUnavailable, match="primary") as raised:
        await store.list_keys("")
    assert raised.value.retry
    await store.aclose()


@pytest.mark.parametrize("which", ["any", "standby", "prefer-standby", "read-only"])
async def test_only_a_readonly_store_may_ask_for_a_standby(which: str) -> None:
    url = f"postgres://h1,h2/d?target_session_attrs={which}"
    with pytest.raises(ap.InvalidLocation, match="primary or read-write"):
        PostgresConsensus(url)
    for store in (
        PostgresConsensus(url, readonly=True),
        PostgresConsensus("postgres://h1,h2/d?target_session_attrs=read-write"),
    ):
        await store.aclose()
