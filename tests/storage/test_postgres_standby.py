"""Goal: a standby, which may lack acknowledged commits, is never taken for the primary."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate
from aiopersist.storage.postgres import pool
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


@pytest.mark.slow
async def test_a_commit_that_waits_for_its_standby_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a statement that is cancelled while it waits is committed here alone: it would be seen, and taken
    for acknowledged, though a failover loses it. So nothing cancels it, neither a timeout nor the end of the
    store."""
    own = servers.postgres_server()
    server = await asyncio.to_thread(own.__enter__)
    admin = await asyncpg.connect(server.dsn())
    store, closing = (PostgresConsensus(server.url("s")) for _ in range(2))
    try:
        assert [await one.compare_and_set(key, None, b"0") for one, key in ((store, "a"), (closing, "b"))]
        monkeypatch.setattr(pool, "STATEMENT_TIMEOUT_S", 4.0)
        monkeypatch.setattr(pool, "CLOSE_TIMEOUT_S", 0.1)
        for one in (store, closing):
            one._pool._watchdog.close()  # which would look again only when the first ones' time is over
        await set_standby(admin, "nobody")
        last = 0
        with pytest.raises(Indeterminate):
            while await store.compare_and_set("a", last, b"1"):  # the server takes a moment to begin
                last += 1
        late = asyncio.create_task(closing.compare_and_set("b", 0, b"1"))
        await until(admin, "SELECT count(*) = 2 FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
        await closing.aclose()
        with pytest.raises(Indeterminate):
            await late
        heads = await store.heads({"a": None, "b": None})
        assert {key: head and head.seqno for key, head in heads.items()} == {"a": last, "b": 0}
        await set_standby(admin, "")
        await until(admin, f"SELECT sum(seqno) = {last} + 2 FROM s.heads")
    finally:
        await store.aclose()
        await admin.close()
        await asyncio.to_thread(own.__exit__, None, None, None)


async def set_standby(admin: "asyncpg.Connection[asyncpg.Record]", name: str) -> None:
    """Let commits wait for the standby of that name; for none, if it is empty."""
    await admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'")
    await admin.execute("SELECT pg_reload_conf()")
    await until(admin, f"SELECT current_setting('synchronous_standby_names') = '{name}'")


async def until(admin: "asyncpg.Connection[asyncpg.Record]", question: str) -> None:
    async with asyncio.timeout(50):
        while not await admin.fetchval(question):
            await asyncio.sleep(0.02)


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
