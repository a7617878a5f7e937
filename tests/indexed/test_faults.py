"""Goal: whichever single call to a store fails, in whichever way, callers are told what is so, what is in
memory is what is durable, and everything goes on."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import CompactionResponse, Indexed, Stream
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.conftest import QUICK

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


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [Outcome.REFUSED, Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_any_single_call_may_fail(chosen: Outcome) -> None:
    calls = (await play(0, chosen)).calls["all"]
    ops: Counter[str] = Counter()
    every = 5 if QUICK else 1 if chosen in (Outcome.REFUSED, Outcome.LOST) else 2
    for at in range(1, calls + 1, every):
        try:
            faults = await play(at, chosen)
        except Exception as error:
            raise AssertionError(f"when call {at} is {chosen}") from error
        ops[faults.op] += 1
    if every == 1:
        assert ops["compare_and_set"] > 12
        assert ops["set"] > 6
        assert ops["get"] > 6
        assert {"delete", "truncate", "scan"} <= ops.keys()
