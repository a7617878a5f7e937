"""Handles of tables: closed within a transaction, two on one table, on one that was dropped and made anew,
and of types that have gained fields."""

import asyncio

import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.support.processes import Place
from tests.support.shards import refused, until
from tests.table.kit import entries, gated, in_time, table


async def test_a_body_may_close_what_it_has_used(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: what it read and wrote counts, also where it read or wrote alone, or raises; nothing stays open,
    and no writer stays registered."""
    one, other = two
    await table(other).put("k", 1)

    async def reads(tx: ap.Transaction) -> int | None:
        async with table(one) as mine:
            return await tx.get(mine, "k")

    async def writes(tx: ap.Transaction) -> None:
        async with table(one) as mine:
            tx.put(mine, "new", 7)

    async def both(tx: ap.Transaction) -> None:
        async with table(one) as mine:
            tx.put(mine, "k", (await tx.get(mine, "k") or 0) + 1)

    async def raises(tx: ap.Transaction) -> None:
        async with table(one) as mine:
            tx.put(mine, "k", 0)
            raise LookupError("the body's own")

    assert await in_time(one.transact(reads)) == 1
    await in_time(one.transact(writes))
    await in_time(one.transact(both))
    with pytest.raises(LookupError, match="the body's own"):
        await in_time(one.transact(raises))
    assert dict(await entries(table(other))) == {"k": 2, "new": 7}
    mine = table(one)
    await mine.put("k", 3)
    await mine.aclose()
    async with asyncio.timeout(30):
        while one._services.tables._open:
            await asyncio.sleep(0.001)
    there = await other.inspect("t")
    assert (len(there.readers), len(there.writers)) == (1, 1)  # those of the other client


@pytest.mark.several_shards
async def test_a_conflict_with_a_table_that_the_body_closes(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: it comes through, however often it runs: also where it reads a snapshot, or asks others to
    stand back."""
    one, other = two
    theirs, runs = table(other), list[int | None]()

    async def reads(tx: ap.Transaction) -> int | None:
        async with table(one) as mine:
            runs.append(await tx.get(mine, "k"))
            if len(runs) < 12:
                await theirs.put("k", len(runs))
            return await tx.get(mine, "k")

    async def writes(tx: ap.Transaction) -> None:
        tx.put(theirs_here, "done", await reads(tx) or 0)

    theirs_here = table(one, "u")
    for body in (reads, writes):
        runs.clear()
        await theirs.put("k", 0)
        await in_time(one.transact(body))
        assert runs[-1] == 11
    assert await theirs_here.get("done") == 11


async def test_a_handle_that_was_closed_before(quiet: ap.Client) -> None:
    """Goal: a body that uses it is told at once, and nothing of it happens."""
    closed, t = table(quiet), table(quiet, "u")
    await closed.aclose()

    async def body(tx: ap.Transaction) -> None:
        tx.put(t, "k", 1)
        tx.put(closed, "k", 1)
        pytest.fail("it goes on")

    assert await refused(quiet.transact(body)) is ap.UsageKind.CLOSED
    assert await t.get("k") is None


async def test_a_writer_that_is_closed_before_the_commit(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: the transaction is refused as a whole, and the writer is not registered anew for it."""
    one, other = two
    t, schema = table(one), ap.Schema(str, int)
    journal = await one.writer("journal", schema, clock="wall")

    async def body(tx: ap.Transaction) -> None:
        tx.put(t, "k", 1)
        tx.append(journal, [("moved", 1)])
        await journal.aclose()

    assert await refused(in_time(one.transact(body))) is ap.UsageKind.CLOSED
    assert await t.get("k") is None
    assert not (await other.inspect("journal")).writers


async def test_handles_of_a_table_that_was_dropped_and_made_anew(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: in whatever order they are closed, the last one of each table closes it: its history is not held
    for longer."""
    one, other = two
    for number in range(2):
        old = table(one)
        await old.put("k", number)
        await one.drop("t")
        new, another = table(one), table(one)
        await new.put("k", 2)
        await another.get("k")
        for handle in (old, new, another) if number else (new, another, old):
            await handle.aclose()
        assert not (await other.inspect("t")).readers
        assert await table(other).get("k") == 2
        await other.drop("t")


async def test_by_its_name_and_by_its_id(two: tuple[ap.Client, ap.Client]) -> None:
    """Goal: operations of both handles at once are carried out; one transaction refuses them, since they are
    two views of one table."""
    one, _ = two
    by_name = table(one)
    await by_name.put("k", 0)
    by_id = table(one, str(await one.shard_id("t")))
    puts = [handle.update("k", lambda old: (old or 0) + 1) for handle in (by_name, by_id) * 5]
    await in_time(asyncio.gather(*puts))
    assert await by_name.get("k") == await by_id.get("k") == 10

    async def body(tx: ap.Transaction) -> None:
        tx.put(by_name, "a", 1)
        tx.put(by_id, "b", 1)

    with pytest.raises(ap.InvalidUsage, match="takes part twice"):
        await in_time(one.transact(body))
    assert await entries(by_id) == [("k", 10)]


class Old(BaseModel):
    number: int


class New(BaseModel):
    number: int
    text: str | None = None


@pytest.mark.several_shards
async def test_a_transaction_reads_a_table_of_older_types(place: Place) -> None:
    """Goal: a process that does not know the new field goes on to read in transactions, those that write
    other tables and those that meet a steady writer; to write it is refused."""
    one, other = await place.client(), await place.client()
    old, out = one.table("t", str, Old), table(one, "out")
    await old.put("k", Old(number=1))
    schema_id, _ = await other.schema("t")
    await other.compare_and_evolve_schema("t", schema_id, ap.Schema(str, New))
    new, runs = other.table("t", str, New), list[int]()
    await new.put("k", New(number=2, text="x"))

    async def copies(tx: ap.Transaction) -> None:
        found = await tx.get(old, "k")
        assert found is not None
        tx.put(out, "k", found.number)

    async def meets_a_writer(tx: ap.Transaction) -> int:
        first = await tx.get(old, "k")
        assert first is not None
        runs.append(first.number)
        await new.put("k", New(number=len(runs) + 2))
        return first.number

    async def writes(tx: ap.Transaction) -> None:
        tx.put(out, "k", 0)
        tx.put(old, "k", Old(number=0))

    await in_time(one.transact(copies))
    assert await out.get("k") == 2
    assert await in_time(one.transact(meets_a_writer)) == runs[-1]
    with pytest.raises(ap.CodecMismatch, match="text"):
        await in_time(one.transact(writes))
    assert await out.get("k") == 2


async def test_writers_of_old_and_new_types_append_to_one_shard(place: Place) -> None:
    """Goal: transactions that wait for the same commit are carried out, whose types are whichever; so is what
    has nothing to do with them. One that uses both writers is refused."""
    async with gated(place.urls) as (client, gate):
        old, t = await client.writer("j", ap.Schema(str, Old), clock="wall"), table(client)
        await client.compare_and_evolve_schema("j", (await client.schema("j"))[0], ap.Schema(str, New))
        new = await client.writer("j", ap.Schema(str, New))
        await t.put("k", 1)

        async def body(tx: ap.Transaction, *numbers: int) -> None:
            for number in numbers:
                if number % 2:
                    tx.append(new, [(str(number), New(number=number, text="x"))])
                else:
                    tx.append(old, [(str(number), Old(number=number))])

        gate.hold("compare_and_set")
        first = asyncio.create_task(t.put("k", 2))
        await in_time(gate.held.wait())
        works = [client.transact(lambda tx, n=n: body(tx, n)) for n in range(4)]
        tasks = [asyncio.ensure_future(work) for work in (*works, t.put("l", 1))]
        await until(lambda: len(client._services.tables.group._queue.waiting) == len(tasks))
        gate.open()
        await in_time(asyncio.gather(first, *tasks))
        assert (
            await refused(in_time(client.transact(lambda tx: body(tx, 4, 5)))) is ap.UsageKind.INVALID_APPEND
        )
        async with client.reader("j") as reader, reader.snapshot() as snapshot:
            assert [key for key, _, _ in await snapshot.rows()] == ["0", "1", "2", "3"]
        assert dict(await entries(t)) == {"k": 2, "l": 1}
