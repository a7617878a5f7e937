"""Goal: on a real Postgres, an append whose connection dies at the worst moment is in the shard once or
not at all, and `settle` says which."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.testing.proxy import completes_command
from aiopersist.testing.servers import PostgresServer
from tests.conftest import PostgresProxy
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA

pytestmark = pytest.mark.usefixtures("started_postgres")


@pytest.fixture
async def direct(postgres_proxy: PostgresProxy, tmp_path: Path) -> AsyncIterator[ap.Client]:
    """A client that nothing happens to."""
    async with ap.open(blob=f"file://{tmp_path}", consensus=postgres_proxy.direct_url) as client:
        yield client


@pytest.fixture
async def client(
    postgres_proxy: PostgresProxy, tmp_path: Path, direct: ap.Client
) -> AsyncIterator[ap.Client]:
    """A client behind the proxy."""
    async with ap.open(blob=f"file://{tmp_path}", consensus=postgres_proxy.url) as client:
        yield client


async def rows(direct: ap.Client) -> list[Any]:
    async with direct.reader("t", SCHEMA) as r, r.snapshot() as s:
        return await s.rows()


@pytest.mark.parametrize("method", ["compare_and_append", "append", "write"])
async def test_a_lost_answer_neither_loses_nor_doubles(
    client: ap.Client, direct: ap.Client, postgres_proxy: PostgresProxy, method: str
) -> None:
    """Goal: the server has committed, the connection is cut: the append returns, and is there once."""
    async with client.writer("t", SCHEMA) as w:
        for n in range(12):
            lost = postgres_proxy.proxy.swallow_answers_then_cut(completes_command)
            if method == "write":
                assert await w.write([(f"{n:02}", n)]) == n
            else:
                await getattr(w, method)([(f"{n:02}", n, n, 1)], n, n + 1)
            assert lost.done()
            assert await w.settle() is None
        assert w.upper == ap.Antichain(12)
        assert await rows(direct) == [(f"{n:02}", n, 1) for n in range(12)]


async def test_cuts_at_any_moment(
    client: ap.Client, direct: ap.Client, postgres_proxy: PostgresProxy
) -> None:
    """Goal: four writers append while all connections are cut again and again: nothing is lost or doubled,
    and each mismatch was one. The pauses grow, so that a slow machine comes to an end."""
    done = asyncio.Event()

    async def cut() -> None:
        pause_s = 0.02
        while not done.is_set():
            await asyncio.sleep(pause_s)
            postgres_proxy.proxy.cut()
            pause_s *= 1.03

    async def writes(name: str) -> list[Any]:
        async with client.writer("t", SCHEMA) as w:
            return [(f"{name}{n:02}", n, await w.write([(f"{name}{n:02}", n)])) for n in range(25)]

    cutter = asyncio.create_task(cut())
    try:
        written = await asyncio.gather(*(writes(name) for name in "abcd"))
    finally:
        done.set()
        await cutter
    assert await rows(direct) == sorted((key, val, 1) for part in written for key, val, _ in part)
    times = [time for part in written for _, _, time in part]
    assert len(set(times)) == len(times)  # of four handles no two share a commit


@asynccontextmanager
async def locked(server: PostgresServer, schema: str, w: ap.WriteHandle[Any, Any]) -> AsyncIterator[None]:
    """While another connection holds the row of the shard's head."""
    connection = await asyncpg.connect(server.dsn())
    try:
        async with connection.transaction():
            await connection.execute(f"SET search_path TO {schema}")
            found = await connection.fetch(
                "SELECT FROM heads WHERE key = $1 FOR UPDATE", consensus_key(w.shard_id)
            )
            assert len(found) == 1
            yield
    finally:
        await connection.close()


async def waiting_for_locks(server: PostgresServer) -> int:
    connection = await asyncpg.connect(server.dsn())
    try:
        return await connection.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        )
    finally:
        await connection.close()


