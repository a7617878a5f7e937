"""`client.transact(body, acks=...)`: what a consumer does to tables, and its position, in one commit."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.subscription.kit import in_time, rows, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused
from tests.table.kit import changes_of, gated, versions


async def position(client: ap.Client, shard: str = "s") -> ap.Antichain:
    return (await client.admin.subscriptions(shard))["sub"].position


@pytest.mark.several_shards
async def test_into_tables(client: ap.Client) -> None:
    """A step is counted and acknowledged, once; a repeat is told and runs nothing."""
    await write(client, ("a", 1), ("b", 2))
    sums = client.table("sums", str, int)
    async with client.subscription("s", SCHEMA, name="sub") as sub:
        step = await in_time(anext(sub))
        runs = []

        async def body(tx: ap.Transaction) -> None:
            runs.append(1)
            before = await tx.get(sums, "all") or 0
            tx.put(sums, "all", before + sum(update.val for update in step.updates))

        await sums
        before = [await versions(client, name) for name in ("s", "sums")]
        await in_time(client.transact(body, acks=[(sub, step)]))
        after = [await versions(client, name) for name in ("s", "sums")]
        assert after[0] == before[0] + 1
        assert await refused(client.transact(body, acks=[(sub, step)])) is ap.UsageKind.CONSUMED
        assert (len(runs), await sums.get("all"), await position(client)) == (1, 3, ap.Antichain(1))


@pytest.mark.several_shards
async def test_acks_are_taken_as_the_call_begins(client: ap.Client) -> None:
    """Goal: their owner empties the list while the first transaction of a process imports what it needs."""
    await write(client, ("a", 1))
    counts = client.table("counts", str, int)
    async with client.subscription("s", SCHEMA, name="sub") as sub:
        acks = [(sub, await in_time(anext(sub)))]

        async def body(tx: ap.Transaction) -> None:
            tx.put(counts, "all", 1)

        committing = asyncio.create_task(client.transact(body, acks=acks))
        await asyncio.sleep(0)
        acks.clear()
        await in_time(committing)
        assert await position(client) == ap.Antichain(1)


async def test_from_a_table_into_itself(client: ap.Client) -> None:
    """The consumed table is written: one version of it has both."""
    table = client.table("t", str, int)
    await table.put("a", 1)
    async with table.subscription("sub") as sub:
        step = await in_time(anext(sub))

        async def body(tx: ap.Transaction) -> None:
            for change in step.changes:
                tx.put(table, f"{change.key}!", change.new or 0)

        before = await versions(client, "t")
        await in_time(client.transact(body, acks=[(sub, step)]))
        assert await versions(client, "t") == before + 1
        assert await position(client, "t") == step.upper
        step = await in_time(anext(sub))
        assert [change.key for change in changes_of([step])] == ["a!"]
        assert await refused(client.transact(body, acks=[(sub, step), (sub, step)])) is (
            ap.UsageKind.INVALID_APPEND
        )


@pytest.mark.several_shards
async def test_nothing_but_acknowledgements(place: Place) -> None:
    """A body that touches nothing, one that only reads, and two subscriptions at once."""
    client = await place.client()
    await write(client, ("a", 1))
    await write(client, ("a", 1), name="other")
    table = client.table("t", str, int)
    await table.put("a", 5)
    async with (
        client.subscription("s", name="sub") as one,
        client.subscription("other", name="sub") as two,
        client.subscription("s", name="third") as three,
    ):
        acks = [(sub, await in_time(anext(sub))) for sub in (one, two, three)]

        async def nothing(tx: ap.Transaction) -> str:
            return "done"

        async def fails(tx: ap.Transaction) -> None:
            await tx.get(table, "a")
            raise ZeroDivisionError

        async def reads(tx: ap.Transaction) -> int | None:
            return await tx.get(table, "a")

        for body in (fails,):
            with pytest.raises(ZeroDivisionError):
                await in_time(client.transact(body, acks=acks))
        assert await position(client) == ap.Antichain(0)
        assert await in_time(client.transact(nothing, acks=acks)) == "done"
        assert [await position(client, name) for name in ("s", "other")] == [ap.Antichain(1)] * 2
        assert (await client.admin.subscriptions("s"))["third"].position == ap.Antichain(1)
        await write(client, ("a", 2))
        acks = [(one, await in_time(anext(one)))]
        assert await in_time(client.transact(reads, acks=acks)) == 5
        assert await position(client) == ap.Antichain(2)
        assert await refused(client.transact(nothing, acks=acks)) is ap.UsageKind.CONSUMED


@pytest.mark.several_shards
async def test_one_that_is_refused_fails_alone(place: Place) -> None:
    """Of operations that share a commit: the others are carried out. A take-over that this process has not
    heard of is found by the commit."""
    async with gated(place.urls, watch_timeout_s=1000, ack_every_s=1000) as (client, gate):
        await write(client, ("a", 1))
        table = client.table("t", str, int)
        await table.put("x", 0)
        async with client.subscription("s", SCHEMA, name="sub") as sub:
            step = await in_time(anext(sub))

            async def body(tx: ap.Transaction) -> None:
                tx.put(table, "joint", 1)

            gate.losing_hints = True
            async with (await place.client()).subscription("s", SCHEMA, name="sub") as second:
                done = await in_time(
                    asyncio.gather(
                        table.put("a", 1),
                        client.transact(body, acks=[(sub, step)]),
                        table.put("b", 1),
                        return_exceptions=True,
                    )
                )
                assert isinstance(done[1], ap.OpaqueMismatch)
                assert dict([entry async for entry in table.items()]) == {"a": 1, "b": 1, "x": 0}
                assert await rows(second, 1) == [("a", 1)]


@pytest.mark.several_shards
async def test_several_steps_at_once(place: Place) -> None:
    """Transactions of later and earlier steps in one group: each step counts once, whatever the order of the
    calls."""
    client = await place.client()
    counts = client.table("counts", int, int)
    await counts.put(-1, 0)
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", SCHEMA, name="sub") as sub:
        steps = []
        for number in range(6):
            await writer.write([("a", number)])
            steps.append(await in_time(anext(sub)))

        def counting(number: int) -> Any:
            async def body(tx: ap.Transaction) -> None:
                tx.put(counts, number, 1)

            return client.transact(body, acks=[(sub, steps[number])])

        order = [0, 2, 1, 4, 3, 5]
        done = await in_time(asyncio.gather(*map(counting, order), return_exceptions=True))
        assert done == [None] * 6
        assert sorted([key async for key, _ in counts.items()]) == [-1, *range(6)]
        assert await position(client) == ap.Antichain(6)


@pytest.mark.several_shards
@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED])
async def test_lost_answers(place: Place, outcome: Outcome) -> None:
    """The transaction is known in the end, and counted once."""
    async with gated(place.urls) as (client, gate):
        await write(client, ("a", 1))
        table = client.table("t", str, int)
        await table.put("n", 0)
        async with client.subscription("s", SCHEMA, name="sub") as sub:
            step = await in_time(anext(sub))

            async def body(tx: ap.Transaction) -> None:
                tx.put(table, "n", (await tx.get(table, "n") or 0) + 1)

            gate.fail_next("compare_and_set_many", outcome)
            await in_time(client.transact(body, acks=[(sub, step)]))
            await gate.land()
            assert await refused(client.transact(body, acks=[(sub, step)])) is ap.UsageKind.CONSUMED
            assert (await table.get("n"), await position(client)) == (1, ap.Antichain(1))


@pytest.mark.several_shards
async def test_cancelled_at_every_await(place: Place) -> None:
    """And repeated until it says that it happened: each step counts once."""
    client = await place.client()
    table = client.table("t", str, int)
    await table.put("n", 0)
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", SCHEMA, name="sub") as sub:
        for turns in range(50):
            await writer.write([("a", turns)])
            step = await in_time(anext(sub))

            async def body(tx: ap.Transaction) -> None:
                tx.put(table, "n", (await tx.get(table, "n") or 0) + 1)

            acks = [(sub, step)]
            work = asyncio.create_task(client.transact(body, acks=acks))
            for _ in range(turns):
                await asyncio.sleep(0)
            work.cancel()
            await asyncio.wait([work])
            if work.cancelled():
                try:
                    await in_time(client.transact(body, acks=acks))
                except ap.InvalidUsage as error:
                    assert error.kind is ap.UsageKind.CONSUMED  # noqa: PT017
            assert await table.get("n") == turns + 1


async def test_bad_acks(place: Place) -> None:
    """Nothing runs."""
    client, other = await place.client(), await place.client()
    await write(client, ("a", 1))

    async def body(tx: ap.Transaction) -> None:
        pytest.fail("it ran")

    async with client.subscription("s", name="sub") as sub, other.subscription("s", name="its") as foreign:
        step, its = await in_time(anext(sub)), await in_time(anext(foreign))
        for wrong in ([sub], [(sub, "step")], [("sub", step)], [(sub, step, 1)]):
            with pytest.raises(TypeError):
                await client.transact(body, acks=wrong)  # type: ignore[arg-type]
        assert await refused(client.transact(body, acks=[(sub, its)])) is ap.UsageKind.INVALID_CURSOR
        assert await refused(client.transact(body, acks=[(foreign, its)])) is ap.UsageKind.INVALID_APPEND
    assert await refused(client.transact(body, acks=[(sub, step)])) is ap.UsageKind.CLOSED


@pytest.mark.several_shards
async def test_a_dropped_shard_and_an_expired_one(place: Place) -> None:
    """The error is that of the subscription, and the tables stay as they were."""
    client = await place.client()
    await write(client, ("a", 1))
    table = client.table("t", str, int)
    await table.put("a", 1)

    async def body(tx: ap.Transaction) -> None:
        tx.put(table, "b", 1)

    async with client.subscription("s", name="sub") as sub:
        step = await in_time(anext(sub))
        await (await place.client()).drop_subscription("s", "sub")
        with pytest.raises(ap.OpaqueMismatch):
            await in_time(client.transact(body, acks=[(sub, step)]))
    async with client.subscription("s", name="sub") as sub:
        step = await in_time(anext(sub))
        await (await place.client()).drop("s")
        with pytest.raises(ap.ShardFinalized):
            await in_time(client.transact(body, acks=[(sub, step)]))
    assert await table.get("b") is None
