"""Goal: what it takes to open a location in a bucket and to read in it, counted: the requests, and how many
of them follow each other."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.layers import Retry, RetryConsensus
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.objects.bucket import Object
from aiopersist.storage.objects.consensus import ObjectsConsensus
from aiopersist.storage.wrapper import Request, WrappedConsensus
from aiopersist.testing.simulation.loop import SimulatedLoop, import_library, threads_inline
from tests.storage.objects_kit import Counting, Objects, World

REQUEST_S = 1.0  # of a clock that no time passes by
SCHEMA = ap.Schema(key=str, val=int)


class Opened(NamedTuple):
    requests: Counter[str]
    in_turn: int
    """How many followed each other."""


class Slow(Counting):
    """Each request takes a second."""

    async def _call(self, what: str, request: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(REQUEST_S)
        return await super()._call(what, request)


class SlowStatements(WrappedConsensus):
    """Each statement takes a second. `now` is no request."""

    def __init__(self, inner: ap.Consensus) -> None:
        super().__init__(inner)
        self.calls: Counter[str] = Counter()

    async def _request(self, op: str, request: Request[Any], sent: int = 0) -> Any:
        if op not in ("now", "check"):  # which are none in a database
            self.calls[op] += 1
            await asyncio.sleep(REQUEST_S)
        return await request()


async def write(consensus: ap.Consensus, blob: ap.Blob, commits: int) -> None:
    async with ap.open(blob=blob, consensus=consensus) as client, client.writer("t", SCHEMA) as w:
        for number in range(commits):
            await w.write([("k", number)])


async def open_and_read(
    consensus: ap.Consensus, blob: ap.Blob, commits: int, calls: Counter[str], *, readonly: bool
) -> Opened:
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with ap.open(blob=blob, consensus=consensus, maintenance=False, readonly=readonly) as client:
        async with client.reader("t") as r, r.snapshot() as s:
            assert len(await s.rows()) == commits
            return Opened(Counter(calls), round((loop.time() - began) / REQUEST_S))


def simulated(scenario: Callable[[], Awaitable[Opened]]) -> Opened:
    import_library()
    loop = SimulatedLoop(random.Random(0))
    try:
        with threads_inline(loop):
            return loop.run_until_complete(scenario())
    finally:
        loop.close()


def in_a_bucket(commits: int, *, readonly: bool) -> Opened:
    async def scenario() -> Opened:
        world, blob = World({}), MemoryBlob("")
        await write(ObjectsConsensus(Objects(world)), blob, commits)
        bucket = Slow(Objects(world))
        return await open_and_read(ObjectsConsensus(bucket), blob, commits, bucket.calls, readonly=readonly)

    return simulated(scenario)


def in_a_database(commits: int, *, readonly: bool) -> Opened:
    async def scenario() -> Opened:
        blob, inner = MemoryBlob(""), MemoryConsensus("")
        await write(inner, blob, commits)
        consensus = SlowStatements(inner)
        return await open_and_read(consensus, blob, commits, consensus.calls, readonly=readonly)

    return simulated(scenario)


STATEMENTS = {"clock": 1, "head": 4, "scan": 1}  # of the location, the name, the shard; and what is new


@pytest.mark.parametrize(
    ("commits", "requests", "in_turn"),
    [
        pytest.param(5, {"list": 4, "get": 3}, 5, id="few versions"),
        pytest.param(100, {"list": 6, "get": 17}, 7, id="many versions, since there was no rollup"),
    ],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_requests_to_open_and_read(
    commits: int, requests: dict[str, int], in_turn: int, readonly: bool
) -> None:
    """As few in turn as statements in a database, plus two. Who may write tries whether the bucket obeys
    conditions, and commits the lease of a reader."""
    database, bucket = in_a_database(commits, readonly=readonly), in_a_bucket(commits, readonly=readonly)
    assert database.requests == STATEMENTS | ({} if readonly else {"compare_and_set": 1})
    more = {} if readonly else {"list": 1, "get": 1, "create": 2}
    assert bucket == (Counter(requests) + Counter(more), in_turn + (0 if readonly else 2))
    assert bucket.in_turn <= database.requests.total() + 2


class LooksThenWrites(Objects):
    """Its conditional put is a look and then a write: nobody notices who writes alone."""

    async def create(self, name: str, data: bytes) -> str | None:
        if name in self.stored:
            return None
        await asyncio.sleep(0)
        self.stored[name] = Object(data, str(hash(data)))
        return self.stored[name].tag


async def test_a_bucket_that_looks_and_then_writes_is_refused() -> None:
    """Each time: what the first client has written does not vouch for it."""
    world = World({})
    for _ in range(2):
        with pytest.raises(ap.InvalidLocation, match="several writers create one object"):
            await ObjectsConsensus(LooksThenWrites(world)).check()
        assert {*world.stored} == {"probe"}
    sound = Counting(Objects(world))
    await ObjectsConsensus(sound).check()
    assert sound.calls == {"get": 1, "create": 10, "delete": 1} and {*world.stored} == {"probe", "probed"}
    sound.calls.clear()
    await ObjectsConsensus(sound).check()
    assert sound.calls == {"get": 1, "create": 1}


async def test_who_opens_while_another_one_checks_checks_as_well() -> None:
    """Goal: what says that a bucket was checked is there only once it was, so neither a second client nor one
    that comes after a kill takes an unfit bucket for a fit one."""
    world, began, go = World({}), asyncio.Event(), asyncio.Event()

    class Slowly(LooksThenWrites):
        async def create(self, name: str, data: bytes) -> str | None:
            if name.startswith("probe-"):
                began.set()
                await go.wait()
            return await super().create(name, data)

    first = asyncio.create_task(ObjectsConsensus(Slowly(world)).check())
    await began.wait()
    with pytest.raises(ap.InvalidLocation, match="several writers create one object"):
        await ObjectsConsensus(LooksThenWrites(world)).check()
    go.set()
    with pytest.raises(ap.InvalidLocation, match="several writers create one object"):
        await first
    assert {*world.stored} == {"probe"}


class Disturbed(LooksThenWrites):
    """Fails the next creations of a race, as a store does that is asked too much."""

    fails = 0

    async def create(self, name: str, data: bytes) -> str | None:
        if name.startswith("probe-") and self.fails:
            self.fails -= 1
            raise ap.StorageUnavailable("SlowDown")
        return await super().create(name, data)


@pytest.mark.parametrize("fails", [1, 4])
async def test_a_race_that_is_disturbed_vouches_for_nothing(fails: int) -> None:
    """The caller repeats the check, and the look for what an earlier client has left must not pass it."""
    world = World({})
    bucket = Disturbed(world)
    bucket.fails = fails
    consensus = RetryConsensus(ObjectsConsensus(bucket), Retry(None, SYSTEM))
    with pytest.raises(ap.InvalidLocation, match="several writers create one object"):
        await consensus.check()
    assert {*world.stored} == {"probe"}
    sound = ObjectsConsensus(Objects(world))
    await sound.check()
    assert {*world.stored} == {"probe", "probed"}


async def test_a_conflict_is_a_race_that_was_lost() -> None:
    """S3 refuses so a creation that meets another one."""

    class Conflicts(Objects):
        async def create(self, name: str, data: bytes) -> str | None:
            if name.startswith("probe-") and name in self.stored:
                raise ap.StorageUnavailable("ConditionalRequestConflict")
            return await super().create(name, data)

    world = World({})
    await ObjectsConsensus(Conflicts(world)).check()
    assert {*world.stored} == {"probe", "probed"}
