"""Operations that wait at the same moment share one commit, in the order of their calls."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.consensus import Consensus
from tests.support.processes import Place
from tests.table.kit import entries, gated, in_time, sent, versions


async def test_many_tasks_share_few_commits(client: ap.Client) -> None:
    """64 tasks that put 16 times each: a commit carries about all that wait."""
    table = client.table("t", str, int)
    await table.put("k", 0)
    before = await versions(client, "t")

    async def work(task: int) -> None:
        for number in range(16):
            await table.put(f"{task}", number)

    await asyncio.gather(*map(work, range(64)))
    assert await versions(client, "t") - before <= 64
    assert await table.count() == 65


@pytest.mark.several_shards
async def test_two_tables_share_one_commit_and_time(client: ap.Client) -> None:
    """Operations on several tables of a client that wait together: one statement, one time."""
    a, b = client.table("a", str, int), client.table("b", int, str)
    await asyncio.gather(a.put("warm", 0), b.put(0, "up"))
    seqnos = await versions(client, "a"), await versions(client, "b")
    times = await asyncio.gather(
        *(t.put(k, v) for t, k, v in ((a, "x", 1), (b, 1, "x"), (a, "y", 2), (b, 2, "y")))
    )
    assert len(set(times)) == 1
    assert (await versions(client, "a"), await versions(client, "b")) == (seqnos[0] + 1, seqnos[1] + 1)


async def test_each_sees_what_those_before_it_did(quiet: ap.Client) -> None:
    """The order of the calls, within one group: of puts, updates, inserts and deletes of one key."""
    table = quiet.table("t", str, int)
    await table.put("z", 0)
    seen: list[Any] = []

    def add(old: int | None) -> int:
        seen.append(old)
        return (old or 0) + 1

    answers = await asyncio.gather(
        table.put("k", 1),
        table.update("k", add),
        table.insert("k", 9),
        table.delete("k"),
        table.update("k", add),
        table.insert("k", 9),
        table.update("other", add),
        table.delete("other"),
        table.insert("other", 5),
        return_exceptions=True,
    )
    assert seen == [1, None, None]
    assert isinstance(answers[2], ap.KeyExists)
    assert isinstance(answers[5], ap.KeyExists)
    assert (answers[1], answers[4], answers[6]) == (2, 1, 1)
    assert {answers[i] for i in (0, 3, 7, 8)} == {answers[0]}
    assert await table.get_many(["k", "other"]) == {"k": 1, "other": 5}


async def test_updates_of_one_key_add_up(client: ap.Client) -> None:
    """No update is lost among tasks and clients."""
    table = client.table("t", str, int)
    await asyncio.gather(*(table.update("k", lambda old: (old or 0) + 1) for _ in range(200)))
    assert await table.get("k") == 200


async def test_feeds_show_the_net_change(quiet: ap.Client) -> None:
    """One change of a key per group; none for what was undone."""
    table = quiet.table("t", str, int)
    await table.put("k", 0)
    async with table.changes(start="now") as feed:
        time, *_ = await asyncio.gather(
            table.put("k", 1),
            table.put("k", 2),
            table.put("gone", 1),
            table.delete("gone"),
            table.put("new", 1),
        )
        step = await anext(feed)
        assert step.changes == [ap.Change("k", 0, 2, time), ap.Change("new", None, 1, time)]


class _Odd(Exception):
    def __bool__(self) -> bool:
        return False


@pytest.mark.parametrize(
    "error",
    [
        ValueError("mine"),
        StopIteration(),
        asyncio.CancelledError(),
        KeyError("x"),
        _Odd(),
        ap.UpperMismatch(1, 2),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_one_that_fails_fails_alone(error: BaseException, quiet: ap.Client) -> None:
    """Whatever a function raises reaches its caller, and the others of the group go on."""
    table = quiet.table("t", str, int)
    await table.put("z", 0)

    def f(old: Any) -> Any:
        raise error

    async def failing() -> Any:
        try:
            return await table.update("k", f)
        except BaseException as raised:
            return raised

    before, raised, after = await in_time(asyncio.gather(table.put("k", 1), failing(), table.put("l", 1)))
    assert before == after
    assert isinstance(raised, RuntimeError if isinstance(error, StopIteration) else type(error))
    assert await table.get_many(["k", "l"]) == {"k": 1, "l": 1}
    assert await in_time(table.put("k", 2)) > before  # the queue is alive


async def test_a_dropped_table_fails_alone(quiet: ap.Client) -> None:
    """Of a group over two tables, one of which is gone, the other part is written."""
    a, b = quiet.table("a", str, int), quiet.table("b", str, int)
    await asyncio.gather(a.put("k", 1), b.put("k", 1))
    await quiet.drop("a")
    answers = await asyncio.gather(a.put("k", 2), b.put("k", 2), a.get("k"), return_exceptions=True)
    assert isinstance(answers[0], ap.ShardFinalized)
    assert isinstance(answers[2], ap.ShardFinalized)
    assert await b.get("k") == 2
    fresh = quiet.table("a", str, int)
    assert await fresh.get("k") is None
    await fresh.put("k", 3)
    assert await fresh.get("k") == 3


async def test_cancelled_before_its_group_was_sent(quiet: ap.Client) -> None:
    """It does not happen, and the others do."""
    table = quiet.table("t", str, int)
    await table.put("z", 0)
    first = asyncio.create_task(table.put("a", 1))
    second = asyncio.create_task(table.put("b", 1))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([first, second])
    assert second.cancelled()
    assert await entries(table) == [("a", 1), ("z", 0)]


async def test_cancelled_while_another_group_is_written(place: Place) -> None:
    """It waits for its turn, is cancelled, and does not happen."""
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        await table.put("z", 0)
        gate.hold("compare_and_set")
        first = asyncio.create_task(table.put("a", 1))
        await in_time(gate.held.wait())
        second = asyncio.create_task(table.put("b", 1))
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        gate.open()
        await first
        await table.put("c", 1)
        assert await entries(table) == [("a", 1), ("c", 1), ("z", 0)]


async def test_cancelled_after_its_group_was_sent(place: Place) -> None:
    """`happened` tells, and a repeat with the same id writes nothing."""
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        await table.put("z", 0)
        gate.hold("compare_and_set", late=True)
        put = asyncio.create_task(table.put("a", 1, once="mine"))
        other = asyncio.create_task(table.put("b", 1))
        await in_time(gate.held.wait())
        put.cancel()
        await asyncio.wait([put])
        assert put.cancelled()
        gate.open()
        time = await other
        assert await client.happened("mine", shard="t") == time
        await table.put("a", 2)
        assert await table.put("a", 1, once="mine") == time
        assert await table.get("a") == 2


async def test_a_store_that_writes_one_table_at_a_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each table has a commit of its own, and nothing fails."""

    async def refuse(self: Consensus, entries: Any) -> bool:
        raise ap.Unsupported("one at a time")

    client = await place.client()
    monkeypatch.setattr(type(place.clock), "compare_and_set_many", refuse)
    a, b = client.table("a", str, int), client.table("b", str, int)
    for number in range(3):
        await in_time(asyncio.gather(a.put("k", number), b.put("k", number), a.put("l", number)))
    assert await a.get("l") == await b.get("k") == 2


