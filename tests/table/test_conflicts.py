"""Transactions that meet others: what a conflict says, whose turn it is, and what fails with whom."""

import asyncio

import pytest

import aiopersist as ap
from tests.support.processes import Place
from tests.support.shards import until
from tests.table.kit import entries, gated, in_time, table

JOURNAL: ap.Schema[str, int, int] = ap.Schema(str, int)


@pytest.mark.parametrize("in_a_task", [False, True])
async def test_a_conflict_that_a_read_finds_names_what_changed(
    two: tuple[ap.Client, ap.Client], in_a_task: bool
) -> None:
    """Goal: the body ends before the commit, and the error says why all the same."""
    one, other = two
    mine, theirs, unread = table(one), table(other), table(one, "u")

    async def body(tx: ap.Transaction) -> None:
        before = await tx.get(mine, "k") or 0
        await theirs.put("k", before + 1)
        await table(other, "u").put("k", 1)  # later, so that nobody may see it without the change of `t`
        if not in_a_task:
            await tx.get(unread, "k")
        reading = tx.get(unread, "k")
        async with asyncio.TaskGroup() as group:
            found = group.create_task(reading)
        pytest.fail(f"reads of two moments: {found}")

    with pytest.raises(ap.Conflict) as conflict:
        await one.transact(body, max_attempts=1)
    assert conflict.value.keys == [("t", "k")]


@pytest.mark.parametrize("is_dropped", [False, True])
async def test_an_append_to_a_closed_shard_fails_alone(
    two: tuple[ap.Client, ap.Client], is_dropped: bool
) -> None:
    """Goal: as `write`, and operations of its group go on."""
    one, _ = two
    t = table(one)
    async with one.writer("journal", JOURNAL, clock="wall") as journal:
        if is_dropped:
            await one.drop("journal")
        else:
            await journal.compare_and_append([], 0, ap.Antichain())

        async def body(tx: ap.Transaction) -> None:
            tx.put(t, "k", 1)
            tx.append(journal, [("moved", 1)])

        async with asyncio.timeout(30):
            done = await asyncio.gather(
                t.put("a", 1), one.transact(body), t.put("b", 2), return_exceptions=True
            )
    refusal = ap.ShardFinalized if is_dropped else ap.UpperMismatch
    assert [type(answer) for answer in done] == [int, refusal, int]
    assert await t.get_many(["a", "b", "k"]) == {"a": 1, "b": 2}


async def test_one_that_runs_alone_may_wait_for_another_that_must_run_alone(
    two: tuple[ap.Client, ap.Client],
) -> None:
    """Goal: the inner one of two transactions is not kept from its turn by the outer one, which waits for
    it; nor are those that come later."""
    one, other = two
    runs = {"inner": 0, "outer": 0}

    async def transfer(tx: ap.Transaction, name: str) -> None:
        runs[name] += 1
        await tx.get(table(one, name), "k")
        if runs[name] <= 4:
            await table(other, name).put("k", runs[name])
        elif name == "outer":
            await one.transact(lambda tx: transfer(tx, "inner"))
        tx.put(table(one, name), "done", runs[name])

    async with asyncio.timeout(30):
        await one.transact(lambda tx: transfer(tx, "outer"))
        await table(one, "inner").put("later", 1)
        await one.transact(lambda tx: transfer(tx, "inner"))
    assert runs == {"outer": 5, "inner": 6}


@pytest.mark.parametrize("resident", [True, False])
async def test_ranges_that_others_of_the_group_fill(resident: bool, place: Place) -> None:
    """Goal: of transactions that wait for the same commit and found a range empty, one fills it."""
    async with gated(place.urls) as (client, gate):
        t, busy = client.table("t", str, int, resident=resident), table(client, "busy")
        await t.put("other", 1)
        await busy.put("k", 1)

        async def claim(tx: ap.Transaction, number: int) -> bool:
            is_free = not [entry async for entry in tx.items(t, prefix="p")]
            if is_free:
                tx.put(t, f"p{number}", number)
            return is_free

        gate.hold("compare_and_set")
        first = asyncio.create_task(busy.put("k", 2))
        await in_time(gate.held.wait())
        claims = [asyncio.create_task(client.transact(lambda tx, n=n: claim(tx, n))) for n in range(4)]
        await until(lambda: len(client._services.tables.group._queue.waiting) == len(claims))
        gate.open()
        answers = await in_time(asyncio.gather(*claims))
        await first
        assert answers.count(True) == 1
        assert len(await entries(t, prefix="p")) == 1


async def test_after_three_conflicts_it_runs_alone_among_its_own(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: a put of the same client waits for it then, and not before."""
    one, other = two
    mine, theirs = table(one), table(other)
    puts: list[asyncio.Task[int]] = []
    held: list[bool] = []

    async def body(tx: ap.Transaction) -> None:
        await tx.get(mine, "k")
        puts.append(asyncio.create_task(mine.put(f"p{len(puts)}", 1)))
        await asyncio.wait(puts[-1:], timeout=0.2 if len(puts) == 4 else 30)
        held.append(not puts[-1].done())
        if len(puts) <= 3:
            await theirs.put("k", len(puts))
        tx.put(mine, "done", len(puts))

    await in_time(one.transact(body))
    assert held == [False, False, False, True]
    await in_time(asyncio.gather(*puts))
    assert await mine.get("done") == 4
