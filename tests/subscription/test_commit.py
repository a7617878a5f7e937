"""Position and output in one commit: exactly once, whatever answer is lost and whoever crashes."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.subscription.kit import in_time, rows, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused
from tests.table.kit import gated, versions


async def output(client: ap.Client, name: str = "out") -> list[Any]:
    async with client.reader(name, SCHEMA) as reader, reader.snapshot() as snapshot:
        return sorted(await snapshot.rows())


def doubled(step: Any, writer: Any) -> ap.Append:
    """The vals of a step, doubled, as an append at the writer's upper."""
    time = writer.upper.time
    updates = [(update.key, 2 * update.val, time, update.diff) for update in step.updates]
    return ap.Append(writer, updates, time, time + 1)


@pytest.mark.several_shards
async def test_into_another_shard(client: ap.Client) -> None:
    """One version of each; a repeat is told, and writes nothing."""
    await write(client, ("a", 1), ("b", 2))
    async with client.writer("out", SCHEMA) as out, client.subscription("s", SCHEMA, name="sub") as sub:
        step = await in_time(anext(sub))
        before = [await versions(client, name) for name in ("s", "out")]
        append = doubled(step, out)
        await sub.commit(step, [append])
        assert [await versions(client, name) for name in ("s", "out")] == [count + 1 for count in before]
        for again in (append, doubled(step, out)):
            assert await refused(sub.commit(step, [again])) is ap.UsageKind.CONSUMED
        assert (await client.admin.subscriptions("s"))["sub"].position == ap.Antichain(1)
        assert await output(client) == [("a", 2, 1), ("b", 4, 1)]
        await sub.ack(step, durable=True)
    async with client.subscription("s", SCHEMA, name="sub") as sub:
        await write(client, ("c", 3))
        assert await rows(sub, 1) == [("c", 3)]


@pytest.mark.several_shards
async def test_updates_are_taken_as_the_call_begins(client: ap.Client) -> None:
    """Goal: it waits for another acknowledgement; meanwhile their owner empties the list."""
    await write(client, ("a", 1))
    async with client.writer("out", SCHEMA) as out, client.subscription("s", SCHEMA, name="sub") as sub:
        step = await in_time(anext(sub))
        append = doubled(step, out)
        async with sub._consumer.turn:
            committing = asyncio.create_task(sub.commit(step, [append]))
            await asyncio.sleep(0)
            append.updates.clear()
        await committing
    assert await output(client) == [("a", 2, 1)]


@pytest.mark.several_shards
async def test_into_the_same_shard(client: ap.Client) -> None:
    """One version of it has both, and others take part as well."""
    await write(client, ("a", 1))
    async with (
        client.writer("s", SCHEMA) as same,
        client.writer("out", SCHEMA) as out,
        client.subscription("s", SCHEMA, name="sub") as sub,
    ):
        step = await in_time(anext(sub))
        before = await versions(client, "s")
        await sub.commit(step, [doubled(step, out), doubled(step, same)])
        assert await versions(client, "s") == before + 1
        assert await refused(sub.commit(step, [doubled(step, same)])) is ap.UsageKind.CONSUMED
        assert await output(client, "s") == [("a", 1, 1), ("a", 2, 1)]
        assert await output(client) == [("a", 2, 1)]
        step = await in_time(anext(sub))
        assert [update.val for update in step.updates] == [2]
        await sub.commit(step, [])
        assert (await client.admin.subscriptions("s"))["sub"].position == ap.Antichain(2)


