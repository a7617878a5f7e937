"""Goal: a change that follows from a read of tables is made from their contents at the time of the write,
however many tasks and processes change them at once; a late batch cannot make a table unreadable."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.stash import (
    StaleLower,
    Stash,
    StashCollection,
    StashError,
    TableTransaction,
    TypedCollection,
    transact,
)
from tests.stash.collections import ACCOUNTS, NAMES
from tests.support.internals import session_of

LOG = TypedCollection("log", int, str)
TOTAL = 3 * 100

Accounts = TableTransaction[str, int]
Log = TableTransaction[int, str]


def transfer(worker: str, number: int) -> Callable[[Accounts, Log], int]:
    """From one account to the next, with an entry in the log: its number is the next one there."""

    def change(accounts: Accounts, log: Log) -> int:
        giver, taker = NAMES[number % 3], NAMES[(number + 1) % 3]
        amount = min(7, accounts.get(giver) or 0)
        accounts.set(giver, (accounts.get(giver) or 0) - amount)
        accounts.set(taker, (accounts.get(taker) or 0) + amount)
        log.insert(len(log.items()), f"{worker}-{number}")
        return amount

    return change


async def by_batches(stash: Stash, worker: str, number: int) -> None:
    """The same, with batches that are made at the uppers that were read first."""
    accounts: StashCollection[Any, Any] = await ACCOUNTS.get(stash)
    log: StashCollection[Any, Any] = await LOG.get(stash)
    while True:
        uppers = [await stash.upper(accounts), await stash.upper(log)]
        tables = [
            TableTransaction[Any, Any](await stash.peek_one(c), lambda a, b: False) for c in (accounts, log)
        ]
        transfer(worker, number)(*tables)
        batches = []
        for c, upper, table in zip((accounts, log), uppers, tables, strict=True):
            batch = await c.make_batch(stash, upper)
            for key, val, diff in table.pending():
                c.append_to_batch(batch, key, val, diff)
            batches.append(batch)
        try:
            return await stash.append(batches)
        except StaleLower:
            continue


async def prepared(stash: Stash) -> None:
    await ACCOUNTS.upsert(stash, [(name, TOTAL // 3) for name in NAMES])
    await LOG.upsert(stash, [])


async def check(stash: Stash, done: set[str]) -> None:
    """Nothing was lost, doubled or made of money."""
    assert sum((await ACCOUNTS.peek_one(stash)).values()) == TOTAL
    log = await LOG.peek_one(stash)
    assert list(log) == list(range(len(done)))
    assert set(log.values()) == done


async def test_two_clients_with_many_tasks_each(url: str) -> None:
    """Goal: both ways, beside each other."""
    async with ap.stash.open(url) as first, ap.stash.open(url, exclusive=False) as second:
        await prepared(first)
        work = [transact(first, transfer("a", n), ACCOUNTS, LOG) for n in range(8)]
        work += [transact(second, transfer("b", n), ACCOUNTS, LOG) for n in range(8)]
        await asyncio.gather(*work, *(by_batches(second, "c", n) for n in range(4)))
        await check(second, {f"{w}-{n}" for w, count in (("a", 8), ("b", 8), ("c", 4)) for n in range(count)})


PROCESS = """
import asyncio, sys
import aiopersist as ap
from aiopersist.stash import transact
from tests.stash.test_transact import ACCOUNTS, LOG, by_batches, transfer

async def main(url, worker, count):
    async with ap.stash.open(url, exclusive=False) as stash:
        print("open", flush=True)
        sys.stdin.readline()
        for number in range(count):
            if worker < "c":
                await transact(stash, transfer(worker, number), ACCOUNTS, LOG)
            else:
                await by_batches(stash, worker, number)

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # of which nearly all goes into the start of processes, on a machine that is busy
@pytest.mark.parametrize("url", ["postgres", pytest.param("sqlite", marks=pytest.mark.long)], indirect=True)
async def test_several_processes(url: str) -> None:
    async with ap.stash.open(url) as stash:
        await prepared(stash)
        workers = "abc"
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", PROCESS, url, worker, "12"],
                *(-1, None, subprocess.PIPE, subprocess.PIPE),
                cwd=Path(__file__).parents[2],
            )
            for worker in workers
        ]
        for process in processes:
            assert process.stdout is not None
            await asyncio.to_thread(process.stdout.readline)
        codes = await asyncio.gather(*(asyncio.to_thread(p.communicate, b"\n") for p in processes))
        assert [p.returncode for p in processes] == [0] * len(workers), codes
        await check(stash, {f"{worker}-{n}" for worker in workers for n in range(12)})


