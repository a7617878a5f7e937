"""Every backend passes the suite that is shipped; so do stashes in a location; bad URLs are refused."""

import sqlite3
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.stash import MemoryStash, PostgresStash, SqliteStash, Stash, StashError, TypedCollection
from aiopersist.testing.servers import PostgresServer
from aiopersist.testing.stash import StashConformance
from tests.support.pgbouncer import bouncer  # noqa: F401  # a fixture

USERS = TypedCollection("users", str, int)


async def check_rows(stash: Stash, rows: Callable[[], Awaitable[int]]) -> None:
    """Consolidation leaves a row for each update that can be told apart, and none once since is empty."""
    c = await stash.collection("c", str, int)
    for time, diff in enumerate((1, 1, -1, 1)):
        await stash.update_many(c, [(("a", 1), time, 1), (("b", 1), time, diff), (("b", 1), time, -diff)])
    assert await rows() > 3
    await stash.seal(c, 4)
    await stash.compact(c, 2)
    await stash.consolidate(c)
    assert await rows() == 2
    await stash.seal(c, ap.Antichain())
    await stash.compact(c, ap.Antichain())
    await stash.consolidate(c)
    assert await rows() == 0


class TestMemory(StashConformance):
    @pytest.fixture
    def url(self) -> str:
        return f"mem://{uuid.uuid4()}"

    async def test_its_class(self, stash: Stash) -> None:
        assert type(stash) is MemoryStash


class TestSqlite(StashConformance):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite://{tmp_path}/stash.db"

    async def test_its_class(self, stash: Stash) -> None:
        assert type(stash) is SqliteStash

    async def test_who_only_looks_makes_no_file(self, url: str, tmp_path: Path) -> None:
        with pytest.raises(StashError):
            await ap.stash.open(url, readonly=True)
        with pytest.raises(StashError):
            await ap.stash.open(url, savepoint=True)
        assert list(tmp_path.iterdir()) == []

    async def test_consolidation_is_physical(self, stash: Stash, tmp_path: Path) -> None:
        async def rows() -> int:
            connection = sqlite3.connect(tmp_path / "stash.db")
            try:
                (count,) = connection.execute("SELECT count(*) FROM stash_data").fetchone()
                return int(count)
            finally:
                connection.close()

        await check_rows(stash, rows)


class OnPostgres(StashConformance):
    async def test_consolidation_is_physical(
        self, stash: Stash, postgres_server: PostgresServer, postgres_schema: str
    ) -> None:
        async def rows() -> int:
            return int(await fetchval(postgres_server, f"SELECT count(*) FROM {postgres_schema}.data"))

        await check_rows(stash, rows)


class TestPostgres(OnPostgres):
    @pytest.fixture
    def url(self, postgres_url: str) -> str:
        return postgres_url

    async def test_its_class(self, stash: Stash) -> None:
        assert type(stash) is PostgresStash

    async def test_who_only_looks_makes_no_schema(
        self, url: str, postgres_server: PostgresServer, postgres_schema: str
    ) -> None:
        with pytest.raises(StashError):
            await ap.stash.open(url, readonly=True)
        with pytest.raises(StashError):
            await ap.stash.open(url, savepoint=True)
        assert await fetchval(postgres_server, f"SELECT to_regnamespace('{postgres_schema}')") is None


class TestPgbouncer(OnPostgres):
    @pytest.fixture
    def url(self, bouncer: PostgresServer, postgres_schema: str) -> str:
        return bouncer.url(postgres_schema)


async def fetchval(server: PostgresServer, query: str) -> Any:
    connection = await asyncpg.connect(server.dsn())
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


# --- in a location -------------------------------------------------------------------------------


class Place(NamedTuple):
    """`ap.open(blob=..., consensus=...)`, and the URL of its stash of a name (`None`: has none)."""

    blob: str
    consensus: str
    kind: type[Stash]
    standalone: dict[str, str]


