"""Several steps of one subscription in flight: none is passed by the acknowledgement of a later one."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.subscription.kit import in_time, write
from tests.support.processes import Place
from tests.support.schemas import SCHEMA
from tests.support.shards import refused
from tests.table.kit import gated, versions

CONSUMED, SKIPPED, WOULD_SKIP = ap.UsageKind.CONSUMED, ap.UsageKind.SKIPPED, ap.UsageKind.WOULD_SKIP


@asynccontextmanager
async def two_steps(client: ap.Client, name: str = "s") -> AsyncIterator[tuple[Any, Any, Any]]:
    """A subscription, and two steps of it that are to be acknowledged."""
    async with client.writer(name, SCHEMA) as writer:
        await writer.write([("a", 1)])
        async with client.subscription(name, SCHEMA, name="sub") as sub:
            first = await in_time(anext(sub))
            await writer.write([("b", 2)])
            yield sub, first, await in_time(anext(sub))


async def position(client: ap.Client, shard: str = "s") -> Any:
    return (await client.admin.subscriptions(shard))["sub"].position.time


class Putting:
    """A body that puts a key, once it is let go."""

    def __init__(self, table: Any, key: str, error: Exception | None = None) -> None:
        self.table, self.key, self.error = table, key, error
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.runs = 0

    async def __call__(self, tx: ap.Transaction) -> None:
        self.runs += 1
        count = await tx.get(self.table, "count") or 0
        self.began.set()
        await self.go.wait()
        if self.error is not None:
            raise self.error
        tx.put(self.table, self.key, self.runs)
        tx.put(self.table, "count", count + 1)


async def turns(count: int = 50) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def kind_of(outcome: Any) -> Any:
    return getattr(outcome, "kind", outcome)


@pytest.mark.several_shards
async def test_the_first_meets_a_conflict(place: Place) -> None:
    """Goal: it runs again, and the second commits and moves the position past it meanwhile."""
    client, other = await place.client(), await place.apart()
    table = client.table("t", str, int)
    await table.put("count", 0)
    async with two_steps(client) as (sub, first, second):
        one, two = Putting(table, "one"), Putting(table, "two")
        two.go.set()
        calls = [
            asyncio.create_task(client.transact(body, acks=[(sub, step)]))
            for body, step in ((one, first), (two, second))
        ]
        await in_time(one.began.wait())
        await in_time(two.began.wait())
        await other.table("t", str, int).put("count", 10)
        await turns()
        one.go.set()
        await in_time(asyncio.gather(*calls))
        assert one.runs > 1
        assert (await table.get("one"), await table.get("count")) == (one.runs, 12)
        assert await table.get("two") is not None
        assert await position(client) == 2


@pytest.mark.several_shards
async def test_steps_in_flight_share_commits(place: Place) -> None:
    """They wait for each other, but not for each other's commit."""
    client = await place.client()
    table = client.table("t", str, int)
    await table.put("count", 0)
    async with client.writer("s", SCHEMA) as writer, client.subscription("s", SCHEMA, name="sub") as sub:
        steps = []
        for number in range(20):
            await writer.write([("a", number)])
            steps.append(await in_time(anext(sub)))

        def counting(number: int) -> Any:
            async def body(tx: ap.Transaction) -> None:
                tx.put(table, f"k{number}", number)

            return client.transact(body, acks=[(sub, steps[number])])

        before = await versions(client, "t")
        await in_time(asyncio.gather(*map(counting, range(20))))
        assert await versions(client, "t") <= before + 5
        assert await table.count() == 21
        assert await position(client) == 20


@pytest.mark.several_shards
@pytest.mark.parametrize("how", ["transact", "nothing", "commit", "ack", "durable"])
async def test_the_first_fails(place: Place, how: str) -> None:
    """What was called meanwhile for a later step is refused, and nothing of it is written. A call that comes
    afterwards says that the first is done with."""
    client = await place.client()
    table = client.table("t", str, int)
    await table.put("count", 0)
    async with client.writer("out", SCHEMA) as out, two_steps(client) as (sub, first, second):
        one, two = Putting(table, "one", ZeroDivisionError()), Putting(table, "two")
        two.go.set()

        async def nothing(tx: ap.Transaction) -> None:
            pass

        def later() -> Any:
            return {
                "transact": lambda: client.transact(two, acks=[(sub, second)]),
                "nothing": lambda: client.transact(nothing, acks=[(sub, second)]),
                "commit": lambda: sub.commit(second, [ap.Append(out, [("x", 1, 0, 1)], 0, 1)]),
                "ack": lambda: sub.ack(second),
                "durable": lambda: sub.ack(second, durable=True),
            }[how]()

        failing = asyncio.create_task(client.transact(one, acks=[(sub, first)]))
        await in_time(one.began.wait())
        waiting = asyncio.create_task(later())
        await turns()
        assert not waiting.done()
        one.go.set()
        outcomes = await in_time(asyncio.gather(failing, waiting, return_exceptions=True))
        assert isinstance(outcomes[0], ZeroDivisionError)
        assert kind_of(outcomes[1]) is WOULD_SKIP
        assert (await table.get("two"), await out.fetch_recent_upper()) == (None, ap.Antichain(0))
        await in_time(later())
        if how != "ack":
            assert await position(client) == 2
        assert await refused(client.transact(two, acks=[(sub, first)])) is SKIPPED
        assert await refused(sub.commit(first, [])) is SKIPPED
    assert await position(client) == 2


