"""Goal: listeners end when they should, and hear other processes."""

import asyncio
import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, UnknownStream
from tests.indexed.indexed_reading_kit import (
    at,
    lost_lease,
    plain,
    settle_down,
    stream_of,
    take,
    take_all,
    told,
)
from tests.support.internals import shard_of
from tests.support.virtual import in_virtual_time

WRITER = """
    import asyncio, sys
    import aiopersist as ap

    async def main(blob, consensus):
        async with ap.open(blob=blob, consensus=consensus) as client:
            async with client.indexed("ix") as ix:
                a = await ix.register("a", str, int)
                sys.stdin.readline()
                for t in range(1, 13):
                    await asyncio.gather(*[ix.write([(a, [(str(n), t, t, 1)])]) for n in range(3)])
                    await ix.seal([a], t)
                    if t % 4 == 0:
                        await ix.allow_compaction([(a, t)])
                        await ix.step()
                await ix.destroy("a")

    asyncio.run(main(*sys.argv[1:]))
"""


READER = """
    import asyncio, json, sys
    import aiopersist as ap
    from aiopersist.indexed import Records

    async def main(blob, consensus):
        async with ap.open(blob=blob, consensus=consensus) as client:
            async with client.indexed("ix", readonly=True) as ix:
                a = await ix.load("a", str, int)
                snapshot, events = await ix.listen(a)
                print(json.dumps([list(row) for row in await snapshot.rows()]), flush=True)
                await snapshot.aclose()
                async for item in events:
                    found = item.updates.rows() if isinstance(item, Records) else item.time
                    print(json.dumps(found), flush=True)

    asyncio.run(main(*sys.argv[1:]))
"""


def skip_but_for_sqlite_and_s3(location: Any) -> None:
    if location.consensus.startswith("mem"):
        pytest.skip("memory is of one process")
    if location.consensus.startswith("postgres") and location.blob.startswith("file"):
        pytest.skip("Postgres is seen beside S3")


def program(text: str, location: Any) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text), location.blob, location.consensus]


# --- listen -------------------------------------------------------------------------------------------


async def test_a_destroyed_stream_ends_its_listeners_after_all_that_was_written(either: Indexed) -> None:
    ix = either
    a, b = await stream_of(ix), await stream_of(ix, "b")
    _, slow = await ix.listen(a)
    _, waiting = await ix.listen(a)
    _, other = await ix.listen(b)
    await ix.write([(a, at(*range(9))), (b, at(1))])
    await ix.seal([a], 4)
    assert await take(waiting, 2) == [at(*range(9)), 4]
    wait = asyncio.ensure_future(anext(waiting, "the end"))
    await asyncio.sleep(0)
    await ix.destroy("a")
    async with asyncio.timeout(50):
        assert await wait == "the end"
        assert [told(item) async for item in slow] == [at(*range(9)), 4]
    assert await anext(slow, None) is None
    await ix.write([(b, at(2))])
    assert await take_all(other, 2) == [at(1), at(2)]


@pytest.mark.parametrize("readonly", [False, True], ids=["owner", "reader"])
async def test_a_listen_that_does_not_succeed_registers_nothing(mem: ap.Client, readonly: bool) -> None:
    """Goal: unknown, of other codecs, or cancelled at any moment: no listener and no pin is left behind."""
    async with mem.indexed("ix", background=False) as owner:
        a, gone = await stream_of(owner), await stream_of(owner, "gone")
        await owner.destroy("gone")
        async with mem.indexed("ix", readonly=True) as reader, mem.indexed("other") as another:
            source = reader if readonly else owner
            wrong = await another.register("a", str, float)
            with pytest.raises(UnknownStream):
                await source.listen(gone)
            for call in (source.listen, source.snapshot):
                with pytest.raises(ap.CodecMismatch):
                    await call(wrong)
            for turns in range(12):
                task = asyncio.ensure_future(source.listen(a))
                for _ in range(turns):
                    await asyncio.sleep(0)
                if task.cancel():
                    await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled():
                    snapshot, events = await task
                    await snapshot.aclose()
                    await events.aclose()
            assert not shard_of(source).register.pins
            assert not source._core.feed._listeners


async def test_closing_a_listener_ends_its_wait_and_lets_go(ix: Indexed) -> None:
    a = await stream_of(ix)
    snapshot, events = await ix.listen(a)
    wait = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.01)
    await events.aclose()
    await events.aclose()
    await snapshot.aclose()
    with pytest.raises((ap.InvalidUsage, StopAsyncIteration)):
        await wait
    with pytest.raises((ap.InvalidUsage, StopAsyncIteration)):
        await anext(events)
    assert not shard_of(ix).register.pins
    await ix.write([(a, at(1))])


