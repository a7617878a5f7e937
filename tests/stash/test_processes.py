"""Goal: openers in one process and in several, fenced, sharing, killed, cancelled and closed at any
moment: each acknowledged change is there once, no change is there by half, and no call hangs."""

import asyncio
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.base.errors import InvalidUsage, StorageUnavailable
from aiopersist.stash import StaleLower, Stash, TypedCollection
from aiopersist.testing.servers import PostgresServer
from tests.conftest import PostgresProxy
from tests.stash.attack import is_fenced, keys, postgres_tables, put, sqlite_tables
from tests.support.cancelling import cancelled_after

COUNTERS = TypedCollection("counters", str, int)
Look = Callable[[], Awaitable[dict[str, list[Any]]]]


class Place(NamedTuple):
    url: str
    tables: Look
    """All that is stored, read behind the library's back."""


@pytest.fixture(params=["sqlite", "postgres"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, postgres_server: PostgresServer, postgres_schema: str
) -> Place:
    if request.param == "sqlite":
        return Place(f"sqlite://{tmp_path}/st.db", lambda: sqlite_tables(tmp_path / "st.db"))

    async def look() -> dict[str, list[Any]]:
        settings = {"search_path": postgres_schema}
        admin = await asyncpg.connect(postgres_server.dsn(), server_settings=settings)
        try:
            return await postgres_tables(admin)
        finally:
            await admin.close()

    return Place(postgres_server.url(postgres_schema), look)


# --- fenced ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exclusive", [True, False])
async def test_an_earlier_opener_leaves_no_trace(place: Place, exclusive: bool) -> None:
    """Goal: after a take-over every call of an earlier opener fails as unrecoverable, and changes no row."""
    async with ap.stash.open(place.url, exclusive=exclusive) as old:
        c, d = await old.collection("c", str, int), await old.collection("d", str, int)
        await put(old, c, ["a"])
        batch, other = await c.make_batch(old), await d.make_batch(old)
        c.append_to_batch(batch, "x", 1, 1)
        async with ap.stash.open(place.url) as new:
            tables = await place.tables()

            async def step(tx: Stash) -> None:
                raise AssertionError("a fenced opener runs no step")

            for call in (
                lambda: old.append([batch]),
                lambda: old.append([batch, other]),
                lambda: old.update(c, ("x", 1), 5, 1),
                lambda: old.update_many(c, [((str(n), 1), 5, 1) for n in range(4500)]),
                lambda: old.seal(c, 9),
                lambda: old.compact(c, 1),
                lambda: old.consolidate(c),
                lambda: old.collection("e", str, int),
                lambda: old.migrate([step]),
                lambda: COUNTERS.upsert_key(old, "k", 1),
                lambda: old.iter(c),
                lambda: old.confirm_leadership(),
            ):
                await is_fenced(call())
            assert await place.tables() == tables
            await put(new, await new.collection("c", str, int), ["b"])
            assert await keys(new, c) == ["a", "b"]
        tables = await place.tables()
    after = await place.tables()  # closing, too, strikes out no more than its own row
    assert {**after, "openers": []} == {**tables, "openers": []}


async def test_sharers_fence_nobody(url: str) -> None:
    """Goal: shared openers come and go beside an owner and each other."""
    async with ap.stash.open(url) as owner, ap.stash.open(url, exclusive=False) as a:
        async with ap.stash.open(url, exclusive=False) as b:
            for n in range(3):
                for stash in (owner, a, b):
                    await COUNTERS.upsert_key(stash, "k", n)
                    await stash.confirm_leadership()
        await put(a, await a.collection("c", str, int), ["x"])
        await owner.confirm_leadership()


# --- processes ---------------------------------------------------------------------------------------

WORKER = """
import asyncio, sys
import aiopersist as ap
from aiopersist.stash import StaleLower, TypedCollection

url, name, count, exclusive = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"
TABLE = TypedCollection("table", str, int)


async def raw(stash, n, rows):
    c = await stash.collection("raw", str, int)
    while True:
        batch = await c.make_batch(stash)
        for row in range(rows):
            c.append_to_batch(batch, f"{name}-{n}-{row}", 0, 1)
        try:
            return await stash.append([batch])
        except StaleLower:
            pass


async def main():
    async with ap.stash.open(url, exclusive=exclusive) as stash:
        print("open", flush=True)
        for n in range(count):
            rows = 4200 if exclusive and n % 4 == 3 else 2
            await asyncio.gather(raw(stash, n, rows), TABLE.insert_without_overwrite(stash, f"{name}-{n}", n))
            await TABLE.upsert_key(stash, name, n)
            print(n, rows, flush=True)

asyncio.run(main())
"""


def start(url: str, name: str, count: int, *, exclusive: bool) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WORKER, url, name, str(count), str(int(exclusive))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


async def finished(worker: "subprocess.Popen[str]") -> tuple[list[tuple[int, int]], str]:
    """What it acknowledged, whole lines only, and what it complained about."""
    out, err = await asyncio.to_thread(worker.communicate)
    lines = [line.split() for line in out.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(line[0]), int(line[1])) for line in lines if line[0] != "open"], err


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sqlite", pytest.param("postgres", marks=pytest.mark.long)], indirect=True)
async def test_four_processes_that_share_lose_nothing(place: Place) -> None:
    """Goal: every append of every process is there once, raw batches and tables alike."""
    count = 4
    workers = [start(place.url, name, count, exclusive=False) for name in "abcd"]
    for worker in workers:
        acks, err = await finished(worker)
        assert worker.returncode == 0, err
        assert len(acks) == count
    async with ap.stash.open(place.url, readonly=True) as stash:
        names = [f"{name}-{n}" for name in "abcd" for n in range(count)]
        found = await keys(stash, await stash.collection("raw", str, int))
        assert found == sorted(f"{name}-{row}" for name in names for row in range(2))
        table = await TypedCollection("table", str, int).peek_one(stash)
        assert {key for key in table if "-" in key} == set(names)
        assert {key: val for key, val in table.items() if "-" not in key} == dict.fromkeys("abcd", count - 1)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.05, pytest.param(0.15, marks=pytest.mark.long)])