@pytest.mark.several_shards
@pytest.mark.parametrize("sent", [False, True], ids=["running", "sent"])
async def test_the_first_is_cancelled(place: Place, sent: bool) -> None:
    """Whether it is running, or its commit is on the way: the second is refused, and a repeat of the first is
    told what happened."""
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        await table.put("count", 0)
        async with two_steps(client) as (sub, first, second):
            one, two = Putting(table, "one"), Putting(table, "two")
            two.go.set()
            cancelled = asyncio.create_task(client.transact(one, acks=[(sub, first)]))
            await in_time(one.began.wait())
            if sent:
                gate.hold("compare_and_set_many", late=True)
                one.go.set()
                await in_time(gate.held.wait())
            waiting = asyncio.create_task(client.transact(two, acks=[(sub, second)]))
            await turns()
            cancelled.cancel()
            await turns()
            gate.open()
            assert kind_of((await in_time(asyncio.gather(waiting, return_exceptions=True)))[0]) is WOULD_SKIP
            one.go.set()
            if sent:
                assert await refused(client.transact(one, acks=[(sub, first)])) is CONSUMED
            else:
                await in_time(client.transact(one, acks=[(sub, first)]))
            await in_time(client.transact(two, acks=[(sub, second)]))
            assert await table.get("count") == 2
            assert await position(client) == 2


@pytest.mark.several_shards
async def test_commits_in_flight(place: Place) -> None:
    """`sub.commit` of two steps: the first finds another upper, so the second is refused, and both are
    repeated in order."""
    client, other = await place.client(), await place.client()
    async with (
        client.writer("one", SCHEMA) as one,
        client.writer("two", SCHEMA) as two,
        two_steps(client) as (sub, first, second),
    ):
        await write(other, ("foreign", 0), name="one")
        calls = [
            sub.commit(first, [ap.Append(one, [("x", 1, 0, 1)], 0, 1)]),
            sub.commit(second, [ap.Append(two, [("y", 1, 0, 1)], 0, 1)]),
        ]
        done = await in_time(asyncio.gather(*calls, return_exceptions=True))
        assert isinstance(done[0], ap.UpperMismatch)
        assert kind_of(done[1]) is WOULD_SKIP
        assert (await position(client), await two.fetch_recent_upper()) == (0, ap.Antichain(0))
        calls = [
            sub.commit(first, [ap.Append(one, [("x", 1, 1, 1)], 1, 2)]),
            sub.commit(second, [ap.Append(two, [("y", 1, 0, 1)], 0, 1)]),
        ]
        await in_time(asyncio.gather(*calls))
        assert await position(client) == 2
        assert await refused(sub.commit(first, [])) is CONSUMED


@pytest.mark.several_shards
async def test_calls_that_would_wait_for_each_other(place: Place) -> None:
    """Two subscriptions, each with the steps of two calls in the other order: the call that comes second is
    refused at once, and can be made anew."""
    client = await place.client()
    table = client.table("t", str, int)
    await table.put("count", 0)
    async with two_steps(client) as (sub, a1, a2), two_steps(client, "other") as (other, b1, b2):
        one, two, between = (Putting(table, key) for key in ("one", "two", "between"))
        first = asyncio.create_task(client.transact(one, acks=[(sub, a1), (other, b2)]))
        await in_time(one.began.wait())
        assert await refused(client.transact(two, acks=[(sub, a2), (other, b1)])) is WOULD_SKIP
        alone = asyncio.create_task(client.transact(between, acks=[(other, b1)]))
        await in_time(between.began.wait())
        one.go.set()
        await turns()
        assert not first.done()  # it would skip b1
        between.go.set()
        await in_time(asyncio.gather(first, alone))
        two.go.set()
        assert await refused(client.transact(two, acks=[(sub, a2), (other, b1)])) is CONSUMED
        await in_time(client.transact(two, acks=[(sub, a2)]))
        assert (await table.get("count"), await position(client), await position(client, "other")) == (
            3,
            2,
            2,
        )


