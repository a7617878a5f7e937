"""Goal: behind pgbouncer, with its defaults and in each pool mode, nothing is lost, doubled or misreported.
No statement is another client's, each commit is durable, and an answer of the pooler itself decides nothing
that was sent."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.postgres.consensus import PostgresConsensus
from aiopersist.testing.pgbouncer import pgbouncer_path, pgbouncer_version
from aiopersist.testing.proxy import TcpProxy
from aiopersist.testing.servers import PostgresServer
from aiopersist.testing.started import temporary_directory
from tests.stash.collections import USERS
from tests.storage.postgres_kit import Admin
from tests.storage.test_conformance import OurConsensus, consensuses
from tests.support.pgbouncer import bouncer, pooler  # noqa: F401  # a fixture

# What a pooler is told to pass over, so that clients which send them can open: it drops them.
IGNORED = "synchronous_commit,default_transaction_isolation,jit,extra_float_digits,options"
SHORT = ap.Settings(open_timeout_s=3, retry_timeout_s=3)

pytestmark = pytest.mark.blocks_loop  # they start a pooler, and wait until it listens


class TestPgbouncer(OurConsensus):
    @pytest.fixture
    async def handles(
        self, bouncer: PostgresServer, postgres_schema: str
    ) -> AsyncIterator[tuple[Consensus, Consensus]]:
        async for handles in consensuses(bouncer.url(postgres_schema)):
            yield handles


async def test_a_location_in_session_mode(
    postgres_server: PostgresServer, postgres_schema: str, tmp_path: object
) -> None:
    with pooler(postgres_server, "session", default_pool_size=60) as server:
        await check_location(server.url(postgres_schema), f"file://{tmp_path}")


async def test_a_location(bouncer: PostgresServer, postgres_schema: str, tmp_path: object) -> None:
    await check_location(bouncer.url(postgres_schema), f"file://{tmp_path}")


async def check_location(url: str, blob: str) -> None:
    """Clients hear of each other, and none of their changes is lost; the stash beside them works."""
    async with ap.open(blob=blob, consensus=url) as one, ap.open(blob=blob, consensus=url) as two:
        mine, theirs = (client.table("t", key=str, val=int) for client in (one, two))
        await mine.put("a", 1)
        async with theirs.changes(start="now") as feed:
            news = asyncio.create_task(anext(feed))
            await asyncio.sleep(0)
            await mine.put("a", 2)
            await asyncio.wait_for(news, 60)
        adds = (t.update(f"k{n % 3}", lambda v: (v or 0) + 1) for t in (mine, theirs) for n in range(30))
        await asyncio.gather(*adds)
        assert sum([value async for key, value in mine.items() if key != "a"]) == 60
        async with one.stash() as stash:
            users = await USERS.get(stash)
            await USERS.upsert_key(stash, 1, "x")
            await stash.consolidate(users)
            assert await USERS.peek_one(stash) == {1: "x"}


@pytest.mark.parametrize("ignored", ["", IGNORED], ids=["defaults", "ignored"])
@pytest.mark.parametrize("mode", [None, "transaction", "session"])
async def test_every_commit_is_durable(
    postgres_server: PostgresServer, postgres_schema: str, admin: Admin, mode: str | None, ignored: str
) -> None:
    """Whatever the database has as its default, and whatever the pooler drops."""
    options = {"ignore_startup_parameters": ignored} if ignored else {}
    role = f"r_{postgres_schema}"[:60]
    await admin.execute(
        f"CREATE ROLE {role} LOGIN SUPERUSER; ALTER ROLE {role} SET synchronous_commit = off;"
        f"ALTER ROLE {role} SET default_transaction_isolation = 'repeatable read'"
    )

    async def commit(server: PostgresServer) -> None:
        url = server.url(postgres_schema).replace("postgres@", f"{role}@")
        async with aclosing(PostgresConsensus(url)) as store:
            assert await store.compare_and_set("k", None, b"0")
            await admin.execute(
                """CREATE TABLE seen (level text, isolation text);
                   CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                       INSERT INTO seen VALUES (current_setting('synchronous_commit'),
                           current_setting('transaction_isolation')); RETURN NULL; END $$;
                   ALTER FUNCTION look SET search_path FROM CURRENT;
                   CREATE TRIGGER look AFTER INSERT OR DELETE ON log FOR EACH ROW EXECUTE FUNCTION look()"""
            )
            assert await store.compare_and_set("k", 0, b"1")
            assert await store.compare_and_set_many([Entry("k", 1, b"2"), Entry("new", None, b"0")])
            assert await store.truncate("k", 2) == 2
            assert await store.remove("new", Versioned(0, b"0"))

    try:
        if mode is None:
            await commit(postgres_server)
        else:
            own = PostgresServer("127.0.0.1", postgres_server.port, "", user=role)
            with pooler(own, mode, **options) as server:
                await commit(server)
        rows = await admin.fetch("SELECT level, isolation FROM seen")
        assert {tuple(row) for row in rows} == {("on", "read committed")}
        assert len(rows) == 6
    finally:
        await admin.execute(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'"
        )
        await admin.execute(f"DROP OWNED BY {role} CASCADE; DROP ROLE {role}")


WORKER = """
import asyncio, json, sys
import aiopersist as ap
async def main(url, name):
    told = []
    async def work(store, n):
        for _ in range(25):
            head = await store.head(f"k{n}")
            value = f"{name}-{n}-{len(told)}"
            try:
                if await store.compare_and_set(f"k{n}", head and head.seqno, value.encode()):
                    told.append([f"k{n}", value])
                if len(told) % 7 == 0:
                    await store.truncate(f"cut{n}", 0) if await store.head(f"cut{n}") else None
                    await store.list_keys("k")
            except (ap.Indeterminate, ap.StorageUnavailable) as error:
                print(error, file=sys.stderr)
                raise
    store = ap.open_consensus(url)
    await asyncio.gather(*(work(store, n) for n in range(4)))
    await store.aclose()
    print(json.dumps(told))
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("prepares", [None, 0, 200], ids=["its own way", "forgets", "prepares"])
async def test_processes_that_share_connections(
    postgres_server: PostgresServer, postgres_schema: str, prepares: int | None
) -> None:
    """What each was told is there, once; and nothing of theirs stays prepared. From 1.21 on pgbouncer knows
    prepared statements, if it is told to."""
    options: dict[str, object] = {"default_pool_size": 3}
    if prepares is not None:
        options["max_prepared_statements"] = prepares
        if pgbouncer_path() and pgbouncer_version() < (1, 21):
            pytest.skip("this pgbouncer is older than 1.21, and knows no prepared statements")
    with pooler(postgres_server, **options) as server:
        await check_processes(server.url(postgres_schema))


