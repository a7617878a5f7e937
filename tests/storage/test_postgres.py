"""Postgres: groups under attack, connections that die, first users, secrets."""

import asyncio
import random
import socket
import sys
from collections.abc import Awaitable, Callable

import pytest

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.storage.consensus import Entry, Versioned
from aiopersist.storage.postgres import pool
from aiopersist.storage.postgres.consensus import PostgresConsensus
from aiopersist.testing.proxy import completes_command
from aiopersist.testing.servers import PostgresServer
from tests.storage.postgres_kit import (
    Admin,
    consensus,  # noqa: F401  # a fixture
    make_keys,
)


async def check_tables(admin: Admin) -> None:
    """Each head has its version, each log is contiguous up to the head."""
    rows = await admin.fetch(
        """SELECT h.key, h.seqno, count(l.seqno) AS n, min(l.seqno) AS first, max(l.seqno) AS last
           FROM heads h LEFT JOIN log l ON l.key = h.key GROUP BY h.key, h.seqno"""
    )
    for row in rows:
        assert row["last"] == row["seqno"]
        assert row["n"] == row["last"] - row["first"] + 1
    assert await admin.fetchval("SELECT count(*) FROM log WHERE key NOT IN (SELECT key FROM heads)") == 0


async def test_groups_go_as_one_statement(consensus: PostgresConsensus, admin: Admin) -> None:
    keys = await make_keys(consensus, 64)
    sent: list[int] = []
    real = consensus._pool.use

    async def use(work: Callable[[object], Awaitable[object]]) -> object:
        sent.append(1)
        return await real(work)

    consensus._pool.use = use  # type: ignore[method-assign, assignment]
    assert all(await asyncio.gather(*(consensus.compare_and_set(key, 0, b"1") for key in keys)))
    assert len(sent) <= 3  # the group, and hints
    await check_tables(admin)