# --- what a late batch can do ------------------------------------------------------------------------


async def test_a_batch_of_a_table_that_would_break_it_is_refused(url: str) -> None:
    """Goal: any violation, in any position: nothing is changed, and the table goes on."""
    async with ap.stash.open(url) as stash, ap.stash.open(url, exclusive=False) as other:
        await prepared(stash)
        c, log = await ACCOUNTS.get(stash), await LOG.get(stash)
        breaking = {
            "a val that is gone": [("ann", 99, -1), ("ann", 101, 1)],
            "a second val": [("ann", 101, 1)],
            "the same again": [("ann", 100, 1)],
            "a key that is not there": [("zoe", 1, -1)],
            "twice": [("zoe", 1, 2)],
        }
        before = await stash.iter(c), await stash.upper(c), await stash.upper(log)
        for what, changes in breaking.items():
            batch, beside = await c.make_batch(stash), await log.make_batch(stash)
            log.append_to_batch(beside, 0, "x", 1)
            for change in changes:
                c.append_to_batch(batch, *change)
            with pytest.raises(StashError, match=r"'accounts'.*'(ann|zoe)'.*refused"):
                await stash.append([beside, batch])
            assert (await other.iter(c), await other.upper(c), await other.upper(log)) == before, what
        later = await c.make_batch(stash)
        later.entries.append((("ann", 5), later.timestamp + 7, 1))  # beyond the batch's upper
        with pytest.raises(StashError, match="'ann'"):
            await stash.append([later])
        await ACCOUNTS.upsert_key(other, "ann", 100)
        await check(stash, set())


async def test_a_batch_made_after_somebody_elses_append(url: str) -> None:
    """Goal: read, then another opener appends, then `make_batch`, `append`: refused, and the table stays
    readable; at the upper that was read it is `StaleLower`, which can be tried again."""
    async with ap.stash.open(url) as stash, ap.stash.open(url, exclusive=False) as other:
        await prepared(stash)
        c = await ACCOUNTS.get(stash)
        upper = await stash.upper(c)
        table = TableTransaction(await stash.peek_one(c), lambda a, b: False)
        await ACCOUNTS.upsert_key(other, "ann", 150)
        table.set("ann", (table.get("ann") or 0) + 1)
        changes = table.pending()
        for given, kind in ((None, StashError), (upper, StaleLower)):
            batch = await c.make_batch(stash, given)
            for key, val, diff in changes:
                c.append_to_batch(batch, key, val, diff)
            with pytest.raises(kind):
                await stash.append([batch])
        assert await ACCOUNTS.peek_key_one(stash, "ann") == 150


async def test_a_table_that_changed_between_make_batch_and_append(url: str) -> None:
    """Goal: it is looked at again also where its upper is the same: what others added beyond upper counts."""
    async with ap.stash.open(url) as stash, ap.stash.open(url, exclusive=False) as other:
        await prepared(stash)
        c, raw = await ACCOUNTS.get(stash), await other.collection("accounts", str, int)
        upper = (await stash.upper(c)).time
        assert isinstance(upper, int)
        made = [await c.make_batch(stash) for _ in range(2)]
        for batch, key in zip(made, ("zoe", "kim"), strict=True):
            c.append_to_batch(batch, key, 1, 1)
        await other.update(raw, ("zoe", 2), upper, 1)  # not sealed yet
        with pytest.raises(StashError, match="'zoe'"):
            await stash.append(made[:1])
        await stash.append(made[1:])
        assert await ACCOUNTS.peek_key_one(stash, "kim") == 1
        assert await ACCOUNTS.peek_key_one(stash, "zoe") == 2


