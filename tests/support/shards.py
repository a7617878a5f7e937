"""Small steps of tests on a client and its shards."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.shard import Shard
from aiopersist.storage.blob import Blob
from aiopersist.testing.faults import Outcome
from tests.conftest import StoreUrls
from tests.support.internals import shards_of, stack_of
from tests.support.schemas import SCHEMA

SIZES = [pytest.param(16384, id="inline"), pytest.param(0, id="blob")]


def f(*elements: Any) -> ap.Antichain:
    return ap.Antichain(*elements)


def open_at(location: StoreUrls, **limits: Any) -> Any:
    return ap.open(blob=location.blob, consensus=location.consensus, settings=ap.Settings(**limits))


def open_mem(**limits: Any) -> Any:
    return ap.open("mem://", settings=ap.Settings(**limits))


async def parquet(client: ap.Client) -> list[str]:
    """The blobs of parts that the store of a client holds."""
    return await parts_in(stack_of(client).blob)


async def parts_in(blob: Blob) -> list[str]:
    return sorted([key async for key, _ in blob.list("") if key.endswith(".parquet")])


async def named_parts(client: ap.Client, name: str = "t") -> list[str]:
    """The blobs of parts that the newest state names."""
    state = await shards_of(client).at(await client.shard_id(name)).open()
    return sorted(part.key for batch in state.batches.values() for part in batch.parts if part.key)


async def rows(client: ap.Client, as_of: Any = None, schema: Any = SCHEMA, name: str = "t") -> list[Any]:
    async with client.reader(name, schema) as r, r.snapshot(as_of) as s:
        return await s.rows()


async def history(client: ap.Client, since: Any = 0, schema: Any = SCHEMA) -> dict[Any, int]:
    """All updates of the shard, summed, as a subscription gives them."""
    found: list[Any] = []
    async with client.reader("t", schema) as r:
        if (upper := await r.fetch_recent_upper()) == ap.Antichain(since):
            return {}
        async with r.subscribe(since) as updates:
            async for step in updates.steps():
                found += step.updates
                if upper <= step.upper:
                    break
    return summed(found)


async def updates_of(client: ap.Client) -> list[Any]:
    """The same in order."""
    return sorted((*what, diff) for what, diff in (await history(client)).items())


async def move_since(client: ap.Client, to: Any, name: str = "t") -> None:
    async with client.critical_since(name, "c") as since:
        await since.compare_and_downgrade_since(0, 0, to)


def summed(updates: Iterable[Sequence[Any]]) -> dict[Any, int]:
    """The oracle: updates added up one by one."""
    sums: dict[Any, int] = {}
    for key, val, time, diff in updates:
        sums[key, val, time] = sums.get((key, val, time), 0) + diff
    return {update: diff for update, diff in sums.items() if diff}


async def until(done: Callable[[], Any]) -> None:
    async with asyncio.timeout(50):
        while not done():
            await asyncio.sleep(0.002)


async def becomes(look: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    """Wait until that is what a look finds: what nobody needs is deleted in the background."""
    end = asyncio.get_running_loop().time() + 50
    while (found := await look()) != wanted and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.001)
    assert found == wanted


async def comes_to_rest(count: Callable[[], int], quiet_s: float) -> None:
    """Wait until nothing is counted for so long."""
    before = -1
    async with asyncio.timeout(50):
        while (now := count()) != before:
            before = now
            await asyncio.sleep(quiet_s)


async def refused(work: Awaitable[Any]) -> ap.UsageKind:
    with pytest.raises(ap.InvalidUsage) as caught:
        await work
    return caught.value.kind


CAS = "compare_and_set"


def shard_of(client: ap.Client) -> Shard:
    (shard,) = shards_of(client)._open.values()
    return shard


MIB = 2**20


def requests(client: ap.Client) -> int:
    return sum(op.count for op in client.metrics.values())


MONTH_S = 30 * 24 * 3600.0


def rows_until(time: int) -> list[tuple[str, int, int]]:
    return [("k", t, 1) for t in range(time + 1)]


@contextmanager
def noted(text: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(text)
        raise


async def is_sound(client: ap.Client) -> None:
    report = await client.admin.fsck("t")
    assert report.ok, report.problems


async def state_of(client: ap.Client) -> Any:
    return await shards_of(client).at(await client.shard_id("t")).open()


BLOBS = ap.Settings(inline_writes_single_max_bytes=0)


Call = Callable[[], Awaitable[Any]]


RATES = {Outcome.REFUSED: 0.03, Outcome.LOST: 0.02, Outcome.DROPPED: 0.02, Outcome.LATE: 0.01}