@pytest.mark.blocks_loop
async def test_more_operations_than_a_group_takes(quiet: ap.Client) -> None:
    """10,000 at once: all in, in a few commits."""
    table = quiet.table("t", int, int)
    await table.put(0, 0)
    before = sent(quiet)
    await asyncio.gather(*(table.put(i, i) for i in range(10_000)))
    assert (sent(quiet) - before)["consensus.compare_and_set"] <= 20
    assert await table.count() == 10_000


async def test_two_clients_write_the_same_keys(location: Any) -> None:
    """After a mismatch the view catches up; nothing is lost, and only what read another val runs again."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as one,
        ap.open(blob=location.blob, consensus=location.consensus) as two,
    ):
        tables = one.table("t", str, int), two.table("t", str, int)
        runs = 0

        def add(old: int | None) -> int:
            nonlocal runs
            runs += 1
            return (old or 0) + 1

        async def work(table: Any, number: int) -> None:
            for _ in range(5):
                await table.update("hot", add)
                await table.put(f"{number}", 1)

        await in_time(asyncio.gather(*(work(tables[i % 2], i) for i in range(16))))
        assert await tables[0].get("hot") == await tables[1].get("hot") == 80
        assert await tables[0].count() == 17
        assert runs >= 80


async def test_only_what_read_another_val_runs_again(place: Place) -> None:
    """The commit of another client changes one key: of two functions, one runs twice."""
    async with gated(place.urls) as (client, gate):
        table, other = client.table("t", str, int), (await place.client()).table("t", str, int)
        await table.put_many({"a": 1, "b": 1})
        await other
        runs: list[Any] = []

        def noting(key: str) -> Any:
            return lambda old: runs.append((key, old)) or old + 1

        gate.hold("compare_and_set")
        updates = [asyncio.create_task(table.update(key, noting(key))) for key in "ab"]
        await in_time(gate.held.wait())
        await other.put("a", 10)
        gate.open()
        assert await asyncio.gather(*updates) == [11, 2]
        assert runs == [("a", 1), ("b", 1), ("a", 10)]


@pytest.mark.parametrize("who", ["same", "other"])
async def test_times_rise_over_all_tables(who: str, place: Place) -> None:
    """Goal: a commit comes after every commit that the client has made or seen, also to another table, by
    whatever call, and though the clock was set back."""
    one = await place.client(table_resident_bytes=1000, blob_target_size=1000)
    times = [await one.table("t", str, int).put("k", 1)]
    client = one if who == "same" else await place.client(table_resident_bytes=1000, blob_target_size=1000)
    assert await client.table("t", str, int).get("k") == 1
    place.clock.ahead_s = -50.0
    times.append(await client.table("u", str, int).put("k", 1))
    large = ((f"k{number}", number) for number in range(100))
    times.append(await client.table("v", str, int).put_many(large))
    seen: list[ap.Transaction] = []

    async def body(tx: ap.Transaction) -> None:
        seen.append(tx)
        tx.put(client.table("w", str, int), "k", 1)

    await client.transact(body)
    times.append(seen[-1].time)
    assert times == sorted(set(times))