@pytest.fixture(params=["mem", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "mem":
        url = f"mem://{uuid.uuid4()}"
        return Place(url, url, MemoryStash, {"stash": url})
    blob = f"file://{tmp_path}/blob"
    if request.param == "sqlite":
        url = f"sqlite://{tmp_path}/state.db"
        return Place(blob, url, SqliteStash, {"stash": url})
    server: PostgresServer = request.getfixturevalue("postgres_server")
    schema: str = request.getfixturevalue("postgres_schema")
    standalone = {name: server.url(f"{schema}_{name}") for name in ("stash", "mine")}
    return Place(blob, server.url(schema), PostgresStash, standalone)


async def test_a_stash_in_a_location(place: Place) -> None:
    """Names are stashes of their own; each is the one at its URL; all close with their client."""
    async with ap.open(blob=place.blob, consensus=place.consensus) as client:
        async with client.stash() as stash, client.stash("mine") as mine:
            assert type(stash) is type(mine) is place.kind
            await USERS.upsert_key(stash, "name", 1)
            await USERS.upsert_key(mine, "name", 2)
            async with client.stash(name="stash", exclusive=False) as again:
                assert await USERS.peek_one(again) == {"name": 1}
        stash = await client.stash("mine", readonly=True)
        assert await USERS.peek_one(stash) == {"name": 2}
        with pytest.raises(StashError):
            await client.stash("unknown", readonly=True)
        with pytest.raises(ap.InvalidUsage):
            await client.stash(readonly=True, savepoint=True)
    with pytest.raises(ap.InvalidUsage):
        await USERS.peek_one(stash)
    for name, url in place.standalone.items():
        async with ap.stash.open(url) as stash:
            assert await USERS.peek_one(stash) == {"name": {"stash": 1, "mine": 2}[name]}


async def test_a_location_and_a_url_fence_each_other(place: Place) -> None:
    async with ap.open(blob=place.blob, consensus=place.consensus) as client, client.stash() as one:
        async with ap.stash.open(place.standalone["stash"]) as two:
            with pytest.raises(StashError) as caught:
                await one.confirm_leadership()
            assert caught.value.is_unrecoverable
            async with client.stash(savepoint=True) as trial:
                await USERS.upsert_key(trial, "name", 1)
                await trial.confirm_leadership()
            await two.confirm_leadership()
            async with client.stash() as three:
                with pytest.raises(StashError):
                    await two.confirm_leadership()
                await three.confirm_leadership()


async def test_a_stash_beside_shards(place: Place) -> None:
    """Neither sees the other, in one database."""
    async with ap.open(blob=place.blob, consensus=place.consensus) as client, client.stash() as stash:
        await USERS.upsert_key(stash, "name", 1)
        async with client.writer("shard", ap.Schema(str, int)) as writer:
            await writer.compare_and_append([("a", 1, 0, 1)], 0, 1)
        assert list(await client.list_shards()) == ["shard"]
        assert await USERS.peek_one(stash) == {"name": 1}


async def test_a_consensus_that_is_an_instance_has_no_stash() -> None:
    consensus = ap.open_consensus("mem://")
    async with ap.open(blob="mem://", consensus=consensus) as client:
        with pytest.raises(ap.Unsupported):
            await client.stash()
    await consensus.aclose()


# --- URLs ----------------------------------------------------------------------------------------

BAD_URLS = {
    "empty": ("", ""),
    "a path": ("./stash.db", ""),
    "a scheme of a blob store": ("s3://bucket/stash", "s3"),
    "a file": ("file:///stash.db", "file"),
    "another database": ("mysql://host/db", "mysql"),
    "no path": ("sqlite://", "sqlite"),
    "an unknown option": ("sqlite:///stash.db?mode=ro", "mode"),
    "an unknown option of Postgres": ("postgres://host/db?scheme=x", "scheme"),
    "an option twice": ("postgres://host/db?schema=a&schema=b", "schema"),
    "a name with a user": ("mem://user:secret@name", "mem"),
}


@pytest.mark.parametrize(("url", "told"), BAD_URLS.values(), ids=BAD_URLS)
def test_a_bad_url_is_refused_at_once(url: str, told: str) -> None:
    with pytest.raises(ap.InvalidLocation) as caught:
        ap.stash.open(url)
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mode", [{}, {"exclusive": False}, {"readonly": True}, {"savepoint": True}], ids=str)
async def test_a_server_that_cannot_be_reached(mode: dict[str, Any]) -> None:
    with pytest.raises(ap.StorageUnavailable):
        await ap.stash.open("postgres://nobody@127.0.0.1:1/db", ap.Settings(open_timeout_s=0.1), **mode)


async def test_a_file_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ap.InvalidLocation, match="file is not a directory"):
        await ap.stash.open(f"sqlite://{tmp_path}/file/stash.db", ap.Settings(open_timeout_s=0.1))