async def test_each_of_a_group_has_its_own_outcome(consensus: PostgresConsensus, admin: Admin) -> None:
    """64 keys race: some entries expect the wrong head, a trigger refuses others."""
    keys = await make_keys(consensus, 64)
    await admin.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN RAISE EXCEPTION 'refused'; END $$;
           CREATE TRIGGER refuse BEFORE INSERT ON log FOR EACH ROW
           WHEN (new.key IN ('k07', 'k33')) EXECUTE FUNCTION refuse()"""
    )
    seqnos = dict.fromkeys(keys, 0)

    async def one(key: str, number: int, round_: int) -> None:
        stale = (number + round_) % 5 == 0
        attempt = consensus.compare_and_set(key, seqnos[key] + stale * 3, b"%d" % round_)
        if key in ("k07", "k33") and not stale:
            with pytest.raises(StorageUnavailable, match="refused"):
                await attempt
        else:
            assert await attempt is not stale
            seqnos[key] += not stale

    for round_ in range(6):
        await asyncio.gather(*(one(key, number, round_) for number, key in enumerate(keys)))
    heads = {row["key"]: row["seqno"] for row in await admin.fetch("SELECT key, seqno FROM heads")}
    assert heads == seqnos
    await check_tables(admin)


async def test_a_locked_row_keeps_no_other_key_waiting(consensus: PostgresConsensus, admin: Admin) -> None:
    keys = await make_keys(consensus, 32)
    held = ["k03", "k04", "k30"]
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute("SELECT FROM heads WHERE key = ANY($1) FOR UPDATE", held)
    tasks = {key: asyncio.create_task(consensus.compare_and_set(key, 0, b"1")) for key in keys}
    free = [task for key, task in tasks.items() if key not in held]
    assert await asyncio.wait_for(asyncio.gather(*free), 30) == [True] * 29
    await admin.execute("UPDATE heads SET seqno = 1 WHERE key = 'k04'")
    await admin.execute("INSERT INTO log VALUES ('k04', 1, 'theirs')")
    assert not any(tasks[key].done() for key in held)
    assert await asyncio.wait_for(asyncio.gather(*(consensus.head(key) for key in keys)), 30)
    await transaction.commit()
    assert [await tasks[key] for key in held] == [True, False, True]
    assert await consensus.head("k04") == Versioned(1, b"theirs")
    await check_tables(admin)


async def test_two_instances_with_the_same_keys_do_not_deadlock(
    consensus: PostgresConsensus, postgres_url: str, admin: Admin
) -> None:
    other = PostgresConsensus(postgres_url)
    keys = await make_keys(consensus, 64)
    won: dict[str, int] = dict.fromkeys(keys, 0)

    async def contend(handle: PostgresConsensus, key: str) -> None:
        for _ in range(8):
            head = await handle.head(key)
            assert head is not None
            result = await handle.compare_and_set(key, head.seqno, b"x")
            won[key] += result

    async def together(handle: PostgresConsensus, order: list[str]) -> None:
        for _ in range(5):
            heads = await asyncio.gather(*(handle.head(key) for key in order))
            entries = [Entry(key, head.seqno, b"m") for key, head in zip(order, heads, strict=True) if head]
            if await handle.compare_and_set_many(entries):
                for key in order:
                    won[key] += 1

    shuffled = random.Random(1).sample(keys, 10)
    await asyncio.gather(
        *(contend(handle, key) for key in keys for handle in (consensus, other)),
        together(consensus, shuffled),
        together(other, shuffled[::-1]),
    )
    heads = {row["key"]: row["seqno"] for row in await admin.fetch("SELECT key, seqno FROM heads")}
    assert heads == won
    assert await admin.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'") == 0
    await check_tables(admin)
    await other.aclose()


async def test_connections_that_are_killed_at_random(
    consensus: PostgresConsensus, postgres_schema: str, admin: Admin
) -> None:
    """Each outcome agrees with the log: True is there, False and determinate failures are not."""
    keys = await make_keys(consensus, 16)
    outcomes: dict[tuple[str, bytes], object] = {}
    done = asyncio.Event()

    async def kill() -> None:
        while not done.is_set():
            await admin.execute(
                """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                   WHERE application_name = 'aiopersist' AND query LIKE $1 AND random() < 0.5""",
                f"%{postgres_schema}%",
            )
            await asyncio.sleep(0.004)

    async def patient_head(key: str) -> Versioned:
        while True:
            try:
                head = await consensus.head(key)
            except StorageUnavailable:  # killed three times in a row
                continue
            assert head is not None
            return head

    async def commit(key: str) -> None:
        for i in range(60):
            head = await patient_head(key)
            data = f"{key}-{i}".encode()
            try:
                outcomes[key, data] = await consensus.compare_and_set(key, head.seqno, data)
            except (Indeterminate, StorageUnavailable) as error:
                outcomes[key, data] = type(error)

    killing = asyncio.create_task(kill())
    try:
        await asyncio.gather(*map(commit, keys))
    finally:
        done.set()
        await killing
    written = {(row["key"], row["data"]) for row in await admin.fetch("SELECT key, data FROM log")}
    for entry, outcome in outcomes.items():
        if outcome is not Indeterminate:
            assert (entry in written) == (outcome is True)
    assert Indeterminate in outcomes.values() and True in outcomes.values()
    await check_tables(admin)


async def test_connections_that_idle_are_killed(consensus: PostgresConsensus, admin: Admin) -> None:
    """A read does not fail, nor does a compare-and-set after the event loop noticed."""
    await make_keys(consensus, 3)
    for seqno in range(5):
        await asyncio.gather(*(consensus.head("k01") for _ in range(8)))
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiopersist'"
        )
        assert await consensus.head("k00") is not None
        assert await consensus.compare_and_set("k01", seqno, b"x") is True


async def test_truncate_races_with_compare_and_set(consensus: PostgresConsensus, admin: Admin) -> None:
    keys = await make_keys(consensus, 4)

    async def write(key: str) -> None:
        for seqno in range(80):
            assert await consensus.compare_and_set(key, seqno, b"%d" % (seqno + 1))

    async def cut(key: str) -> None:
        seqno = 0
        while seqno < 80:
            head = await consensus.head(key)
            assert head is not None
            seqno = head.seqno
            await consensus.truncate(key, seqno)

    await asyncio.gather(*(action(key) for key in keys for action in (write, cut, cut)))
    await check_tables(admin)
    assert await admin.fetchval("SELECT count(*) FROM log") == 4


@pytest.mark.parametrize("many", [False, True])
async def test_a_cancelled_caller_leaves_the_statement_alone(
    consensus: PostgresConsensus, admin: Admin, many: bool
) -> None:
    """The statement waits for a lock when its caller gives up, and lands when it gets the lock."""
    await make_keys(consensus, 1)
    pids = "SELECT array_agg(pid) FROM pg_stat_activity WHERE application_name = 'aiopersist'"
    before = await admin.fetchval(pids)
    transaction = admin.transaction()
    await transaction.start()
    await admin.execute("SELECT FROM heads FOR UPDATE")
    one, several = consensus.compare_and_set, consensus.compare_and_set_many
    task = asyncio.create_task(several([Entry("k00", 0, b"1")]) if many else one("k00", 0, b"1"))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await transaction.commit()
    async with asyncio.timeout(50):
        while await consensus.head("k00") != Versioned(1, b"1"):
            await asyncio.sleep(0.01)
    assert set(before) <= set(await admin.fetchval(pids))  # each connection lives on


async def test_an_answer_that_is_lost(postgres_proxy: "object") -> None:
    proxy, url, direct_url = postgres_proxy  # type: ignore[misc]
    consensus, direct = PostgresConsensus(url), PostgresConsensus(direct_url)
    assert await direct.compare_and_set("k", None, b"0")
    assert await consensus.head("k")
    lost = proxy.swallow_answers_then_cut(completes_command)
    with pytest.raises(Indeterminate):
        await consensus.compare_and_set("k", 0, b"1")
    await lost
    assert await direct.head("k") == Versioned(1, b"1")
    await consensus.aclose()
    await direct.aclose()


def error_of_a_pooler(fields: dict[str, str]) -> bytes:
    """An error, and that the next statement may come."""
    body = b"".join(f"{name}{text}\0".encode() for name, text in fields.items()) + b"\0"
    return b"E" + (len(body) + 4).to_bytes(4, "big") + body + b"Z\0\0\0\5I"


@pytest.mark.parametrize("place", [{}, {"F": "execMain.c", "L": "1"}], ids=["pooler", "server"])
@pytest.mark.parametrize("state", ["08006", "08P01", "58000", "40001", "XX000", "40003", "08007"])
@pytest.mark.parametrize("severity", ["ERROR", "FATAL"])
async def test_an_error_after_the_commit_decides_nothing(
    postgres_proxy: "object", state: str, severity: str, place: dict[str, str]
) -> None:
    """Goal: what answers instead of the server, after the commit, is believed by nobody. The server names
    the place in its source, a pooler does not. A server (or one that speaks its protocol) may itself say
    that it does not know: by the code, or by ending the session."""
    if place and severity == "ERROR" and state not in ("40003", "08007"):
        pytest.skip("that is how the server says that nothing happened")
    proxy, url, direct_url = postgres_proxy  # type: ignore[misc]
    consensus, direct = PostgresConsensus(url), PostgresConsensus(direct_url)
    assert await consensus.compare_and_set("k", None, b"0")
    assert await consensus.compare_and_set("k", 0, b"1")  # it is prepared now
    fields = {"S": severity, "V": severity, "C": state, "M": "remote server read/write error", **place}
    told = error_of_a_pooler(fields)
    proxy.answered = lambda answer: told if b"SELECT 1\0" in answer else answer
    with pytest.raises(Indeterminate, match="remote server"):
        await consensus.compare_and_set("k", 1, b"2")
    proxy.answered = bytes
    assert await direct.head("k") == Versioned(2, b"2")
    assert await consensus.compare_and_set("k", 2, b"3")
    await consensus.aclose()
    await direct.aclose()


async def test_a_server_that_is_not_there() -> None:
    consensus = PostgresConsensus("postgres://me:hunter2@127.0.0.1:1/db")
    for call in (consensus.head("k"), consensus.compare_and_set("k", None, b""), consensus.now()):
        with pytest.raises(StorageUnavailable) as caught:
            await call
        assert caught.value.retry
        assert "hunter2" not in str(caught.value)
    await consensus.aclose()


async def test_waiting_helps_neither_a_stranger_nor_a_missing_database(
    postgres_server: PostgresServer, admin: Admin
) -> None:
    await admin.execute("CREATE ROLE reader LOGIN PASSWORD 'hunter2'")
    host = f"{postgres_server.host}:{postgres_server.port}"
    for url in (f"postgres://nobody:hunter2@{host}/postgres", f"postgres://postgres:hunter2@{host}/absent",
                f"postgres://reader:hunter2@{host}/postgres?schema=forbidden"):  # fmt: skip
        consensus = PostgresConsensus(url)
        with pytest.raises(StorageUnavailable) as caught:
            await consensus.compare_and_set("k", None, b"")
        assert not caught.value.retry
        assert "hunter2" not in str(caught.value) + repr(consensus)
        await consensus.aclose()
    await admin.execute("DROP ROLE reader")


async def test_options_of_the_url_reach_the_server_and_the_socket(postgres_url: str) -> None:
    query = "application_name=web&options=-c%20work_mem%3D7MB&keepalives_idle=31&tcp_user_timeout=9000"
    consensus = PostgresConsensus(f"{postgres_url}&{query}")
    shown = "SELECT current_setting('application_name'), current_setting('work_mem')"
    assert tuple(await consensus._pool.read(lambda c: c.fetchrow(shown)) or ()) == ("web", "7MB")
    (connection,) = consensus._pool._idle
    used = connection._transport.get_extra_info("socket")  # type: ignore[attr-defined]
    assert used.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if sys.platform == "linux":
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 31
        assert used.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 9000
    await consensus.aclose()


async def test_a_connection_takes_no_longer_than_the_url_says(postgres_proxy: "object") -> None:
    proxy, url, _ = postgres_proxy  # type: ignore[misc]
    proxy.hold_answers()
    consensus = PostgresConsensus(f"{url}&connect_timeout=1")
    with pytest.raises(StorageUnavailable, match="cannot connect"):
        await asyncio.wait_for(consensus.compare_and_set("k", None, b""), 9)
    await consensus.aclose()


async def test_connections_that_nobody_uses_are_closed(
    postgres_url: str, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: a client has at most `connections` at work, and at rest keeps `idle_connections`."""
    monkeypatch.setattr(pool, "IDLE_S", 0.2)
    consensus = PostgresConsensus(f"{postgres_url}&connections=5&idle_connections=1&application_name=few")
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'few'"
    sleeps = [consensus._pool.read(lambda c: c.execute("SELECT pg_sleep(0.3)")) for _ in range(12)]
    working = asyncio.gather(*sleeps)
    most = 0
    while not working.done():
        most = max(most, await admin.fetchval(count))
        await asyncio.sleep(0.02)
    await working
    assert most == 5
    async with asyncio.timeout(50):
        while await admin.fetchval(count) != 1:
            await asyncio.sleep(0.02)
    assert await consensus.compare_and_set("k", None, b"0")
    await consensus.aclose()


async def test_a_read_only_server(consensus: PostgresConsensus, admin: Admin) -> None:
    await make_keys(consensus, 1)
    await admin.execute("ALTER ROLE postgres SET default_transaction_read_only = on")
    try:
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'aiopersist'"
        )
        async with asyncio.timeout(50):
            while not all(idle.is_closed() for idle in consensus._pool._idle):
                await asyncio.sleep(0.01)
        with pytest.raises(StorageUnavailable) as caught:
            await consensus.compare_and_set("k00", 0, b"1")
        assert not caught.value.retry
        assert await consensus.head("k00") == Versioned(0, b"0")
    finally:
        await admin.execute("SET default_transaction_read_only = off")
        await admin.execute("ALTER ROLE postgres RESET default_transaction_read_only")