async def test_a_listener_tells_what_stopping_has_committed(mem: ap.Client) -> None:
    """Goal: durable events are told before the end: an iteration that ends without an error has heard all of
    them."""
    ix = await mem.indexed("ix", background=False)
    a = await stream_of(ix)
    _, events = await ix.listen(a)
    heard: list[Any] = []

    async def follow() -> None:
        async for item in events:
            heard.append(told(item))  # noqa: PERF401  # what was heard so far counts

    following = asyncio.ensure_future(follow())
    await ix.write([(a, at(1))])
    write = asyncio.ensure_future(ix.write([(a, at(2))]))
    await asyncio.sleep(0)
    await ix.stop()
    assert await write == 2
    async with asyncio.timeout(50):
        await following
    assert heard == [at(1), at(2)]


async def test_hundreds_of_listeners_on_one_stream(mem: ap.Client) -> None:
    """They cost no requests of their own: each hears everything, fast or slow."""
    async with mem.indexed("ix", background=False) as ix, mem.indexed("ix", readonly=True) as reader:
        a = await stream_of(ix)
        listeners = [(await (reader if n % 2 else ix).listen(a))[1] for n in range(200)]
        before = mem.metrics["consensus.scan"].count + mem.metrics["consensus.head"].count
        for t in range(10):
            await ix.write([(a, at(t))])
        heard = await asyncio.gather(*[take(listener, 10) for listener in listeners])
        assert all(items == [at(t) for t in range(10)] for items in heard)
        assert mem.metrics["consensus.scan"].count + mem.metrics["consensus.head"].count - before < 60


async def test_an_iteration_that_ends_in_peace_has_heard_all_that_was_durable() -> None:
    """Goal: a follower that is a little slower than the store hears what was committed before the stop."""
    async with ap.open("mem://") as client:
        ix = await client.indexed("ix", background=False)
        a = await stream_of(ix)
        _, events = await ix.listen(a)
        for t in range(3):
            await ix.write([(a, at(t))])
        await ix.stop()
        async with asyncio.timeout(50):
            assert [told(item) async for item in events] == [at(t) for t in range(3)]


@in_virtual_time
async def test_a_listener_opened_after_the_lease_was_lost_is_not_ended_by_the_loss() -> None:
    """Goal: what an older listener has missed is no concern of one that began after it."""
    async with lost_lease() as (ix, a, reader, early):
        snapshot, late = await reader.listen(a)
        assert len(await snapshot.rows()) == 12
        await ix.write([(a, at(50))])
        assert await take(late, 1) == [at(50)]
        with pytest.raises(ap.LeaseExpired):
            await take(early, 13)


# --- other processes ----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_another_process_writes_and_a_listener_here_hears_all(location: Any) -> None:
    skip_but_for_sqlite_and_s3(location)
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        with subprocess.Popen(program(WRITER, location), stdin=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            async with asyncio.timeout(150):
                while True:
                    try:
                        reader = await client.indexed("ix", readonly=True)
                        break
                    except UnknownStream:
                        await asyncio.sleep(0.05)
                while (a := await reader.load("a", str, int)) is None:
                    await asyncio.sleep(0.02)
                snapshot, events = await reader.listen(a)
                assert await snapshot.rows() == []
                await snapshot.aclose()
                process.stdin.write("go\n")
                process.stdin.flush()
                heard = [told(item) async for item in events]
                assert await asyncio.to_thread(process.wait, 50) == 0
        rows = [row for item in heard if isinstance(item, list) for row in item]
        assert rows == [(str(n), t, t, 1) for t in range(1, 13) for n in range(3)]
        assert [item for item in heard if isinstance(item, int)] == list(range(1, 13))
        await reader.stop()


@pytest.mark.slow
async def test_a_listener_in_another_process_hears_what_is_written_here(location: Any) -> None:
    skip_but_for_sqlite_and_s3(location)
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        async with client.indexed("ix", background=False) as ix:
            a = await stream_of(ix)
            await ix.write([(a, at(0))])
            with subprocess.Popen(program(READER, location), stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                async with asyncio.timeout(150):
                    first = json.loads(await asyncio.to_thread(process.stdout.readline))
                    wanted: list[Any] = []
                    for t in range(1, 9):
                        await ix.write([(a, at(t + 2, t))])
                        await ix.seal([a], t)
                        await settle_down(ix)
                        wanted += [at(t + 2, t), t]
                    await ix.destroy("a")
                    text = await asyncio.to_thread(process.stdout.read)
                    assert await asyncio.to_thread(process.wait, 50) == 0
    assert plain(first) == at(0)
    lines = [json.loads(line) for line in text.splitlines()]
    assert [plain(item) if isinstance(item, list) else item for item in lines] == wanted