async def check_processes(url: str) -> None:
    started = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, url, str(n), stdout=-1, stderr=-1)
        for n in range(3)
    ]
    ended = await asyncio.gather(*(process.communicate() for process in started))
    assert [err.decode()[-2000:] for _, err in ended] == [""] * 3
    told = [(key, value) for out, _ in ended for key, value in json.loads(out)]
    async with aclosing(PostgresConsensus(url)) as store:
        found = [
            (key, version.data.decode())
            for key in await store.list_keys("k")
            for version in await store.scan(key, 0, 10_000)
        ]

        async def prepared(connection: Any) -> int:
            return int(
                await connection.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''")
            )

        assert sorted(found) == sorted(told)
        assert await store._pool.read(prepared) == 0


async def test_a_pooler_that_has_no_connection_to_give(
    postgres_server: PostgresServer, postgres_schema: str
) -> None:
    """`query_wait_timeout` ends what waits for a connection of the server: it surely was not sent."""
    with pooler(postgres_server, default_pool_size=1, query_wait_timeout=1) as server:
        async with aclosing(PostgresConsensus(server.url(postgres_schema))) as store:
            assert await store.compare_and_set("k", None, b"0")
            blocker = await asyncpg.connect(server.dsn(), statement_cache_size=0)
            try:
                transaction = blocker.transaction()
                await transaction.start()
                with pytest.raises(StorageUnavailable) as caught:  # by `query_wait_timeout`
                    await store.compare_and_set("k", 0, b"1")
                assert caught.value.retry
                with pytest.raises(StorageUnavailable):
                    await store.head("k")
                await transaction.rollback()
            finally:
                blocker.terminate()
            assert await store.head("k") == Versioned(0, b"0")