async def test_a_process_that_is_killed_leaves_nothing_by_half(place: Place, delay_s: float) -> None:
    """Goal: the next opener finds each acknowledged append, at most one more, all of them whole."""
    worker = start(place.url, "k", 10_000, exclusive=True)
    assert worker.stdout is not None
    for _ in range(3):
        await asyncio.to_thread(worker.stdout.readline)
    await asyncio.sleep(delay_s)
    worker.send_signal(signal.SIGKILL)
    acks, _ = await finished(worker)
    last = max([n for n, _ in acks], default=1)
    async with asyncio.timeout(50), ap.stash.open(place.url) as stash:
        raw = await stash.collection("raw", str, int)
        found = await keys(stash, raw)
        of: dict[int, int] = {}
        for key in found:
            n = int(key.split("-")[1])
            of[n] = of.get(n, 0) + 1
        assert set(range(last + 1)) <= set(of) <= set(range(last + 2))
        assert all(rows == (4200 if n % 4 == 3 else 2) for n, rows in of.items())
        table = await TypedCollection("table", str, int).peek_one(stash)
        assert table["k"] >= last
        await put(stash, raw, ["after"])


# --- cancelled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4200])
async def test_an_append_that_is_cancelled_at_each_turn(url: str, rows: int) -> None:
    """Goal: it happened or not, never by half, and the next append works whichever it was."""
    async with ap.stash.open(url) as stash:
        c, d = await stash.collection("c", str, int), await stash.collection("d", str, int)
        expected: list[str] = []
        outcomes = set()
        for turns in range(0, 60, 1 if rows == 1 else 6):
            batches = [await c.make_batch(stash), await d.make_batch(stash)]
            for n in range(rows):
                c.append_to_batch(batches[0], f"{turns}-{n}", 0, 1)
            d.append_to_batch(batches[1], f"{turns}", 0, 1)
            outcomes.add(await cancelled_after(stash.append(batches), turns))
            async with asyncio.timeout(50):
                while True:
                    try:
                        await put(stash, d, [f"after-{turns}"])
                        break
                    except StaleLower:  # the cancelled one came first
                        pass
            expected.append(f"after-{turns}")
        in_d = await keys(stash, d)
        assert [key for key in in_d if key.startswith("after")] == sorted(expected)
        happened = [key for key in in_d if not key.startswith("after")]
        assert await keys(stash, c) == sorted(f"{turns}-{n}" for turns in happened for n in range(rows))
        assert True in outcomes


async def test_collections_and_migrations_that_are_cancelled(url: str) -> None:
    """Goal: a collection is made once, a version counts with its step only."""
    async with ap.stash.open(url) as stash:
        for turns in range(0, 40, 2):
            await cancelled_after(stash.collection(f"n{turns}", str, int), turns)
            await put(stash, await stash.collection(f"n{turns}", str, int), ["k"])

        async def step(tx: Stash) -> None:
            await put(tx, await tx.collection("migrated", str, int), ["k"])

        for turns in range(0, 40, 2):
            await cancelled_after(stash.migrate([step]), turns)
        assert await stash.migrate([step]) == 1
        assert await keys(stash, await stash.collection("migrated", str, int)) == ["k"]


