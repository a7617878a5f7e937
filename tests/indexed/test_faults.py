"""Goal: after any fault of any single call to a store, callers get the true outcome, the state in memory
is the durable one, and everything goes on."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import CompactionResponse, Fenced, Indexed, Stream
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.shards import becomes

LIMITS: dict[str, Any] = {
    "inline_writes_single_max_bytes": 40,
    "blob_target_size": 150,
    "row_group_bytes": 80,
    "rollup_every": 4,
    "retry_timeout_s": 0.0,
    "watch_timeout_s": 0.02,
    "blob_cache_bytes": 0,
}
Key = tuple[str, int, int]


class OneFault(Faults):
    """The call of number `at` ends with `outcome`; all others are done."""

    def __init__(self, at: int, chosen: Outcome) -> None:
        super().__init__()
        self.at, self.chosen, self.number = at, chosen, 0
        self.op = ""

    def outcome(self, op: str) -> Outcome:
        if op in ("watch", "now"):  # a look at a clock is no request
            return Outcome.DONE
        self.number += 1
        if self.number == self.at:
            self.op = op
            return self.chosen
        return Outcome.DONE


class Life:
    """An `Indexed` through everything that it does, with whatever fails repeated; and what must be in it."""

    def __init__(self, ix: Indexed, client: ap.Client) -> None:
        self.ix, self.client = ix, client
        self.streams: dict[str, Stream[str, int]] = {}
        self.acked: set[Key] = set()
        self.maybe: set[Key] = set()
        self.seals: dict[str, int] = {}
        self.errors: list[ap.Error] = []
        self.number = 0

    async def until_done(self, call: Callable[[], Awaitable[Any]]) -> Any:
        for _ in range(4):
            try:
                return await call()
            except (ap.StorageUnavailable, ap.Indeterminate) as error:
                self.errors.append(error)
        raise AssertionError(f"it does not go on: {self.errors}")

    async def write(self, stream: str, time: int, rows: int = 1) -> None:
        async def attempt() -> None:
            self.number += 1
            keys = {(f"{stream}{self.number}", n, time + n) for n in range(rows)}
            try:
                await self.ix.write([(self.streams[stream], [(*key, 1) for key in keys])])
            except ap.Indeterminate:
                self.maybe |= keys
                raise
            self.acked |= keys

        await self.until_done(attempt)

    async def register(self, name: str) -> None:
        self.streams[name] = await self.until_done(lambda: self.ix.register(name, str, int))

    async def seal(self, time: int, *names: str) -> None:
        await self.until_done(lambda: self.ix.seal([self.streams[name] for name in names], time))
        self.seals |= dict.fromkeys(names, time)

    async def tend(self) -> None:
        """A step, and the compactions that it asks for."""
        for request in await self.until_done(self.ix.step):
            response: CompactionResponse | ap.Error
            try:
                response = await self.ix.compact(request)
            except (ap.StorageUnavailable, ap.Indeterminate) as error:
                self.errors.append(error)
                response = error
            try:
                await self.ix.apply(request.stream, response)
            except (ap.StorageUnavailable, ap.Indeterminate) as error:
                self.errors.append(error)

    async def all_of_it(self) -> None:
        await self.register("a")
        await self.register("b")
        await self.write("a", 3)
        await self.write("a", 1, rows=8)  # several parts
        await self.write("b", 0)
        await self.seal(4, "a", "b")
        await self.tend()
        await self.write("a", 5, rows=3)
        await self.seal(6, "a")
        await self.tend()
        since = [(self.streams["a"], 6), (self.streams["b"], 2)]
        await self.until_done(lambda: self.ix.allow_compaction(since))
        await self.tend()
        await self.until_done(lambda: self.rows(self.ix, "a"))
        await self.register("c")
        await self.write("c", 0, rows=3)
        await self.until_done(lambda: self.ix.destroy("c"))
        await self.tend()

    async def rows(self, ix: Indexed, name: str) -> "Counter[Key]":
        stream = await ix.load(name, str, int)
        assert stream is not None
        async with await ix.snapshot(stream) as snapshot:
            found: Counter[Key] = Counter()
            for key, val, time, diff in await snapshot.rows():
                found[key, val, time] += diff
            return found

    async def check(self, ix: Indexed, since: dict[str, int]) -> None:
        """All that was acknowledged is there once, and nothing else but what may be."""
        for name, at in since.items():
            found = await self.rows(ix, name)
            acked = {(k, v, max(t, at)) for k, v, t in self.acked if k.startswith(name)}
            maybe = {(k, v, max(t, at)) for k, v, t in self.maybe if k.startswith(name)}
            assert set(found.values()) <= {1}
            assert acked <= found.keys() <= acked | maybe
            assert (await ix.description(name)).upper == ap.Antichain(self.seals[name])


@asynccontextmanager
async def opened(blob: MemoryBlob, consensus: MemoryConsensus, faults: Faults) -> AsyncIterator[ap.Client]:
    stores = {"blob": FaultyBlob(blob, faults), "consensus": FaultyConsensus(consensus, faults)}
    settings = ap.Settings(**LIMITS)
    async with ap.open(**stores, settings=settings, maintenance=False) as client:
        yield client


async def play(at: int, chosen: Outcome) -> OneFault:
    """A life in which that call ends so; what it was, if there were so many."""
    blob, consensus, faults = MemoryBlob(""), MemoryConsensus(""), OneFault(0, chosen)
    since = {"a": 6, "b": 2}
    async with (
        opened(blob, consensus, faults) as client,
        opened(blob, consensus, Faults()) as other,
        client.indexed("x", background=False) as ix,
    ):
        opening = faults.number
        faults.at = opening + at if at else -1
        life = Life(ix, client)
        await life.all_of_it()
        await faults.land()
        await life.seal(6, "a")
        faults.calls["all"], faults.at = faults.number - opening, -1
        await life.check(ix, since)
        async with other.indexed("x", readonly=True) as reader:
            await life.check(reader, since)
            for name in since:
                mine, durable = await ix.inspect(name), await reader.inspect(name)
                assert mine == durable.model_copy(update={"in_flight": mine.in_flight})
                assert not mine.in_flight
        if at <= 0 or faults.op == "":
            return faults
        await ix.stop()
        async with other.indexed("x", background=False) as again:
            await life.check(again, since)
            await again.write([(life.streams["b"], [("b_last", 0, 50, 1)])])
        await other.sweep_leaked_blobs(dry_run=False)
        used = await other.usage()
        assert used.total == used.referenced
        if chosen is Outcome.REFUSED:  # others may be settled without a word
            assert life.errors or faults.op == "delete"
    return faults


CHOSEN = [Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED, Outcome.LATE]


@pytest.mark.slow
@pytest.mark.parametrize("every", [2 * len(CHOSEN), pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("chosen", CHOSEN)
async def test_any_single_call_may_fail(chosen: Outcome, every: int) -> None:
    """Goal: the header's. By default each call ends in one of these ways, in the long run in each."""
    calls = (await play(0, chosen)).calls["all"]
    ops: Counter[str] = Counter()
    for at in range(1 + CHOSEN.index(chosen) % every, calls + 1, every):
        try:
            faults = await play(at, chosen)
        except Exception as error:
            raise AssertionError(f"when call {at} is {chosen}") from error
        ops[faults.op] += 1
    assert {"compare_and_set", "set", "get"} <= ops.keys()
    if every == 1:
        assert ops["compare_and_set"] > 12
        assert ops["set"] > 6
        assert ops["get"] > 6
        assert {"delete", "truncate", "scan"} <= ops.keys()


