"""Transactions: what they read, write, return and raise. `test_game.py` checks whole histories."""

import asyncio
import uuid
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.table.transaction.transact import SNAPSHOT_AFTER
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.support.processes import Place
from tests.table.kit import gated, table

JOURNAL: ap.Schema[str, int, int] = ap.Schema(str, int)


# --- one transaction --------------------------------------------------------------------------------


@pytest.mark.several_shards
async def test_it_sees_its_own_writes_and_moves_all_tables_at_one_time(
    two: tuple[ap.Client, ap.Client],
) -> None:
    one, other = two
    a, b, seen = table(one, "a"), table(one, "b"), []
    await a.put_many({"k1": 1, "k2": 2, "l": 3})
    async with one.writer("journal", JOURNAL, clock="wall") as journal:

        async def body(tx: ap.Transaction) -> str:
            seen.append(tx)
            tx.put(a, "k3", 30)
            tx.delete(a, "k1", "never")
            tx.put_many(b, {"x": 1, "y": 2})
            tx.append(journal, [("moved", 1)])
            assert await tx.get(a, "k1") is None
            assert await tx.get_many(a, ["k2", "k3", "none"]) == {"k2": 2, "k3": 30}
            await tx.insert(b, "z", 3)
            tx.delete(a, "k2")
            await tx.insert(a, "k2", 2)
            with pytest.raises(ap.KeyExists):
                await tx.insert(b, "x", 0)
            assert [entry async for entry in tx.items(a, prefix="k")] == [("k2", 2), ("k3", 30)]
            assert [entry async for entry in tx.items(b, "y")] == [("y", 2), ("z", 3)]
            return "done"

        assert await one.transact(body) == "done"
        time = seen[-1].time
    for name, contents in (("a", {"k2": 2, "k3": 30, "l": 3}), ("b", {"x": 1, "y": 2, "z": 3})):
        assert dict([entry async for entry in table(other, name).items(as_of=time)]) == contents
        assert await table(other, name).get("x", as_of=time - 1) is None
        assert (await other.upper(name)).time == time + 1
    async with other.reader("journal") as r, r.snapshot(time) as s:
        assert await s.rows() == [("moved", 1, 1)]
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        seen[-1].put(a, "k", 1)