@pytest.mark.several_shards
@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED], ids=["happened", "lost"])
@pytest.mark.parametrize("again", [(0, 1), (1, 0)], ids=["in order", "the second first"])
async def test_an_unknown_outcome_of_both(place: Place, outcome: Outcome, again: tuple[int, int]) -> None:
    """Two steps share a commit whose answer is lost, and the store does not answer until they are given up:
    `CONSUMED` only of a step whose commit happened, and each is written once."""
    async with gated(place.urls, retry_timeout_s=0.05) as (client, gate):
        table = client.table("t", int, int)
        await table.put(-1, 0)
        async with two_steps(client) as (sub, *steps):
            runs = [0, 0]

            def putting(number: int) -> Any:
                async def body(tx: ap.Transaction) -> None:
                    runs[number] += 1
                    tx.put(table, number, runs[number])

                return asyncio.create_task(client.transact(body, acks=[(sub, steps[number])]))

            gate.hold("compare_and_set", late=True)
            before = asyncio.create_task(table.put(-1, 1))
            await in_time(gate.held.wait())
            both = [putting(0), putting(1)]
            await turns()
            gate.fail_next("compare_and_set_many", outcome)
            for op in ("head", "scan", "compare_and_set_many"):
                gate.fail_next(op, Outcome.DROPPED, times=100)
            gate.open()
            await in_time(before)
            done = await in_time(asyncio.gather(*both, return_exceptions=True))
            assert [type(error) for error in done] == [ap.Indeterminate] * 2
            gate.heal()
            kinds = {}
            for number in again:
                (kinds[number],) = map(kind_of, await asyncio.gather(putting(number), return_exceptions=True))
            if outcome is Outcome.LOST:
                assert kinds == {0: CONSUMED, 1: CONSUMED}
            else:
                assert kinds == {0: None if again == (0, 1) else SKIPPED, 1: None}
            for number, kind in kinds.items():
                expected = {CONSUMED: 1, None: 2, SKIPPED: None}[kind]
                assert await table.get(number) == expected
            assert await position(client) == 2


@pytest.mark.several_shards
@pytest.mark.parametrize("call", ["ack", "commit", "transact", "gather", "group"])
async def test_a_body_acknowledges_no_later_step(call: str, place: Place) -> None:
    """Goal: it would wait for itself for ever, or for its tasks, which would wait for it."""
    client = await place.client()
    table = client.table("t", str, int)
    async with two_steps(client) as (sub, first, second):

        async def nothing(tx: ap.Transaction) -> None:
            pass

        async def body(tx: ap.Transaction) -> None:
            tx.put(table, "k", 1)
            if call == "ack":
                await sub.ack(second)
            elif call == "commit":
                await sub.commit(second, [])
            elif call == "transact":
                await client.transact(nothing, acks=[(sub, second)])
            elif call == "gather":
                await asyncio.gather(sub.ack(second), asyncio.sleep(0))
            else:
                async with asyncio.TaskGroup() as group:
                    group.create_task(sub.commit(second, []))

        with pytest.raises((ap.InvalidUsage, ExceptionGroup)) as refused:
            await in_time(client.transact(body, acks=[(sub, first)]))
        (error,) = getattr(refused.value, "exceptions", [refused.value])
        assert kind_of(error) is WOULD_SKIP and "later step" in str(error)
        assert await table.get("k") is None and await position(client) < 2
        await in_time(sub.ack(second, durable=True))


@pytest.mark.several_shards
async def test_a_step_behind_one_that_happened_meets_no_conflict(quiet_mem: ap.Client) -> None:
    """Goal: whenever the second call comes while the first is committed, its only attempt is enough."""
    table = quiet_mem.table("t", str, int)
    await table.put("one", 0)

    async def put(key: str, val: int) -> Any:
        async def body(tx: ap.Transaction) -> None:
            tx.put(table, key, val)

        return body

    async with (
        quiet_mem.writer("s", SCHEMA) as writer,
        quiet_mem.subscription("s", SCHEMA, name="sub") as sub,
    ):
        for pause in range(60):
            steps = []
            for key in ("a", "b"):
                await writer.write([(key, pause)])
                steps.append(await in_time(anext(sub)))
            calls = []
            for key, step in zip(("one", "two"), steps, strict=True):
                body = await put(key, pause)
                call = quiet_mem.transact(body, acks=[(sub, step)], max_attempts=1)
                calls.append(asyncio.create_task(call))
                await turns(pause)
            await in_time(asyncio.gather(*calls))


FIRST_CALL = """
import asyncio
import aiopersist as ap

async def main():
    schema = ap.Schema(key=str, val=int)
    async with ap.open("mem://", maintenance=False) as client, client.writer("s", schema) as writer:
        await writer.write([("a", 1)])
        async with client.subscription("s", schema, name="sub") as sub:
            first = await anext(sub)
            await writer.write([("b", 2)])
            second = await anext(sub)

            async def body(tx):
                tx.put(client.table("t", str, int), "k", 1)

            one = asyncio.create_task(client.transact(body, acks=[(sub, first)]))
            two = asyncio.create_task(sub.commit(second, []))
            await asyncio.gather(one, two)
            print(await client.table("t", str, int).get("k"))

asyncio.run(main())
"""


def test_the_first_transaction_of_a_process_keeps_its_place() -> None:
    """Goal: its imports are waited for, and a later step begins meanwhile."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
