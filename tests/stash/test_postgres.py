"""Behaviour of a real Postgres alone: conflicts, deadlocks, other defaults, tables of another program."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.stash import Stash, StashError
from aiopersist.testing.servers import PostgresServer
from tests.stash.collections import USERS
from tests.support.internals import session_of

Admin = Any


@pytest.fixture
async def stash(postgres_url: str) -> AsyncIterator[Stash]:
    async with ap.stash.open(postgres_url) as stash:
        await USERS.upsert_key(stash, 0, "first")
        yield stash


@pytest.mark.parametrize("state", ["40001", "40P01"])
async def test_conflicts_are_tried_again(stash: Stash, admin: Admin, state: str) -> None:
    """Goal: a serialization failure or a deadlock of a transaction is no failure of the call, and it happens
    once."""
    await admin.execute(
        f"""CREATE SEQUENCE tries; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN
                IF nextval('{await admin.fetchval("SELECT current_schema()")}.tries') % 7 < 3 THEN
                    RAISE EXCEPTION 'not now' USING ERRCODE = '{state}';
                END IF;
                RETURN new;
            END $$;
            CREATE TRIGGER refuse BEFORE INSERT ON data FOR EACH STATEMENT EXECUTE FUNCTION refuse()"""
    )
    for number in range(1, 4):
        await USERS.upsert_key(stash, number, "x")
    many = await stash.collection("many", int, str)
    batch = await many.make_batch(stash)
    batch.entries = [((i, "x"), 0, 1) for i in range(5000)]
    await stash.append([batch])
    assert len(await USERS.peek_one(stash)) == 4
    assert len(await stash.peek_one(many)) == 5000
    assert await admin.fetchval("SELECT sum(diff) FROM data") == 5004
    assert await admin.fetchval("SELECT last_value FROM tries") > 8


async def test_appends_in_opposite_orders_do_not_deadlock(postgres_url: str, stash: Stash) -> None:
    """Goal: the uppers are locked in one order, though calls name them in any order."""
    async with (
        ap.stash.open(postgres_url, exclusive=False) as one,
        ap.stash.open(postgres_url, exclusive=False) as two,
    ):
        for opener in (one, two):
            for name in "ab":
                await opener.collection(name, int, int)

        async def work(opener: Stash, names: str) -> None:
            handles = [await opener.collection(name, int, int) for name in names]
            for _ in range(25):
                while True:
                    batches = [await c.make_batch(opener) for c in handles]
                    for c, batch in zip(handles, batches, strict=True):
                        c.append_to_batch(batch, 1, 1, 1)
                    try:
                        await opener.append(batches)
                        break
                    except ap.stash.StaleLower:
                        pass

        async with asyncio.timeout(50):
            await asyncio.gather(work(one, "ab"), work(two, "ba"))
        for name in "ab":
            assert await one.peek(await one.collection(name, int, int)) == [(1, 1, 50)]


async def test_openers_are_forgotten_after_a_week(postgres_url: str, stash: Stash, admin: Admin) -> None:
    """Goal: a later opener removes the rows of silent openers; an opener that comes back nevertheless goes
    on."""
    async with ap.stash.open(postgres_url, exclusive=False) as sleeper:
        await USERS.upsert_key(sleeper, 1, "a")
        await admin.execute(
            "UPDATE openers SET seen = seen - interval '8 days' WHERE opener = $1", id_of(sleeper)
        )
        async with ap.stash.open(postgres_url, exclusive=False) as later:
            known = [row["opener"] for row in await admin.fetch("SELECT opener FROM openers")]
            assert id_of(later) in known
            assert id_of(stash) in known
            assert id_of(sleeper) not in known
            await USERS.upsert_key(sleeper, 1, "b")
            assert await USERS.peek_key_one(later, 1) == "b"
    assert [row["opener"] for row in await admin.fetch("SELECT opener FROM openers")] == [id_of(stash)]


def id_of(stash: Stash) -> str:
    opener = session_of(stash).opener
    assert opener is not None
    return opener.id


async def test_a_savepoint_leaves_no_transaction_open(
    postgres_url: str, stash: Stash, admin: Admin, postgres_schema: str
) -> None:
    async with ap.stash.open(postgres_url, savepoint=True) as trial:
        await USERS.upsert_key(trial, 5, "x")
        open_ones = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        assert await admin.fetchval(open_ones) == 0
        assert await admin.fetchval("SELECT count(*) FROM data WHERE key = '5'") == 0


async def test_a_database_that_was_restored(stash: Stash, admin: Admin) -> None:
    """Goal: an opener whose own last change is not there stops."""
    await admin.execute("UPDATE openers SET token = 'older'")
    with pytest.raises(ap.Corruption, match="restored from a backup"):
        await USERS.upsert_key(stash, 1, "x")
    assert await admin.fetchval("SELECT count(*) FROM data WHERE key = '1'") == 0


async def test_tables_of_a_later_version(postgres_url: str, stash: Stash, admin: Admin) -> None:
    """Goal: a program that does not understand the tables neither reads them nor takes them over."""
    await admin.execute("UPDATE fence SET format = format + 1")
    before = await admin.fetchrow("SELECT * FROM fence")
    for mode in ({}, {"exclusive": False}, {"readonly": True}, {"savepoint": True}):
        with pytest.raises(StashError, match="newer version"):
            await ap.stash.open(postgres_url, **mode)  # type: ignore[arg-type]
    with pytest.raises(StashError, match="newer version"):
        await USERS.peek_one(stash)
    with pytest.raises(StashError, match="newer version"):
        await USERS.upsert_key(stash, 1, "x")
    assert await admin.fetchrow("SELECT * FROM fence") == before


async def test_another_default_isolation_changes_nothing(
    postgres_server: PostgresServer, postgres_url: str, admin: Admin
) -> None:
    """Goal: READ COMMITTED is asked for; a database whose default is another one works the same."""
    database = await admin.fetchval("SELECT quote_ident(current_database())")
    await admin.execute(f"ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'")
    try:
        async with (
            ap.stash.open(postgres_url, exclusive=False) as one,
            ap.stash.open(postgres_url, exclusive=False) as two,
        ):
            await asyncio.gather(
                *(USERS.upsert_key(opener, number, "x") for number in range(10) for opener in (one, two))
            )
            await one.consolidate(await USERS.get(one))
            assert len(await USERS.peek_one(two)) == 10
    finally:
        await admin.execute(f"ALTER DATABASE {database} RESET default_transaction_isolation")


async def test_a_collection_is_read_in_slices(stash: Stash) -> None:
    """Goal: the rows are there once each, whichever slice they are in."""
    c = await stash.collection("large", int, str)
    batch = await c.make_batch(stash)
    sizes = (5_000_000, 1, 20_000_000, 0, 4_000_000)
    batch.entries = [((i, "x" * size), 0, 1) for i, size in enumerate(sizes)]
    await stash.append([batch])
    found = [(key, len(val), diff) for key, val, diff in await stash.peek(c)]
    assert found == [(i, size, 1) for i, size in enumerate(sizes)]
    assert len(await stash.peek_key_one(c, 2) or "") == 20_000_000


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_collection_with_more_text_than_one_value_of_postgres_holds(
    stash: Stash, admin: Admin
) -> None:
    """Goal: the bound of each value and row, 1 GiB, is none of a collection, which grows row by row."""
    c = await stash.collection("large", int, str)
    await stash.seal(c, 1)
    await admin.execute(
        f"""INSERT INTO data SELECT {c.id}, i::text, '"' || repeat('x', {2**22}) || '"', 0, 1
            FROM generate_series(1, 257) i"""
    )
    found = await stash.peek(c)
    assert [key for key, _, _ in found] == list(range(1, 258))
    assert {len(val) for _, val, _ in found} == {2**22}