@pytest.mark.several_shards
async def test_tables_that_were_only_read_take_part(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: a cut by time over several tables is a prefix of the order of commits."""
    one, _ = two
    a, b, times = table(one, "a"), table(one, "b"), []
    await a.put("k", 1)
    await b.put("k", 1)

    async def body(tx: ap.Transaction) -> None:
        times.append(tx)
        tx.put(a, "k", (await tx.get(b, "k") or 0) + 1)

    await one.transact(body)
    assert (await one.upper("b")).time == times[0].time + 1


async def test_an_exception_leaves_nothing(two: tuple[ap.Client, ap.Client]) -> None:
    one, _ = two
    a = table(one, "a")
    await a.put("k", 1)
    upper = await one.upper("a")

    async def body(tx: ap.Transaction) -> None:
        tx.put(a, "k", 2)
        assert await tx.get(a, "k") == 2
        raise LookupError("the body's own")

    with pytest.raises(LookupError, match="the body's own"):
        await one.transact(body, once="failed")
    assert await a.get("k") == 1
    assert await one.upper("a") == upper
    assert await one.happened("failed") is None


async def test_a_body_that_rests_on_what_is_old_runs_again(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: its exception is given out only if what it read is so."""
    one, other = two
    mine, theirs = table(one), table(other)
    await mine.put("k", 1)
    runs = []

    async def body(tx: ap.Transaction) -> int | None:
        runs.append(await tx.get(mine, "k"))
        if len(runs) == 1:
            await theirs.put("k", 2)
        if runs[-1] == 1:
            raise ValueError("it was 1")
        return runs[-1]

    assert await one.transact(body) == 2
    assert runs == [1, 2]


async def test_tasks_of_a_body_may_run_again_with_it(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: one of them finds what is no longer so, within a group of tasks."""
    one, other = two
    mine, theirs, runs = table(one), table(other), []
    await mine.put_many({"a": 1, "b": 1})

    async def body(tx: ap.Transaction) -> int:
        runs.append(await tx.get(mine, "a"))
        if len(runs) == 1:
            await theirs.put_many({"a": 2, "b": 2})
            await mine.get("a")
        async with asyncio.TaskGroup() as group:
            found = group.create_task(tx.get(mine, "b"))
        tx.put(mine, "sum", runs[-1] + (found.result() or 0))
        return runs[-1]

    assert await one.transact(body) == 2
    assert runs == [1, 2]
    assert await mine.get("sum") == 4


async def test_a_conflict_names_what_changed(two: tuple[ap.Client, ap.Client]) -> None:
    one, other = two
    mine, theirs = table(one), table(other)
    await mine.put_many({"k": 1, "p1": 1})

    async def by_key(tx: ap.Transaction) -> None:
        before = await tx.get(mine, "k")
        await theirs.put("k", (before or 0) + 1)
        tx.put(mine, "k", 0)

    with pytest.raises(ap.Conflict) as conflict:
        await one.transact(by_key, max_attempts=2)
    assert conflict.value.keys == [("t", "k")]

    async def by_range(tx: ap.Transaction) -> None:
        count = len([entry async for entry in tx.items(mine, prefix="p")])
        await theirs.put(f"p{count + 1}", 1)
        tx.put(mine, "k", count)

    with pytest.raises(ap.Conflict) as conflict:
        await one.transact(by_range, max_attempts=1)
    assert conflict.value.keys == [("t", ap.ReadRange(None, None, "p"))]
    assert await mine.get("k") == 3


@pytest.mark.several_shards
async def test_a_transaction_happens_once(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: whatever tables the repeat would touch, in another client, and also if nothing was written."""
    one, other = two
    a = table(one)

    def adding(client: ap.Client, name: str) -> Any:
        async def body(tx: ap.Transaction) -> int:
            of = table(client, name)
            tx.put(of, "n", (await tx.get(of, "n") or 0) + 1)
            return 7

        return body

    assert await one.transact(adding(one, "t"), once="r") == 7
    time = await one.happened("r")
    assert time is not None
    assert await one.transact(adding(one, "u"), once="r") == ap.Repeated(time)
    assert await other.transact(adding(other, "t"), once="r") == ap.Repeated(time)
    assert await other.happened("r") == time
    assert await a.get("n") == 1

    async def nothing(tx: ap.Transaction) -> int | None:
        return await tx.get(a, "n")

    assert await one.transact(nothing, once="read") == 1
    assert isinstance(await other.transact(nothing, once="read"), ap.Repeated)
    assert await one.transact(adding(one, "t"), txn=("app", 5)) == 7
    assert isinstance(await other.transact(adding(other, "t"), txn=("app", 4)), ap.Repeated)
    assert await a.get("n") == 2
    answers = await asyncio.gather(*(c.transact(adding(c, "t"), once="x") for c in (one, other) * 3))
    assert min(map(str, answers)) == "7"
    assert await a.get("n") == 3


async def test_what_a_transaction_refuses(two: tuple[ap.Client, ap.Client], mem: ap.Client) -> None:
    one, other = two
    a, foreign = table(one), table(mem)
    async with one.writer("logical", JOURNAL) as logical, other.writer("wall", JOURNAL, clock="wall") as wall:
        refused: list[tuple[Any, Any]] = [
            (lambda tx: tx.put(a, 3, 1), ap.InvalidUpdate),
            (lambda tx: tx.put(a, "k", "v"), ap.InvalidUpdate),
            (lambda tx: tx.put(foreign, "k", 1), ap.InvalidUsage),
            (lambda tx: tx.append(logical, [("k", 1)]), ap.InvalidUsage),
            (lambda tx: tx.append(wall, [("k", 1)]), ap.InvalidUsage),
            (lambda tx: tx.append(a, [("k", 1)]), TypeError),
            (lambda tx: tx.put("t", "k", 1), TypeError),
        ]
        for call, error in refused:

            async def body(tx: ap.Transaction, call: Any = call) -> None:
                call(tx)

            with pytest.raises(error):
                await one.transact(body)
    with pytest.raises(ap.InvalidUsage, match="INVALID_TXN"):
        await one.transact(lambda tx: asyncio.sleep(0), once="a", txn=("b", 1))
    with pytest.raises(ValueError, match="max_attempts"):
        await one.transact(lambda tx: asyncio.sleep(0), max_attempts=0)
    assert await a.count() == 0


async def test_a_body_that_waits_for_its_own_client_does_not_hang(mem: ap.Client) -> None:
    """Goal: after three conflicts it runs alone, and others of its client wait a second at most."""
    t, runs = table(mem), []
    await t.put("k", 0)

    async def body(tx: ap.Transaction) -> int:
        runs.append(await tx.get(t, "k") or 0)
        if len(runs) <= 5:
            await t.put("k", runs[-1] + 1)
        tx.put(t, "done", 1)
        return len(runs)

    assert await mem.transact(body) == 6


async def test_a_body_sees_no_half_of_another_transaction() -> None:
    """Goal: in each run, also in one that runs again, reads of several tables are of one moment: though the
    view of the one has heard of a transaction, and the other view has not."""
    url, runs = f"mem://{uuid.uuid4().hex}", list[tuple[int | None, int | None]]()
    async with gated(url, watch_timeout_s=50.0) as (one, gate), ap.open(url) as other:
        a, b = table(one, "a"), table(one, "b")
        await a.put("k", 50)
        await b.put("k", 50)
        gate.hold("watch")

        async def move(tx: ap.Transaction) -> None:
            for name, diff in (("a", -1), ("b", 1)):
                there = table(other, name)
                tx.put(there, "k", (await tx.get(there, "k") or 0) + diff)

        async def sum_up(tx: ap.Transaction) -> None:
            runs.append((await tx.get(a, "k"), None))
            if len(runs) == 1:
                await other.transact(move)
                assert await b.get("k") == 51
                assert await a.get("k", stale=True) == 50
            runs[-1] = runs[-1][0], await tx.get(b, "k")

        await one.transact(sum_up)
        gate.open()
    assert runs == [(50, None), (49, 51)]


class NoPause(Faults):
    """Before every third look at a head another client has committed once more: no two looks in a row at two
    tables find none moved."""

    def __init__(self) -> None:
        super().__init__()
        self.losing_hints = True
        self.before: Any = None
        self.looks = 0

    async def call(self, op: str, act: Any) -> Any:
        if self.before is not None and op == "head":
            self.looks += 1
            if self.looks % 3 == 0:
                await self.before()
        return await super().call(op, act)


async def test_a_transaction_that_only_reads_comes_through_beside_a_writer_that_never_pauses() -> None:
    """Goal: whenever it looks, others have committed to both tables; it sees one moment, and ends. One that
    writes after all does, too."""
    url, faults = f"mem://{uuid.uuid4().hex}", NoPause()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    quiet = ap.Settings(watch_timeout_s=50.0)
    opening = ap.open(blob=ap.open_blob(url), consensus=consensus, settings=quiet, maintenance=False)
    async with opening as one, ap.open(url) as other:
        a, b = table(one, "a"), table(one, "b")
        await a.put("k", 500)
        await b.put("k", 500)

        async def move(tx: ap.Transaction) -> None:
            for name, diff in (("a", -1), ("b", 1)):
                there = table(other, name)
                tx.put(there, "k", (await tx.get(there, "k") or 0) + diff)

        times: list[ap.Transaction] = []

        async def sum_up(tx: ap.Transaction) -> int:
            times.append(tx)
            first = await tx.get(a, "k") or 0
            return first + sum([val async for _, val in tx.items(b)])

        faults.before = lambda: other.transact(move)
        before = await other.upper("a")
        assert await one.transact(sum_up) == 1000
        assert times[-1].time >= before.time
        assert faults.looks < 500
        with pytest.raises(ap.Conflict):
            await one.transact(sum_up, max_attempts=2)

        del times[:]

        async def late(tx: ap.Transaction) -> None:
            total = await sum_up(tx)
            if len(times) > SNAPSHOT_AFTER:  # in an attempt that had only read so far
                faults.before = None
                await tx.insert(a, "sum", total)

        await one.transact(late)
        assert await a.get("sum") == 1000


async def test_a_body_that_raises_before_it_touches_a_table_raises_what_it_raised(
    two: tuple[ap.Client, ap.Client],
) -> None:
    """Its id is not recorded: nothing was done."""

    async def body(tx: ap.Transaction) -> None:
        raise LookupError("nothing to do")

    with pytest.raises(LookupError, match="nothing to do"):
        await two[0].transact(body, once="r")
    assert await two[1].happened("r") is None


async def test_a_store_that_writes_one_shard_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a transaction in which several shards take part, one of them by its id or by a read, is refused,
    and nothing of it is there; one of a single table is none of these."""

    async def refuse(self: Any, entries: Any) -> bool:
        raise ap.Unsupported("one at a time")

    client = await place.client()
    a, b = table(client, "a"), table(client, "b")
    await a.put("k", 1)
    await b.put("k", 1)
    monkeypatch.setattr(type(place.clock), "compare_and_set_many", refuse)
    before = await client.upper("a"), await client.upper("b")

    async def both(tx: ap.Transaction) -> None:
        tx.put(a, "k", 2)
        tx.put(b, "k", 2)

    async def reads(tx: ap.Transaction) -> None:
        tx.put(a, "k", (await tx.get(b, "k") or 0) + 1)

    async def alone(tx: ap.Transaction) -> None:
        tx.put(a, "k", (await tx.get(a, "k") or 0) + 1)

    for body, marks in (both, {}), (reads, {}), (alone, {"once": "r"}):
        with pytest.raises(ap.Unsupported):
            await client.transact(body, **marks)  # type: ignore[arg-type]
    assert await a.get("k") == await b.get("k") == 1
    assert (await client.upper("a"), await client.upper("b")) == before
    await client.transact(alone)
    assert await a.get("k") == 2
