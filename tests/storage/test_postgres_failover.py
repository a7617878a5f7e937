"""Goal: failovers, lost listeners and racing first users leave nothing behind."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import pytest

from aiopersist.base.errors import Error, StorageUnavailable
from aiopersist.storage.postgres.consensus import PostgresConsensus
from aiopersist.storage.postgres.hints import PAYLOAD_BYTES_MAX, payloads
from aiopersist.testing.servers import PostgresServer
from tests.storage.postgres_kit import (
    Admin,
    consensus,  # noqa: F401  # a fixture
    make_keys,
)
from tests.support.clock import Hurried

CONNECTED = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'aiopersist' AND usename = $1"


CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1"


@pytest.fixture
async def role(admin: Admin, postgres_schema: str) -> AsyncIterator[str]:
    """A superuser for this test alone, so that its settings concern no other test."""
    name = f"r_{postgres_schema}"[:60]
    await admin.execute(f'CREATE ROLE "{name}" LOGIN SUPERUSER')
    yield name
    await admin.execute("SET default_transaction_read_only = off")
    await admin.execute(CUT, name)
    await admin.execute(f'DROP OWNED BY "{name}" CASCADE; DROP ROLE "{name}"')


FIRST_USER = """
import asyncio, sys
from aiopersist.storage.postgres.consensus import PostgresConsensus
async def main(url):
    handles = [PostgresConsensus(url) for _ in range(4)]
    won = await asyncio.gather(*(h.compare_and_set("k", None, b"x") for h in handles for _ in range(4)))
    print(won.count(True))
    for handle in handles:
        await handle.aclose()
asyncio.run(main(sys.argv[1]))
"""


async def test_what_a_failover_leaves_is_not_used_again(postgres_url: str, role: str, admin: Admin) -> None:
    """Connections that were made while the server was read-only, and connections that were reading when
    another one was refused, are closed: once the server is writable, the next write succeeds."""
    consensus = PostgresConsensus(postgres_url.replace("://postgres@", f"://{role}@"))
    keys = await make_keys(consensus, 4)
    await admin.execute(f'ALTER ROLE "{role}" SET default_transaction_read_only = on')
    await admin.execute(CUT, role)
    async with asyncio.timeout(50):
        while await admin.fetchval(CONNECTED, role):
            await asyncio.sleep(0.01)
    await asyncio.gather(*(consensus.head(key) for key in keys * 3))
    slow = asyncio.create_task(consensus._pool.read(lambda c: c.fetchval("SELECT pg_sleep(0.5)")))
    await asyncio.sleep(0.05)
    for _ in range(2):
        with pytest.raises(StorageUnavailable, match="25006"):
            await consensus.compare_and_set("k00", 0, b"1")
    await admin.execute(f'ALTER ROLE "{role}" SET default_transaction_read_only = off')
    await slow
    for key in keys:
        assert await consensus.compare_and_set(key, 0, b"1")
    assert await asyncio.gather(*(consensus.compare_and_set(key, 1, b"2") for key in keys)) == [True] * 4
    await consensus.aclose()


async def test_a_server_that_refuses_listeners_is_asked_ever_less(
    postgres_url: str, role: str, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    """The server closes each connection that listens at once: the attempts come further and further apart."""
    runtime = Hurried()
    consensus = PostgresConsensus(postgres_url.replace("://postgres@", f"://{role}@"), runtime=runtime)
    await make_keys(consensus, 1)
    await admin.execute(f"ALTER ROLE \"{role}\" SET idle_session_timeout = '1ms'")
    attempts, woken = 0, 0
    connect = consensus._pool.connect

    async def counted() -> object:
        nonlocal attempts
        attempts += 1
        return await connect()

    consensus._pool.connect = counted  # type: ignore[method-assign, assignment]
    with caplog.at_level("WARNING", "aiopersist"):
        async with asyncio.timeout(50):
            while attempts < 20:
                hint = asyncio.create_task(consensus.watch("k00"))
                await asyncio.wait([hint], timeout=0.02)
                woken += hint.done()
                hint.cancel()
    assert runtime.passed > 3 * attempts  # delays are drawn by chance: 20 of them last 72 s at least
    assert woken <= attempts
    assert len(caplog.records) == 1
    await consensus.aclose()


async def test_every_connection_waits_for_the_disk(
    consensus: PostgresConsensus, postgres_server: PostgresServer, admin: Admin
) -> None:
    await admin.execute("ALTER ROLE postgres SET synchronous_commit = off")
    await admin.execute("ALTER ROLE postgres SET default_transaction_isolation = 'serializable'")
    try:
        for name, value in (
            ("synchronous_commit", "on"),
            ("default_transaction_isolation", "read committed"),
        ):
            assert await consensus._pool.read(lambda c, name=name: c.fetchval(f"SHOW {name}")) == value  # type: ignore[misc]
    finally:
        await admin.execute("ALTER ROLE postgres RESET ALL")


async def test_racing_first_users_in_several_processes(postgres_url: str) -> None:
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", FIRST_USER, postgres_url, stdout=asyncio.subprocess.PIPE
        )
        for _ in range(3)
    ]
    printed = [(await process.communicate())[0] for process in processes]
    assert sorted(printed) == [b"0\n", b"0\n", b"1\n"]


async def test_a_listener_that_lost_its_connection_hears_again(
    consensus: PostgresConsensus, postgres_url: str, admin: Admin
) -> None:
    other = PostgresConsensus(postgres_url)
    await make_keys(other, 1)
    await asyncio.wait_for(consensus.watch("k00"), 30)  # it listens
    for seqno in range(3):
        waiting = asyncio.create_task(consensus.watch("k00"))
        await asyncio.sleep(0.05)
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'"
        )
        await asyncio.wait_for(waiting, 30)  # what moved meanwhile came without a hint
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(consensus.watch("k00"))
        await asyncio.sleep(0.05)
        assert await other.compare_and_set("k00", seqno, b"x")
        await asyncio.wait_for(waiting, 30)
    await other.aclose()


@pytest.mark.parametrize("sizes", [[1], [10] * 2000, [2000] * 9, [1, 2000, 1]], ids=len)
def test_hints_fit(sizes: list[int]) -> None:
    keys = ["é" * (size // 2) + str(i) for i, size in enumerate(sizes)]
    messages = payloads("sender", keys)
    assert all(len(message.encode()) <= PAYLOAD_BYTES_MAX for message in messages)
    assert [key for message in messages for key in json.loads(message)[1:]] == keys


def test_a_key_that_does_not_fit_stands_for_all() -> None:
    assert payloads("sender", ["a", "\x01" * 2000]) == ['["sender", "*"]']


async def test_closing_leaves_no_connection(postgres_url: str, postgres_schema: str, admin: Admin) -> None:
    consensus = PostgresConsensus(postgres_url)
    await make_keys(consensus, 20)
    waiting = asyncio.create_task(consensus.watch("k00"))
    commits = [asyncio.create_task(consensus.compare_and_set(f"k{i:02}", 0, b"1")) for i in range(20)]
    await asyncio.sleep(0)
    await consensus.aclose()
    await asyncio.wait_for(waiting, 30)
    for outcome in await asyncio.gather(*commits, return_exceptions=True):
        assert outcome is True or isinstance(outcome, Error)
    count = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE $1 AND pid <> pg_backend_pid()"
    async with asyncio.timeout(50):
        while await admin.fetchval(count, f"%{postgres_schema}%"):
            await asyncio.sleep(0.02)
