"""Waking; see `test_listen.py`."""

import asyncio
import subprocess
import sys
import textwrap
import uuid
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.read.listen_kit import add, filled, until
from tests.support.internals import shard_of
from tests.support.schemas import SCHEMA

LONG_S = 15.0  # one hint may be lost; who only looks for itself takes longer than the test may


async def is_waiting(listen: ap.Listen) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await anext(listen)
    except TimeoutError:
        return True
    return False


WRITER = """
    import asyncio, sys
    import aiopersist as ap

    async def main(blob, consensus):
        async with ap.open(blob=blob, consensus=consensus) as client:
            writer = await client.writer("s", ap.Schema(key=str, val=int))
            for n in range(5):
                await asyncio.sleep(0.15)
                await writer.write([(str(n), 1)])

    asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_wakes_a_listen_without_polling(location: Any) -> None:
    """Long before `watch_timeout_s`, and between the writes nothing is asked of the store."""
    if location.consensus.startswith("mem"):
        pytest.skip("memory is of one process")
    options = ap.Settings(watch_timeout_s=LONG_S)
    async with ap.open(blob=location.blob, consensus=location.consensus, settings=options) as client:
        await filled(client, 1)
        listen = await (await client.reader("s", SCHEMA)).listen()
        program = [sys.executable, "-c", textwrap.dedent(WRITER), location.blob, location.consensus]
        seen = 0
        before = client.metrics["consensus.head"].count
        with subprocess.Popen(program) as process:
            async with asyncio.timeout(50):
                while seen < 5:
                    item = await anext(listen)
                    if isinstance(item, ap.Updates):
                        seen += len(item.rows())
            await asyncio.to_thread(process.wait, 20)
        assert client.metrics["consensus.head"].count - before < 30


async def test_another_client_wakes_a_listen(client: ap.Client, location: Any) -> None:
    """By a hint: who looked for itself, once in `watch_timeout_s`, would be too late."""
    options = ap.Settings(watch_timeout_s=LONG_S)
    async with ap.open(blob=location.blob, consensus=location.consensus, settings=options) as other:
        writer = await filled(client, 1)
        listen = await (await other.reader("s", SCHEMA)).listen()
        for t in range(1, 8):
            waiting = asyncio.ensure_future(until(listen, t + 1))
            await asyncio.sleep(0.02)
            await add(writer, t)
            await waiting


async def test_a_lost_hint_costs_latency_only() -> None:
    """No `watch` ever returns: a listen looks for itself after `watch_timeout_s`."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    faults.losing_hints = True
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    options = ap.Settings(watch_timeout_s=0.2)
    async with (
        ap.open(blob=ap.open_blob(url), consensus=consensus, settings=options) as client,
        ap.open(url) as other,
    ):
        writer = await filled(other, 1)
        listen = await (await client.reader("s", SCHEMA)).listen()
        for t in range(1, 4):
            waiting = asyncio.ensure_future(until(listen, t + 1))
            await asyncio.sleep(0.02)
            await add(writer, t)
            await waiting


async def test_own_commits_wake_without_a_request(mem: ap.Client) -> None:
    writer = await filled(mem, 1)
    listen = await (await mem.reader("s", SCHEMA)).listen()
    waiting = asyncio.ensure_future(until(listen, 2))
    await asyncio.sleep(0.05)
    await add(writer, 1)
    seen, _ = await waiting
    assert [u.time for u in seen] == [1]
    assert mem.metrics["consensus.scan"].count == 0
    assert mem.metrics["blob.get"].count <= 1  # the location's id


async def test_hundreds_of_listens_on_one_shard(mem: ap.Client) -> None:
    """Fast ones, slow ones and some that leave: each sees everything, by one reader's requests."""
    writer = await filled(mem, 1)
    reader = await mem.reader("s", SCHEMA)
    counts = []

    async def follow(number: int) -> None:
        async with reader.listen(as_of=0) as listen:
            seen = 0
            async for step in listen.steps():
                seen += len(step.updates)
                if number % 3 == 0:
                    await asyncio.sleep(0.01 * (number % 7))
                if number % 10 == 9 and seen > 3:
                    return
                if step.upper == ap.Antichain(11):
                    counts.append(seen)
                    return

    heads = mem.metrics["consensus.head"].count
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(follow(number))
        await asyncio.sleep(0.05)
        for t in range(1, 11):
            await add(writer, t)
            await asyncio.sleep(0.005)
    assert counts == [10] * 270
    assert mem.metrics["consensus.head"].count - heads < 100
    assert not shard_of(reader).register.pins
    assert not shard_of(reader).hold._pins


async def test_a_slow_consumer_gets_larger_steps(mem: ap.Client) -> None:
    """It is not told what it did not ask for: what piled up comes as one interval."""
    writer = await filled(mem, 1)
    listen = await (await mem.reader("s", SCHEMA)).listen()
    await add(writer, *range(1, 200))
    step = await anext(listen.steps())
    assert (len(step.updates), step.upper) == (199, ap.Antichain(200))


async def test_closing_ends_a_wait(mem: ap.Client) -> None:
    await filled(mem, 1)
    listen = await (await mem.reader("s", SCHEMA)).listen()
    waiting = asyncio.ensure_future(anext(listen))
    assert await is_waiting(await (await mem.reader("s", SCHEMA)).listen())
    await listen.aclose()
    with pytest.raises(ap.InvalidUsage, match="CLOSED"):
        await waiting
    for call in (lambda: anext(listen), lambda: anext(listen.steps())):
        with pytest.raises(ap.InvalidUsage, match="CLOSED"):
            await call()
    await listen.aclose()