# --- closed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 3, 6, 12])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_while_changes_are_under_way(url: str, turns: int, cancelled: bool) -> None:
    """Goal: it ends soon, also when the closer is cancelled; each change happened as a whole or not, and use
    after it is refused."""
    before = threading.active_count()
    stash = await ap.stash.open(url)
    c = await stash.collection("c", str, int)
    tasks = [asyncio.create_task(put(stash, c, [f"{n}-a", f"{n}-b"])) for n in range(4)]
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(50):
        if cancelled:
            await cancelled_after(stash.aclose(), turns % 4)
        await stash.aclose()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(o is None or isinstance(o, InvalidUsage | StaleLower) for o in outcomes), outcomes
    calls = [stash.append([]), put(stash, c, ["x"]), stash.iter(c), stash.confirm_leadership()]
    for call in (*calls, stash.collection("d", str, int), stash.migrate([]), COUNTERS.get(stash)):
        with pytest.raises(InvalidUsage):
            await call
    await stash.aclose()
    async with ap.stash.open(url) as again:
        found = await keys(again, c)
        told = {f"{n}-{x}" for n, outcome in enumerate(outcomes) if outcome is None for x in "ab"}
        assert told <= set(found)
        assert len(found) % 2 == 0
    named = [t for t in threading.enumerate() if t.name.startswith("aiopersist-sqlite")]
    deadline = time.monotonic() + 50
    while any(t.is_alive() for t in named):
        assert time.monotonic() < deadline, (named, before)
        await asyncio.sleep(0.01)


async def test_closing_leaves_no_connection(postgres_proxy: PostgresProxy) -> None:
    """Goal: after a close amid any call, the server has no connection of it."""
    proxy = postgres_proxy.proxy
    for turns in range(0, 50, 10):
        stash = await ap.stash.open(postgres_proxy.url)
        c = await stash.collection("c", str, int)
        calls = [put(stash, c, [f"{turns}-{n}" for n in range(600)]), stash.iter(c), stash.consolidate(c)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        for _ in range(turns):
            await asyncio.sleep(0)
        await stash.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(50):
            while proxy.connections:
                await asyncio.sleep(0.01)


@pytest.mark.long
async def test_closing_does_not_wait_for_a_server_that_is_gone(postgres_proxy: PostgresProxy) -> None:
    """Goal: a change that is being retried for ever ends with its stash, within twice the deadline."""
    stash = await ap.stash.open(postgres_proxy.url)
    c = await stash.collection("c", str, int)
    batch = await c.make_batch(stash)
    postgres_proxy.proxy.refuse()
    postgres_proxy.proxy.cut()
    task = asyncio.create_task(stash.append([batch]))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(50):
        await stash.aclose()
    with pytest.raises(InvalidUsage):
        await task


# --- SQLite ------------------------------------------------------------------------------------------


async def test_a_busy_owner_does_not_keep_others_from_opening(tmp_path: Path) -> None:
    """Goal: openers get the write lock beside a process that commits in a loop."""
    url = f"sqlite://{tmp_path}/st.db"
    owner = start(url, "busy", 100_000, exclusive=False)
    try:
        assert owner.stdout is not None
        await asyncio.to_thread(owner.stdout.readline)
        for _ in range(5):
            async with asyncio.timeout(50), ap.stash.open(url, exclusive=False) as stash:
                await COUNTERS.upsert_key(stash, "k", 1)
        async with asyncio.timeout(50), ap.stash.open(url):
            _, err = await finished(owner)
            assert "took the stash over" in err
    finally:
        owner.kill()
        await finished(owner)


async def test_another_connection_that_holds_the_lock_is_waited_for(tmp_path: Path) -> None:
    """Goal: BUSY is no error; a change waits for the process that holds the file."""
    async with ap.stash.open(f"sqlite://{tmp_path}/st.db") as stash:
        c = await stash.collection("c", str, int)
        holder = sqlite3.connect(tmp_path / "st.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        task = asyncio.create_task(put(stash, c, ["a"]))
        await asyncio.sleep(0.2)
        assert not task.done()
        assert await keys(stash, c) == []  # readers do not wait
        holder.execute("COMMIT")
        holder.close()
        await asyncio.wait_for(task, 30)
        assert await keys(stash, c) == ["a"]


async def test_a_full_disk(small_disk: Path) -> None:
    """Goal: a change that does not fit surely did not happen, and one that fits happens after it."""
    async with ap.stash.open(f"sqlite://{small_disk}/st.db") as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["a"])
        with pytest.raises(StorageUnavailable, match="full") as caught:
            await put(stash, c, [f"{n}" + "x" * 1000 for n in range(2000)])
        assert not caught.value.retry
        await put(stash, c, ["b"])
        assert await keys(stash, c) == ["a", "b"]