@pytest.mark.parametrize("die", ["cut_clients", "cut", None])
async def test_a_statement_behind_a_row_lock_whose_connection_dies(
    client: ap.Client,
    direct: ap.Client,
    postgres_proxy: PostgresProxy,
    postgres_server: PostgresServer,
    postgres_schema: str,
    die: str | None,
) -> None:
    """Goal: the append is cancelled, its statement waits in the server, its connection is gone, a look does
    not find its version; then it lands. `settle` agrees with what is there, at the end and for good."""
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("first", 0, 0, 1)], 0, 1)
        async with locked(postgres_server, postgres_schema, w):
            append = asyncio.create_task(w.compare_and_append([("late", 1, 1, 1)], 1, 2))
            async with asyncio.timeout(50):
                while not await waiting_for_locks(postgres_server):
                    await asyncio.sleep(0.01)
            append.cancel()
            with pytest.raises(asyncio.CancelledError):
                await append
            if die is not None:
                getattr(postgres_proxy.proxy, die)()
            settling = asyncio.create_task(w.settle())
            await asyncio.sleep(1.5)  # it has looked by now
            assert not settling.done()
            assert await stack_of(direct).consensus.scan(consensus_key(w.shard_id), 3, 1) == []
        async with asyncio.timeout(50):
            outcome = await settling
        upper = await w.fetch_recent_upper()
        late = [("late", 1, 1)] if isinstance(outcome, ap.Committed) else []
        assert outcome == (ap.Committed(ap.Antichain(2)) if late else ap.NotCommitted())
        assert upper == ap.Antichain(2 if late else 1)
        await asyncio.sleep(0.2)
        assert await rows(direct) == [("first", 0, 1), *late]
        if not late:
            await w.compare_and_append([("late", 1, 1, 1)], 1, 2)
        assert await rows(direct) == [("first", 0, 1), ("late", 1, 1)]


async def test_a_call_that_waits_for_a_dead_connection_goes_on(
    client: ap.Client,
    direct: ap.Client,
    postgres_proxy: PostgresProxy,
    postgres_server: PostgresServer,
    postgres_schema: str,
) -> None:
    """Goal: not cancelled: the answer is lost while the statement waits; it is sent again and lands once."""
    async with client.writer("t", SCHEMA) as w:
        async with locked(postgres_server, postgres_schema, w):
            append = asyncio.create_task(w.compare_and_append([("a", 1, 0, 1)], 0, 1))
            async with asyncio.timeout(50):
                while not await waiting_for_locks(postgres_server):
                    await asyncio.sleep(0.01)
            postgres_proxy.proxy.cut_clients()
            await asyncio.sleep(0.3)
            assert not append.done()
        async with asyncio.timeout(50):
            await append
        assert await rows(direct) == [("a", 1, 1)]
        assert await w.settle() is None


async def test_many_cancelled_appends(client: ap.Client, direct: ap.Client) -> None:
    """Goal: cancelled within a millisecond or two of sending, most land: what `settle` says is what is
    there."""
    async with client.writer("t", SCHEMA) as w:
        expected, upper = [], 0
        for n in range(60):
            append = asyncio.create_task(w.compare_and_append([(f"{n:02}", n, upper, 1)], upper, upper + 1))
            await asyncio.sleep(n % 6 * 0.0004)
            append.cancel()
            outcome: Any = None
            try:
                await append
            except asyncio.CancelledError:
                outcome = await w.settle()
            if outcome != ap.NotCommitted():
                if n % 6:  # before its first step nothing is known of it
                    assert outcome in (None, ap.Committed(ap.Antichain(upper + 1)))
                if outcome is not None or (append.done() and not append.cancelled()):
                    expected.append((f"{n:02}", n, 1))
                    upper += 1
        assert await w.fetch_recent_upper() == ap.Antichain(upper)
        assert await rows(direct) == expected