async def test_a_broken_table_can_be_mended(url: str) -> None:
    """Goal: what raw updates did to it; a batch that leaves a table is taken."""
    async with ap.stash.open(url) as stash:
        await prepared(stash)
        raw = await stash.collection("accounts", str, int)
        batch = await raw.make_batch(stash)
        raw.append_to_batch(batch, "ann", 5, 1)
        await stash.append([batch])
        with pytest.raises(StashError):
            await ACCOUNTS.peek_one(stash)
        c = await ACCOUNTS.get(stash)
        mending = await c.make_batch(stash)
        c.append_to_batch(mending, "ann", 5, -1)
        await stash.append([mending])
        await check(stash, set())


# --- transact ----------------------------------------------------------------------------------------


async def test_what_it_returns_and_what_it_writes(url: str) -> None:
    """Goal: tables that it only read get no append; an error of the caller's writes nothing; tables that
    nothing was sealed in are empty; what is not sealed yet is seen."""
    async with ap.stash.open(url) as stash:
        assert await transact(stash, lambda table: table.items(), ACCOUNTS) == {}
        assert await ACCOUNTS.upper(stash) == ap.Antichain(0)

        def fill(accounts: Accounts, log: Log) -> str:
            for name in NAMES:
                accounts.insert(name, TOTAL // 3)
            return f"{len(log.items())} entries"

        assert await transact(stash, fill, ACCOUNTS, LOG) == "0 entries"
        assert (await ACCOUNTS.upper(stash), await LOG.upper(stash)) == (ap.Antichain(1), ap.Antichain(0))
        await LOG.upsert(stash, [])
        await check(stash, set())

        def fail(accounts: Accounts) -> None:
            accounts.delete(lambda name, amount: True)
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            await transact(stash, fail, ACCOUNTS)
        c = await ACCOUNTS.get(stash)
        await stash.update(c, ("zoe", 3), 1, 1)
        assert await transact(stash, lambda table: table.set("zoe", None), ACCOUNTS) == 3
        await check(stash, set())
        with pytest.raises(StashError, match="twice"):
            await transact(stash, lambda a, b: None, ACCOUNTS, ACCOUNTS)

        async def late(accounts: Accounts) -> None: ...

        with pytest.raises(TypeError, match="coroutine"):
            _ = await transact(stash, late, ACCOUNTS)


async def test_a_table_that_was_only_read_changes_meanwhile(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: what was decided on it is decided again."""
    async with ap.stash.open(url) as stash, ap.stash.open(url, exclusive=False) as other:
        await prepared(stash)
        calls = 0

        def change(accounts: Accounts, log: Log) -> None:
            nonlocal calls
            calls += 1
            log.insert(0, str(accounts.get("ann")))

        entered, go_on = asyncio.Event(), asyncio.Event()
        attempt = session_of(stash).attempt

        async def attempt_late(given: Any) -> bool:
            entered.set()
            await go_on.wait()
            return await attempt(given)

        monkeypatch.setattr(session_of(stash), "attempt", attempt_late)  # between the read and the commit
        running = asyncio.create_task(transact(stash, change, ACCOUNTS, LOG))
        await entered.wait()
        await ACCOUNTS.upsert_key(other, "ann", 1)
        go_on.set()
        await running
        assert (await LOG.peek_one(stash), calls) == ({0: "1"}, 2)


async def test_modes(url: str) -> None:
    """Goal: refused where nothing may be written; within a migration and on a savepoint it works."""
    async with ap.stash.open(url) as stash:
        await prepared(stash)

        async def step(tx: Stash) -> None:
            assert await transact(tx, transfer("m", 0), ACCOUNTS, LOG) == 7

        assert await stash.migrate([step]) == 1
        await check(stash, {"m-0"})
        async with ap.stash.open(url, savepoint=True) as trial:
            await transact(trial, transfer("s", 1), ACCOUNTS, LOG)
            await check(trial, {"m-0", "s-1"})
        async with ap.stash.open(url, readonly=True) as reader:
            with pytest.raises(StashError, match="read-only"):
                await transact(reader, transfer("r", 2), ACCOUNTS, LOG)
        await check(stash, {"m-0"})
        async with ap.stash.open(url):
            with pytest.raises(StashError) as caught:
                await transact(stash, transfer("f", 3), ACCOUNTS, LOG)
            assert caught.value.is_unrecoverable
