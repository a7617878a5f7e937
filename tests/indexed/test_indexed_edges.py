"""Goal: cases that are easily forgotten: rare calls, the end of work that has begun, work that is not
done."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Fenced, Indexed, Refused, Stream
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.internals import shard_of

IN_BLOBS: dict[str, Any] = {"inline_writes_single_max_bytes": 0, "blob_cache_bytes": 0}


class Recording(FaultyConsensus):
    """Remembers what was to be written."""

    def __init__(self, inner: MemoryConsensus, faults: Faults) -> None:
        super().__init__(inner, faults)
        self.sent: list[tuple[int | None, bytes]] = []

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        if key.startswith("indexed/"):
            self.sent.append((expected, data))
        return await super().compare_and_set(key, expected, data)


class Place:
    """One location, on which several clients may be opened, each with failures of its own."""

    def __init__(self) -> None:
        self.blob, self.consensus = MemoryBlob(""), MemoryConsensus("")
        self.sent: list[tuple[int | None, bytes]] = []

    @asynccontextmanager
    async def client(self, faults: Faults | None = None, **settings: Any) -> AsyncIterator[ap.Client]:
        recording = Recording(self.consensus, faults or Faults())
        self.sent = recording.sent
        async with ap.open(
            blob=FaultyBlob(self.blob, faults or Faults()),
            consensus=recording,
            settings=ap.Settings(**settings),
            maintenance=False,
        ) as client:
            yield client

    async def keys(self) -> set[str]:
        return {key async for key, _ in self.blob.list("i")}


async def pair(ix: Indexed) -> Stream[str, int]:
    """A stream with two batches in its trace that may be one."""
    stream = await ix.register("s", str, int)
    for time in range(2):
        await ix.write([(stream, [("a", time, time, 1), ("b", time, time, 1)])])
        await ix.seal([stream], time + 1)
        await ix.step()
    await ix.allow_compaction([(stream, 2)])
    return stream


async def until(ready: Any) -> None:
    async with asyncio.timeout(50):
        while not await ready():
            await asyncio.sleep(0.01)


async def test_compact_is_a_call_like_others() -> None:
    """Goal: refused to readers, and after a take-over, as `counters` is."""
    async with ap.open("mem://") as client, client.indexed("x", background=False) as ix:
        await pair(ix)
        (request,) = await ix.step()
        async with client.indexed("x", readonly=True) as reader:
            with pytest.raises(ap.InvalidUsage):
                await reader.compact(request)
            assert reader.counters()["streams"] == 1
        async with client.indexed("x", background=False):
            with pytest.raises(Fenced):
                await ix.seal([], 1)
            with pytest.raises(Fenced):
                await ix.compact(request)
            with pytest.raises(Fenced):
                ix.counters()


async def test_instances_hold_what_they_may_read_by_leases_until_they_stop() -> None:
    place = Place()
    async with place.client() as client:
        ix = await client.indexed("x", background=False)
        reader = await client.indexed("x", readonly=True)
        await ix.register("s", str, int)
        state = await shard_of(ix).register.refresh()
        assert state is not None
        assert {r.seqno_hold <= state.seqno for r in state.readers.values()} == {True}
        assert len(state.readers) == 2
        await reader.stop()
        await asyncio.gather(ix.stop(), ix.stop(), ix.stop())
        async with client.indexed("x", readonly=True) as last:
            state = last._core.state
            assert len(state.readers) == 1
            assert state.streams is not None
            assert (state.streams.owner, dict(state.writers)) == ("", {})


async def test_a_stop_whose_last_commit_fails_lets_go_all_the_same() -> None:
    place, faults = Place(), Faults()
    async with place.client(faults, retry_timeout_s=0.0) as client, place.client() as other:
        ix = await client.indexed("x", background=False)
        stream = await ix.register("s", str, int)
        faults.fail_next("compare_and_set", Outcome.REFUSED)
        write = asyncio.create_task(ix.write([(stream, [("a", 1, 0, 1)])]))
        await asyncio.sleep(0)
        await ix.stop()
        with pytest.raises(ap.StorageUnavailable):
            await write
        async with other.indexed("x", readonly=True) as reader:
            assert reader._core.streams.owner == ""
            assert len(reader._core.state.readers) == 1


async def test_a_step_collects_when_it_is_due_and_not_before() -> None:
    async with (
        ap.open("mem://", settings=ap.Settings(rollup_every=30), maintenance=False) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await ix.register("s", str, int)
        rollups = lambda: client.metrics["blob.set"].count  # noqa: E731  # nothing else is a blob here
        for time in range(20):
            await ix.write([(stream, [("a", 1, time, 1)])])
            await ix.step()
        assert rollups() == 0
        for time in range(20, 40):
            await ix.write([(stream, [("a", 1, time, 1)])])
            await ix.step()
        assert rollups() == 1
        assert client.metrics["consensus.truncate"].count == 0  # its own reader had not let go of it yet
        for time in range(40, 75):
            await ix.write([(stream, [("a", 1, time, 1)])])
            await ix.step()
        assert rollups() == 2
        assert client.metrics["consensus.truncate"].count == 1
        requests = sum(op.count for op in client.metrics.values())
        await ix.step()
        assert sum(op.count for op in client.metrics.values()) == requests


@pytest.mark.parametrize("background", [False, True])
async def test_steps_are_done_in_the_background_unless_by_hand(background: bool) -> None:
    settings = ap.Settings(indexed_step_s=0.01)
    async with (
        ap.open("mem://", settings=settings) as client,
        client.indexed("x", background=background) as ix,
    ):
        stream = await ix.register("s", str, int)
        await ix.write([(stream, [("a", 1, 0, 1)])])
        await ix.seal([stream], 1)

        async def drained() -> bool:
            return (await ix.inspect(stream)).trace_upper == 1

        if background:
            await until(drained)
        else:
            await asyncio.sleep(0.15)
            assert not await drained()


async def test_the_background_asks_again_for_a_compaction_that_failed() -> None:
    """Goal: also where nothing is written any more."""
    place, faults = Place(), Faults()
    async with place.client(faults, retry_timeout_s=0.0, indexed_step_s=0.01, **IN_BLOBS) as client:
        async with client.indexed("x", background=False) as ix:
            stream = await pair(ix)
        faults.fail_next("get", Outcome.REFUSED, times=2)
        async with client.indexed("x") as ix:

            async def merged() -> bool:  # it is counted a turn of the loop later than it is seen
                return len((await ix.inspect(stream)).trace) == 1 and ix.counters()["compactions"] == 1

            await until(merged)
            assert ix.counters()["failed_compactions"] >= 1


async def test_pieces_of_a_snapshot_stay_while_what_they_are_made_of_is_replaced() -> None:
    place = Place()
    async with (
        place.client(rollup_every=4, **IN_BLOBS) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await pair(ix)
        async with await ix.snapshot(stream) as snapshot:
            first, second, third = snapshot.split(3)
            begun = [await anext(first)]
            for request in await ix.step():
                await ix.apply(request.stream, await ix.compact(request))
            for time in range(2, 12):
                await ix.write([(stream, [("c", 0, time, 1)])])
                await ix.step()
            found = [*begun, *[u async for u in first], *[u async for u in second], *[u async for u in third]]
            assert sorted(u[:2] for u in found) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
        before = await place.keys()
        for time in range(12, 20):
            await ix.write([(stream, [("c", 0, time, 1)])])
            await ix.step()
        assert before - await place.keys()  # let go of, they went


async def test_what_nobody_can_apply_any_more_is_deleted() -> None:
    place = Place()
    async with (
        place.client(rollup_every=99, **IN_BLOBS) as client,
        client.indexed("x", background=False) as ix,
    ):
        await pair(ix)
        (request,) = await ix.step()
        before = await place.keys()
        response = await ix.compact(request)
        output = await place.keys() - before
        assert len(output) == 1
        await ix.destroy("s")
        await ix.apply("s", response)
        assert ix.counters()["unexpected_responses"] == 1

        async def gone() -> bool:
            return not output & await place.keys()

        await until(gone)


async def test_a_lost_answer_is_settled_by_the_same_bytes_before_anything_else() -> None:
    """Goal: the next group waits; the version is written once."""
    place, faults = Place(), Faults()
    async with (
        place.client(faults, retry_timeout_s=5.0) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await ix.register("s", str, int)
        place.sent.clear()
        faults.fail_next("compare_and_set", Outcome.DROPPED, times=2)
        first = asyncio.create_task(ix.write([(stream, [("a", 1, 0, 1)])]))
        while not place.sent:
            await asyncio.sleep(0)
        second = asyncio.create_task(ix.write([(stream, [("b", 1, 0, 1)])]))
        assert await asyncio.gather(first, second) == [1, 2]
        versions = [expected for expected, _ in place.sent]
        assert versions == sorted(versions, key=lambda v: -1 if v is None else v)
        again = [data for expected, data in place.sent if expected == versions[0]]
        assert len(again) == 3
        assert len(set(again)) == 1
        assert len([expected for expected in versions if expected == versions[-1]]) == 1


async def test_all_of_a_group_get_the_error_of_an_unknown_outcome() -> None:
    """Goal: refused commands, too, since it is unknown whether their seqnos were given out."""
    place, faults = Place(), Faults()
    async with (
        place.client(faults, retry_timeout_s=0.0) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await ix.register("s", str, int)
        await ix.seal([stream], 3)
        faults.fail_next("compare_and_set", Outcome.LOST)
        faults.fail_next("scan", Outcome.REFUSED)
        calls = [ix.write([(stream, [("a", 1, t, 1)])]) for t in (3, 2)]
        outcomes = await asyncio.gather(*calls, ix.seal([stream], 4), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ap.Indeterminate] * 3
        async with await ix.snapshot(stream) as snapshot:  # it had happened, as a whole
            assert (snapshot.seqno, snapshot.seal) == (4, ap.Antichain(4))
            assert len(await snapshot.rows()) == 1
        with pytest.raises(Refused) as refused:
            await ix.write([(stream, [("a", 1, 2, 1)])])
        assert refused.value.seqno == 5


async def test_an_iterator_that_fills_one_list(client: ap.Client) -> None:
    """Goal: each stream gets its own updates."""
    async with client.indexed("filled") as ix:
        streams = [await ix.register(name, str, int) for name in "ab"]

        def pairs() -> Iterator[Any]:
            pair: list[Any] = []
            for stream in streams:
                pair[:] = [stream, [(stream.name, 1, 0, 1)]]
                yield pair

        await ix.write(pairs())
        for stream in streams:
            async with ix.snapshot(stream) as snapshot:
                assert await snapshot.rows() == [(stream.name, 1, 0, 1)]