class Holding(Faults):
    """From `hold` on the calls of these methods wait until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: tuple[str, ...] = ()
        self.held = asyncio.Event()
        self.go = asyncio.Event()

    def hold(self, *ops: str) -> None:
        self.ops = ops
        self.held.clear()
        self.go.clear()

    async def call(self, op: str, act: Callable[[], Awaitable[Any]]) -> Any:
        if op in self.ops:
            self.held.set()
            await self.go.wait()
        return await super().call(op, act)


@pytest.mark.parametrize("what", ["step", "apply"])
async def test_what_is_cut_off_while_an_earlier_commit_is_settled_may_happen(what: str) -> None:
    """Goal: its outputs are not deleted: the commit that names them goes on."""
    blob, consensus, faults, slow = MemoryBlob(""), MemoryConsensus(""), Holding(), Holding()
    settings = ap.Settings(**LIMITS | {"inline_writes_single_max_bytes": 0, "rollup_every": 99})
    stores = {"blob": FaultyBlob(blob, slow), "consensus": FaultyConsensus(consensus, faults)}
    async with (
        ap.open(**stores, settings=settings, maintenance=False) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await ix.register("s", str, int)
        for time in range(2):
            await ix.write([(stream, [("a", 1, time, 1)])])
            await ix.seal([stream], time + 1)
            if what == "apply":
                await ix.step()
        if what == "apply":
            await ix.allow_compaction([(stream, 2)])
            (request,) = await ix.step()
            response = await ix.compact(request)
            work = None
        else:
            slow.hold("get")
            work = asyncio.create_task(ix.step())
            await slow.held.wait()
        faults.fail_next("compare_and_set", Outcome.LOST)
        faults.fail_next("scan", Outcome.REFUSED)
        with pytest.raises(ap.Indeterminate):
            await ix.write([(stream, [("b", 1, 9, 1)])])
        faults.hold("scan", "head")
        slow.go.set()
        work = work or asyncio.create_task(ix._maintenance.apply("s", response))  # as in the background
        await faults.held.wait()
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled()
        faults.go.set()
        async with await ix.snapshot(stream) as snapshot:
            assert sum(update.diff for update in await snapshot.rows()) == 3
        view = await ix.inspect(stream)
        assert [batch[:2] for batch in view.trace] == [(0, 2)]


async def test_a_part_that_the_store_has_lost_is_told_by_the_step() -> None:
    blob = MemoryBlob("")
    async with (
        ap.open(blob=blob, consensus=MemoryConsensus(""), settings=ap.Settings(**LIMITS)) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await ix.register("s", str, int)
        await ix.write([(stream, [("a" * 99, 1, 0, 1)])])
        await ix.seal([stream], 1)
        await blob.delete([key async for key, _ in blob.list("i")])
        with pytest.raises(ap.Corruption, match="names is missing"):
            await ix.step()
        assert ix.counters()["failed_steps"] == 1
        assert await ix.write([(stream, [("b", 1, 1, 1)])]) == 3


async def test_a_compaction_of_a_stream_that_goes_meanwhile_is_skipped() -> None:
    """Goal: and its output goes, too."""
    faults = Holding()
    blob = MemoryBlob("")
    stores = {"blob": blob, "consensus": FaultyConsensus(MemoryConsensus(""), faults)}
    settings = ap.Settings(**LIMITS | {"inline_writes_single_max_bytes": 0, "rollup_every": 99})
    async with (
        ap.open(**stores, settings=settings, maintenance=False) as client,
        client.indexed("x", background=False) as ix,
    ):
        stream = await ix.register("s", str, int)
        for time in range(2):
            await ix.write([(stream, [("a", 1, time, 1)])])
            await ix.seal([stream], time + 1)
            await ix.step()
        await ix.allow_compaction([(stream, 2)])
        (request,) = await ix.step()
        before = {key async for key, _ in blob.list("i")}
        response = await ix.compact(request)
        output = {key async for key, _ in blob.list("i")} - before
        assert len(output) == 1
        faults.hold("compare_and_set")
        destroying = asyncio.create_task(ix.destroy("s"))
        await faults.held.wait()
        applying = asyncio.create_task(ix._maintenance.apply("s", response))
        await asyncio.sleep(0)
        faults.go.set()
        await asyncio.gather(destroying, applying)
        assert ix.counters()["skipped_compactions"] == 1

        async def left() -> set[str]:
            return output & {key async for key, _ in blob.list("i")}

        await becomes(left, set())


async def test_a_listener_of_an_owner_that_is_fenced_takes_what_was_told_and_ends() -> None:
    async with ap.open("mem://") as client:
        early = await client.indexed("x", background=False)
        stream = await early.register("s", str, int)
        snapshot, events = await early.listen(stream)
        await early.write([(stream, [("a", 1, 0, 1)])])
        async with client.indexed("x", background=False) as late:
            await late.seal([stream], 5)
            with pytest.raises(Fenced):
                await early.seal([stream], 1)
            first = await anext(events)
            assert first.updates.rows() == [("a", 1, 0, 1)]  # type: ignore[union-attr]
            for _ in range(2):
                with pytest.raises(Fenced):
                    await anext(events)
        await snapshot.aclose()
        await events.aclose()
        await early.stop()


async def test_traces_leave_room_for_what_is_new() -> None:
    """Goal: however much the traces hold, a small commit of many streams costs no blob for each. Tables of 40
    keys, whose traces are small enough to stay in the state, and together too large."""
    settings = ap.Settings(indexed_inline_total_max_bytes=24_000)
    async with (
        ap.open("mem://", settings=settings, maintenance=False) as client,
        client.indexed("x", background=False) as ix,
    ):
        streams = [await ix.register(f"s{n}", str, int) for n in range(12)]
        writes = 0
        for time in range(70):
            key = f"a-key-of-some-length-{time % 40:06}"
            rows = [(key, time - 40, time, -1)] * (time >= 40) + [(key, time, time, 1)]
            before = client.metrics["blob.set"].count
            await ix.write([(stream, rows) for stream in streams])
            writes += (client.metrics["blob.set"].count - before) * (time >= 50)
            await ix.seal(streams, time + 1)
            await ix.allow_compaction([(stream, time + 1) for stream in streams])
            while requests := await ix.step():
                for request in requests:
                    await ix.apply(request.stream, await ix.compact(request))
        assert ix.counters()["trace_bytes"] > 24_000
        assert writes <= 24  # of 240
