"""Readonly, fencing; see `test_indexed_calls.py`."""

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Fenced, Indexed, UnknownStream
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.indexed.indexed_calls_kit import READONLY, at, read, two
from tests.support.schemas import INT_MAX

FIRST: dict[str, Callable[[Indexed, Any], Awaitable[Any]]] = {
    "register": lambda ix, a: ix.register("new", str, int),
    "destroy": lambda ix, a: ix.destroy("a"),
    "write": lambda ix, a: ix.write([(a, at(9))]),
    "refused write": lambda ix, a: ix.write([(a, at(0))]),
    "empty write": lambda ix, a: ix.write([]),
    "seal": lambda ix, a: ix.seal([a], 9),
    "allow_compaction": lambda ix, a: ix.allow_compaction([(a, 9)]),
    "step": lambda ix, a: ix.step(),
}


# --- readonly -----------------------------------------------------------------------------------------


async def test_an_unknown_name_cannot_be_opened_readonly(client: ap.Client) -> None:
    with pytest.raises(UnknownStream, match="'never'"):
        await client.indexed("never", readonly=True)
    await client.writer("shard", ap.Schema(str, int))
    with pytest.raises(UnknownStream):
        await client.indexed("shard", readonly=True)


@pytest.mark.parametrize("call", READONLY)
async def test_readers_cannot_change_anything(mem: ap.Client, ix: Indexed, call: str) -> None:
    a, _ = await two(ix)
    await ix.write([(a, at(1))])
    async with mem.indexed("ix", readonly=True) as reader:
        with pytest.raises(ap.InvalidUsage):
            await READONLY[call](reader, a)
        assert await read(reader, a) == at(1)
    assert await ix.write([(a, at(2))]) == 2


