"""Goal: the answer to a change shows which other openers of a stash wish to go first, on every backend.
`tests/worlds/test_distances.py` shows that they come through."""

import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.stash import TypedCollection

NUMBERS = TypedCollection("numbers", str, int)
LONG_S = 60.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.storage.wishes.MOST_S", 0.1)


async def check(url: str) -> None:
    async with ap.stash.open(url, exclusive=False) as near:
        store, me = near._session.store, near._session.writing().id
        async with ap.stash.open(url, exclusive=False) as far:
            opener = far._session.writing().id
            await NUMBERS.upsert_key(near, "n", 1)
            await far._session.store.wish(opener, 2 * LONG_S, 1.0)
            await far._session.store.wish(opener, LONG_S, 1.0)
            assert store.stand_back_s(me, 0.0) == 0
            await NUMBERS.upsert_key(near, "n", 2)
            assert 0 < store.stand_back_s(me, 0.0) <= LONG_S
            assert store.stand_back_s(me, 1000.0) == 0, "it has waited for longer"
            await NUMBERS.upsert_key(far, "n", 3)
            assert far._session.store.stand_back_s(opener, 0.0) == 0, "it is its own"
        await NUMBERS.upsert_key(near, "n", 4)
        assert near._session.store.stand_back_s(me, 0.0) == 0, "its opener has gone"
        assert await NUMBERS.peek_one(near) == {"n": 4}


async def test_in_memory() -> None:
    await check(f"mem://{uuid.uuid4().hex}")


async def test_on_sqlite(tmp_path: Path) -> None:
    await check(f"sqlite://{tmp_path}/stash.db")


async def test_on_postgres(postgres_url: str) -> None:
    await check(postgres_url)


async def test_who_loses_has_waited_since_its_first_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a wish tells how long its opener waits; who has one already has waited no longer for that."""
    told: list[float] = []
    async with ap.stash.open(f"mem://{uuid.uuid4().hex}", exclusive=False) as stash:
        session = stash._session
        opener = session.writing()

        async def wish(opener_id: str, for_s: float, waited_s: float) -> None:
            told.append(waited_s)

        monkeypatch.setattr(session.store, "wish", wish)
        losses = session._losses[frozenset({1})]
        for _ in range(4):
            await session._lost(opener, losses)
    assert len(told) == 3, "it wishes from the second loss on"
    assert all(0 <= waited_s < LONG_S for waited_s in told)


async def test_a_clock_that_steps_back_prolongs_no_wish(tmp_path: Path) -> None:
    """Goal: the moments of a file are those of the clock of the host."""
    path = tmp_path / "stash.db"
    async with ap.stash.open(f"sqlite://{path}", exclusive=False) as near:
        session = near._session
        await NUMBERS.upsert_key(near, "n", 1)
        await session.store.wish("far", 1.0, 5.0)
        with closing(sqlite3.connect(path)) as edited:
            edited.execute(
                "UPDATE stash_openers SET seen = seen + 60, token = token + 60 WHERE opener = '~far'"
            )
            edited.commit()
        await NUMBERS.upsert_key(near, "n", 2)
        assert session.store.stand_back_s(session.writing().id, 0.0) == 0