async def test_a_server_that_goes_after_the_commit(
    postgres_server: PostgresServer, postgres_schema: str
) -> None:
    """The pooler answers by an error of its own (08P01) after the commit was carried out."""
    async with TcpProxy(postgres_server.host, postgres_server.port) as proxy:
        with pooler(postgres_server, port=proxy.port) as server:
            async with aclosing(PostgresConsensus(server.url(postgres_schema))) as store:
                assert await store.compare_and_set("k", None, b"0")
                lost = proxy.swallow_answers_then_cut(lambda answer: b"COMMIT\0" in answer)
                with pytest.raises(Indeterminate):
                    await store.compare_and_set("k", 0, b"1")
                assert lost.done()
                assert await store.head("k") == Versioned(1, b"1")


async def test_a_server_that_goes_before_the_commit(
    postgres_server: PostgresServer, postgres_schema: str
) -> None:
    """The same error before the commit was sent: surely nothing happened."""
    async with TcpProxy(postgres_server.host, postgres_server.port) as proxy:
        with pooler(postgres_server, port=proxy.port) as server:
            async with aclosing(PostgresConsensus(server.url(postgres_schema))) as store:
                assert await store.compare_and_set("k", None, b"0")
                lost = proxy.swallow_answers_then_cut(lambda answer: b"SELECT 1\0" in answer)
                with pytest.raises(StorageUnavailable, match="before the commit"):
                    await store.compare_and_set("k", 0, b"1")
                assert lost.done()
                assert await store.head("k") == Versioned(0, b"0")


async def test_one_that_keeps_no_connection_for_a_transaction_is_refused(
    postgres_server: PostgresServer, postgres_schema: str, tmp_path: object
) -> None:
    with pooler(postgres_server, "statement") as server:
        url = server.url(postgres_schema)
        with pytest.raises(StorageUnavailable, match="which a pooler must allow"):
            await ap.open(blob=f"file://{tmp_path}", consensus=url, settings=SHORT)
        with pytest.raises(StorageUnavailable, match="which a pooler must allow"):
            await ap.stash.open(url, settings=SHORT)


async def test_options_that_the_pooler_refuses_are_named(
    postgres_server: PostgresServer, postgres_schema: str, tmp_path: object
) -> None:
    with pooler(postgres_server) as server:
        url = f"{server.url(postgres_schema)}&options=-c%20work_mem%3D8MB"
        with pytest.raises(StorageUnavailable, match="options") as caught:
            await ap.open(blob=f"file://{tmp_path}", consensus=url, settings=SHORT)
        assert not caught.value.retry


async def test_a_pooler_that_the_url_names(bouncer: PostgresServer, postgres_schema: str) -> None:
    """`pgbouncer=true` spares the question; the facts say so."""
    async with aclosing(PostgresConsensus(f"{bouncer.url(postgres_schema)}&pgbouncer=true")) as store:
        facts = await store.facts()
        assert "pooler" in facts["sessions"] and "polled" in facts["hints"]
        assert facts["synchronous_commit"] == "on"


@pytest.fixture
def certified() -> Iterator[tuple[Path, dict[str, object]]]:
    """A certificate for `localhost` that nobody knows, and the options of a pgbouncer that shows it."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    with temporary_directory("tls") as folder:
        folder.chmod(0o755)
        key, certificate = folder / "key.pem", folder / "certificate.pem"
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        about = f"-subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
        subprocess.run([*make.split(), *about.split()], check=True, capture_output=True)
        key.chmod(0o644)
        files = {"client_tls_key_file": key, "client_tls_cert_file": certificate}
        yield certificate, {"client_tls_sslmode": "require", **files}


@pytest.mark.parametrize("query", ["channel_binding=require", "sslmode=verify-full&sslrootcert=system"])
async def test_a_certificate_is_verified_where_the_url_says_so(
    postgres_server: PostgresServer,
    postgres_schema: str,
    certified: tuple[Path, dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    query: str,
) -> None:
    """`channel_binding=require`, which the driver does not know, lets nobody stand between."""
    certificate, tls = certified
    with pooler(postgres_server, **tls) as server:
        by_name, by_number = (
            f"{server.url(postgres_schema, host=host)}&{query}" for host in ("localhost", "127.0.0.1")
        )
        for url, trusted in ((by_name, False), (by_number, True), (by_name, True)):
            if trusted:
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            async with aclosing(PostgresConsensus(url)) as store:
                if url == by_name and trusted:
                    assert await store.head("k") is None
                else:
                    with pytest.raises(StorageUnavailable, match="certificate"):
                        await store.head("k")