async def test_readers_see_at_once_what_any_writer_has_made_durable(client: ap.Client, location: Any) -> None:
    """Goal: load, description and snapshot of a reader are linearizable, streams that are new included."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        assert await reader.load("a", str, int) is None
        a, b = await two(ix)
        assert (await reader.load("a", str, int)) is not None
        for t in range(5):
            await ix.write([(a, at(t)), (b, at(t))])
            assert await read(reader, a) == at(*range(t + 1))
            await ix.seal([b], t)
            assert (await reader.description("b")).upper == ap.Antichain(t)
        with pytest.raises(ap.CodecMismatch):
            await reader.load("a", str, float)
        await ix.destroy("b")
        for call in (reader.description("b"), reader.load("b", str, int), reader.snapshot(b)):
            with pytest.raises(UnknownStream):
                await call


async def test_a_reader_does_not_join_a_look_that_began_before_its_call() -> None:
    """Goal: updates that were durable before a call are in its answer, also while an older look at the head
    is slow."""
    url = f"mem://{uuid.uuid4().hex}"

    class SlowAnswers(FaultyConsensus):
        delay_s = 0.0

        async def head(self, key: str) -> Any:
            found = await super().head(key)
            await asyncio.sleep(self.delay_s)
            return found

    consensus = SlowAnswers(ap.open_consensus(url), Faults())
    async with ap.open(url) as client, ap.open(blob=ap.open_blob(url), consensus=consensus) as slow:
        async with (
            client.indexed("ix", background=False) as ix,
        ):
            a, _ = await two(ix)
            reader = await slow.indexed("ix", readonly=True)
            for t in range(4):
                consensus.delay_s = 0.05
                early = asyncio.ensure_future(read(reader, a))
                await asyncio.sleep(0.02)
                await ix.write([(a, at(t))])
                assert await read(reader, a) == at(*range(t + 1))
                assert await early in (at(*range(t)), at(*range(t + 1)))
            consensus.delay_s = 0.0
            await reader.aclose()


async def test_many_readers_beside_the_writer_are_no_fencing(client: ap.Client, location: Any) -> None:
    """They register in the very state that the writer changes: it tries again."""
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as other,
        client.indexed("ix", background=False) as ix,
    ):
        a, _ = await two(ix)

        async def come_and_go() -> int:
            async with other.indexed("ix", readonly=True) as reader:
                return len(await read(reader, a))

        async def write() -> None:
            for t in range(12):
                await ix.write([(a, at(t))])

        found, _ = await asyncio.gather(asyncio.gather(*[come_and_go() for _ in range(8)]), write())
        assert all(0 <= n <= 12 for n in found)
        assert await read(ix, a) == at(*range(12))


# --- fencing ------------------------------------------------------------------------------------------


async def test_an_earlier_instance_is_fenced_by_its_first_commit(client: ap.Client, location: Any) -> None:
    async with ap.open(blob=location.blob, consensus=location.consensus) as other:
        early = await client.indexed("ix", background=False)
        a, b = await two(early)
        await early.write([(a, at(1))])
        _, events = await early.listen(a)
        late = await other.indexed("ix", background=False)
        await late.write([(a, at(2))])
        assert await read(early, a) == at(1)  # a consistent past state
        assert await early.load("b", str, int) is not None
        found = await asyncio.gather(
            early.write([(a, at(3))]), early.seal([b], 5), early.write([(a, at(1))]), return_exceptions=True
        )
        assert [type(f) for f in found] == [Fenced] * 3
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: early.register("a", str, int),
            lambda: early.load("a", str, int),
            lambda: early.destroy("a"),
            lambda: early.write([]),
            lambda: early.seal([a], 9),
            lambda: early.allow_compaction([(a, 9)]),
            lambda: early.description("a"),
            lambda: early.snapshot(a),
            lambda: early.listen(a),
            lambda: early.step(),
            lambda: early.apply("a", RuntimeError()),
            lambda: early.inspect(a),
            lambda: anext(events),
        ]
        for call in calls:
            with pytest.raises(Fenced):
                await call()
        assert await late.write([(a, at(3))]) == 3
        await early.stop()
        assert await read(late, a) == at(1, 2, 3)
        assert await late.seal([a], 1) == 4
        await late.stop()


@pytest.mark.parametrize("call", FIRST)
async def test_whatever_would_change_something_first_is_fenced(mem: ap.Client, call: str) -> None:
    early = await mem.indexed("ix", background=False)
    a, _ = await two(early)
    await early.write([(a, at(1, 4))])
    await early.seal([a], 3)  # there is something to drain
    late = await mem.indexed("ix", background=False)
    with pytest.raises(Fenced):
        await FIRST[call](early, a)
    with pytest.raises(Fenced):
        await early.description("a")
    assert await late.description("a") == ap.Description(0, 3, 0)
    assert await late.write([(a, at(3))]) == 3
    assert await late.load("new", str, int) is None
    await early.stop()
    await late.stop()


async def test_of_many_that_open_at_once_exactly_the_last_one_can_change_anything(mem: ap.Client) -> None:
    opened = await asyncio.gather(*[mem.indexed("ix", background=False) for _ in range(6)])
    found = await asyncio.gather(*[ix.register("a", str, int) for ix in opened], return_exceptions=True)
    assert sorted(type(f).__name__ for f in found) == ["Fenced"] * 5 + ["Stream"]
    await asyncio.gather(*[ix.stop() for ix in opened])


async def test_taking_over_during_writes_loses_none_that_returned(mem: ap.Client) -> None:
    """Goal: across take-overs each write that returned is there once, each that was fenced not at all."""
    ix = await mem.indexed("ix", background=False)
    a, _ = await two(ix)
    done: list[int] = []
    fenced: list[int] = []
    numbers = itertools.count()

    async def write_until_fenced(ix: Indexed) -> None:
        while True:
            number = next(numbers)
            try:
                await ix.write([(a, at(number))])
            except Fenced:
                fenced.append(number)
                return
            done.append(number)

    writing = [asyncio.ensure_future(write_until_fenced(ix)) for _ in range(4)]
    instances = [ix]
    for _ in range(4):
        await asyncio.sleep(0.02)
        instances.append(await mem.indexed("ix", background=False))
        await asyncio.gather(*writing)
        writing = [asyncio.ensure_future(write_until_fenced(instances[-1])) for _ in range(4)]
    async with mem.indexed("ix", background=False) as last:
        await asyncio.gather(*writing)
        assert [row[2] for row in await read(last, a)] == sorted(done)
        assert await last.write([(a, at(INT_MAX))]) == len(done) + 1
    assert len(fenced) == 20
    for instance in instances:
        await instance.stop()
