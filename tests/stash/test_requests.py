"""The costs of calls: transactions of a store, and statements of a database."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from aiopersist.stash import AppendBatch, PostgresStash, Stash
from aiopersist.stash import session as sessions
from aiopersist.stash.model import START, Move, StoreChange, StoredRows
from aiopersist.stash.postgres import STATEMENT_BYTES, STATEMENT_ROWS, PostgresStore, chunks_of
from tests.stash.collections import USERS
from tests.support.internals import session_of


class Statements:
    """The statements of every connection that a stash has by now, by their first words."""

    def __init__(self, stash: Stash) -> None:
        self.seen: list[str] = []
        store = session_of(stash).store
        assert isinstance(store, PostgresStore)
        for connection in (*store._pool._idle, *store._background._idle):
            connection.add_query_logger(self._log)

    def _log(self, record: asyncpg.connection.LoggedQuery) -> None:
        self.seen.append(" ".join(record.query.split()[:3]))

    def take(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


@pytest.fixture
async def stash(postgres_url: str) -> AsyncIterator[Stash]:
    async with ap.stash.open(postgres_url) as stash:
        assert isinstance(stash, PostgresStash)
        yield stash


async def test_a_call_is_one_statement(stash: Stash) -> None:
    """Goal: one round trip for each call, once the collection is known; none for no batches."""
    c = await USERS.get(stash)
    await USERS.upsert_key(stash, 1, "a")
    statements = Statements(stash)
    batch = await c.make_batch(stash)
    assert len(statements.take()) == 1
    c.append_to_batch(batch, 2, "b", 1)
    await stash.append([batch])
    assert statements.take() == ["WITH guard AS"]
    await stash.append([])
    assert statements.take() == []
    for call in (
        stash.update(c, (3, "c"), 9, 1),
        stash.seal(c, 10),
        stash.seal_batch([(c, 11), (c, 12)]),
        stash.compact(c, 5),
        stash.iter(c),
        stash.iter_key(c, 1),
        stash.peek_one(c),
        stash.peek_key_one(c, 1),
        stash.upper(c),
        stash.confirm_leadership(),
        USERS.get(stash),
    ):
        name = call.__name__
        await call
        assert len(statements.take()) == (0 if name == "get" else 1), name
    await USERS.upsert_key(stash, 1, "z")
    assert len(statements.take()) == 2  # a read, an append


async def test_writes_of_one_stash_take_turns(stash: Stash) -> None:
    """Goal: many at once cost each a read and an append, and not a read for every append of another."""
    await USERS.upsert_key(stash, 0, "first")
    store: Any = session_of(stash).store
    counted = {"load": 0, "commit": 0}

    def counting(name: str) -> Any:
        real = getattr(store, name)

        async def call(*arguments: Any) -> Any:
            counted[name] += 1
            return await real(*arguments)

        return call

    for call in counted:
        setattr(store, call, counting(call))
    await asyncio.gather(*(USERS.upsert_key(stash, number, "x") for number in range(60)))
    assert counted == {"load": 60, "commit": 60}
    assert len(await USERS.peek_one(stash)) == 60


async def test_many_entries_are_several_statements(stash: Stash) -> None:
    """Goal: rows go in pieces, in one transaction."""
    c = await USERS.get(stash)
    await stash.upper(c)
    statements = Statements(stash)
    rows = 2 * STATEMENT_ROWS + 1
    entries = [((i, "x"), 0, 1) for i in range(rows)]
    await stash.append([AppendBatch(c.id, 0, 1, 0, 0, entries)])
    assert statements.take() == ["BEGIN;", "COMMIT;"]  # of those within the driver tells nothing
    assert len(await stash.peek(c)) == rows


@pytest.mark.parametrize(
    ("rows", "size", "pieces"),
    [
        pytest.param(STATEMENT_ROWS, 1, 1, id="just fits"),
        pytest.param(2 * STATEMENT_ROWS + 1, 1, 3, id="by rows"),
        pytest.param(9, STATEMENT_BYTES // 2 - 10, 5, id="by bytes"),
        pytest.param(3, STATEMENT_BYTES + 1, 3, id="larger than a piece"),
        pytest.param(0, 1, 0, id="none"),
    ],
)
def test_pieces(rows: int, size: int, pieces: int) -> None:
    """Goal: pieces are bounded in rows and bytes, and hold every row once, in order."""
    half = StoredRows([f"{i:09}" for i in range(rows)], ["x" * size] * rows, [0] * rows, [1] * rows)
    change = StoreChange({}, {7: Move(START, half)})
    found = list(chunks_of(change))
    assert len(found) == pieces
    assert [key for chunk in found for key in chunk[1]] == list(half.keys)
    assert all(len(chunk[0]) <= STATEMENT_ROWS and set(chunk[0]) == {7} for chunk in found)


async def test_consolidation_has_a_connection_of_its_own(
    stash: Stash, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    """Goal: the background sums repeated appends, on a connection of its own."""
    monkeypatch.setattr(sessions, "CONSOLIDATE_ROWS_MIN", 8)
    c = await USERS.get(stash)
    store: Any = session_of(stash).store

    async def upsert(number: int) -> None:
        await USERS.upsert_key(stash, 1, f"v{number}")

    async def stored() -> int:
        while session_of(stash)._consolidating:
            await SYSTEM.sleep(0.01)
        (found,) = (await session_of(stash).load(sessions.Select((c.id,)))).collections
        return len(found.rows)

    for number in range(40):
        await upsert(number)
    while await stored() >= 12:  # it is looked for at an append, unless another one runs
        await upsert(number := number + 1)
        assert number < 100
    assert len(store._background._idle) == 1
    assert await USERS.peek_one(stash) == {1: f"v{number}"}