@pytest.mark.several_shards
async def test_nothing_is_written_if_one_is_refused(place: Place) -> None:
    """A mismatch of an upper, a bad append, a take-over: neither position nor output moves."""
    client, other = await place.client(), await place.client()
    await write(client, ("a", 1))
    async with client.writer("out", SCHEMA) as out, client.subscription("s", SCHEMA, name="sub") as sub:
        step = await in_time(anext(sub))
        with pytest.raises(ap.UpperMismatch):
            await sub.commit(step, [ap.Append(out, [("x", 1, 5, 1)], 5, 6)])
        twice = [doubled(step, out), doubled(step, out)]
        assert await refused(sub.commit(step, twice)) is ap.UsageKind.INVALID_APPEND
        async with other.writer("out", SCHEMA) as foreign:
            assert await refused(sub.commit(step, [doubled(step, foreign)])) is ap.UsageKind.INVALID_APPEND
        with pytest.raises(ap.InvalidUpdate):
            await sub.commit(step, [ap.Append(out, [("x", "y", 0, 1)], 0, 1)])
        assert (await client.admin.subscriptions("s"))["sub"].position == ap.Antichain(0)
        async with other.subscription("s", SCHEMA, name="sub") as second:
            with pytest.raises(ap.OpaqueMismatch):
                await sub.commit(step, [doubled(step, out)])
            assert (await client.upper("out")).time == 0
            assert await rows(second, 1) == [("a", 1)]


@pytest.mark.several_shards
@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED])
async def test_lost_answers(place: Place, outcome: Outcome, same: bool) -> None:
    """The commit goes on until it is known; its output is there once."""
    async with gated(place.urls) as (client, gate):
        await write(client, ("a", 1))
        name = "s" if same else "out"
        async with client.writer(name, SCHEMA) as out, client.subscription("s", SCHEMA, name="sub") as sub:
            step = await in_time(anext(sub))
            for op in ("compare_and_set", "compare_and_set_many"):
                gate.fail_next(op, outcome)
            await in_time(sub.commit(step, [doubled(step, out)]))
            await gate.land()
            assert await refused(sub.commit(step, [doubled(step, out)])) is ap.UsageKind.CONSUMED
            rest = [("a", 1, 1)] if same else []
            assert await output(client, name) == [*rest, ("a", 2, 1)]


@pytest.mark.several_shards
@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
async def test_cancelled_at_every_await(place: Place, same: bool) -> None:
    """And repeated until it says that it happened: each output is there once."""
    async with gated(place.urls) as (client, _):
        name = "s" if same else "out"
        await write(client, ("a", 1))
        steps, kinds = 0, set()
        async with client.writer(name, SCHEMA) as out, client.subscription("s", SCHEMA, name="sub") as sub:
            for turns in range(70):
                if not same:
                    await write(client, ("a", turns))
                step = await in_time(anext(sub))
                steps += 1
                append = ap.Append(out, [("out", steps, out.upper.time, 1)], out.upper, out.upper.time + 1)
                work = asyncio.create_task(sub.commit(step, [append]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                work.cancel()
                await asyncio.wait([work])
                if not work.cancelled():
                    work.result()
                while True:
                    time = (await out.fetch_recent_upper()).time
                    append = ap.Append(out, [("out", steps, time, 1)], time, time + 1)
                    try:
                        await in_time(sub.commit(step, [append]))
                    except ap.InvalidUsage as error:
                        kinds.add(error.kind)
                        break
        assert kinds == {ap.UsageKind.CONSUMED}
        found = [row for row in await output(client, name) if row[0] == "out"]
        assert found == [("out", number, 1) for number in range(1, steps + 1)]


@pytest.mark.several_shards
async def test_a_consumer_and_its_writers_at_once(place: Place) -> None:
    """The output shard has other writers: a mismatch is tried again, and each input comes out once."""
    client, other = await place.client(), await place.client()
    async with other.writer("out", SCHEMA) as busy, client.writer("out", SCHEMA) as out:

        async def disturb() -> None:
            for number in range(40):
                await busy.write([("other", number)])
                await asyncio.sleep(0)

        async def feed() -> None:
            for number in range(40):
                await write(other, ("in", number))

        async def consume() -> None:
            seen = 0
            async with client.subscription("s", SCHEMA, name="sub") as sub:
                while seen < 40:
                    step = await in_time(anext(sub))
                    seen += len(step.updates)
                    while True:
                        try:
                            await sub.commit(step, [doubled(step, out)])
                            break
                        except ap.UpperMismatch:
                            await out.fetch_recent_upper()

        await write(other, ("in", -1))
        async with asyncio.TaskGroup() as tasks:
            for work in (disturb, feed, consume):
                tasks.create_task(work())
        found = [val for key, val, _ in await output(client) if key == "in"]
        assert sorted(found) == [-2, *range(0, 2 * len(found) - 2, 2)]
