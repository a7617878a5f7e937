"""Helpers that the tests of reading an `Indexed` share."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import aiopersist as ap
from aiopersist.indexed import Indexed, Listener, Records, Stream, StreamSnapshot
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.support.schemas import Row

TINY = {"inline_writes_single_max_bytes": 0, "blob_target_size": 200, "row_group_bytes": 80}


NO_CACHE = {"blob_cache_bytes": 0}


async def stream_of(ix: Indexed, name: str = "a") -> Stream[str, int]:
    return await ix.register(name, str, int)


def at(*times: int, key: str = "k", diff: int = 1) -> list[Row]:
    """An update at each of these times."""
    return [(key, time, time, diff) for time in times]


def plain(rows: Iterable[Any]) -> list[Row]:
    return [tuple(row) for row in rows]


def summed(rows: Iterable[Any], since: int = 0) -> dict[tuple[str, int, int], int]:
    """The oracle: what these updates come to at times from since on."""
    sums: Counter[tuple[str, int, int]] = Counter()
    for key, val, time, diff in rows:
        sums[key, val, max(time, since)] += diff
    return {row: diff for row, diff in sums.items() if diff}


async def read(ix: Indexed, stream: Stream[Any, Any]) -> list[Row]:
    async with await ix.snapshot(stream) as snapshot:
        return plain(await snapshot.rows())


async def split_rows(snapshot: StreamSnapshot[Any, Any], n: int) -> list[list[Row]]:
    async def one(items: Any) -> list[Row]:
        return [tuple(row) async for row in items]

    return await asyncio.gather(*[one(items) for items in snapshot.split(n)])


async def take(listener: Listener[Any, Any], count: int) -> list[Any]:
    """The next events: rows of `Records`, and times of `Sealed`."""
    async with asyncio.timeout(50):
        return [told(await anext(listener)) for _ in range(count)]


def told(item: Any) -> Any:
    return plain(item.updates.rows()) if isinstance(item, Records) else item.time


async def rest(listener: Listener[Any, Any], quiet_s: float = 0.1) -> list[Any]:
    """What it tells until it ends, or nothing comes for a moment."""
    found: list[Any] = []
    try:
        while True:
            async with asyncio.timeout(quiet_s):
                found.append(told(await anext(listener)))
    except (TimeoutError, StopAsyncIteration):
        return found


async def take_all(listener: Listener[Any, Any], count: int) -> list[Any]:
    """The next events, and what comes in the moment after them."""
    return await take(listener, count) + await rest(listener, 0.15)


async def take_rows(listener: Listener[Any, Any], count: int, quiet_s: float = 0.1) -> list[Row]:
    """The rows of the next events, up to this many, and of what comes in the moment after them."""
    found: list[Row] = []
    while len(found) < count:
        found += rows_of(await take(listener, 1))
    return found + rows_of(await rest(listener, quiet_s))


def rows_of(events: Iterable[Any]) -> list[Row]:
    return [row for item in events if isinstance(item, list) for row in item]


async def settle_down(ix: Indexed, rounds: int = 60) -> None:
    """Steps, and compactions, until there is nothing to do."""
    for _ in range(rounds):
        requests = await ix.step()
        for request in requests:
            await ix.apply(request.stream, await ix.compact(request))
        if not requests:
            return
    raise AssertionError("it never comes to rest")


def check_view(view: Any) -> None:
    """What holds of an arrangement at every moment."""
    assert [low for low, *_ in view.trace[:1]] in ([], [0])
    for (_, upper, _, level, _), (lower, _, _, next_level, _) in pairwise(view.trace):
        assert upper == lower
        assert level >= next_level
    assert all(lower < upper and since <= view.since for lower, upper, since, _, _ in view.trace)
    assert view.trace_upper == (view.trace[-1][1] if view.trace else 0) <= view.seal
    assert all(low < high and least <= greatest for low, high, least, greatest in view.unsealed)
    assert all(left[1] <= right[0] for left, right in pairwise(view.unsealed))


async def drained(ix: Indexed, a: Stream[str, int], batches: list[list[Row]]) -> None:
    """A batch of the trace for each of these, over an interval of ten times."""
    for rows in batches:
        seal = (await ix.inspect(a)).seal
        await ix.write([(a, [(k, v, seal, d) for k, v, _, d in rows])])
        await ix.seal([a], seal + 10)
        await ix.step()


class LostLease(NamedTuple):
    """A stream of twelve writes, a reader that heard nothing meanwhile, and what it listened by."""

    ix: Indexed
    stream: Any
    reader: Indexed
    events: Any


@asynccontextmanager
async def lost_lease() -> AsyncIterator[LostLease]:
    """Its lease ran out, and the versions after the one that it knows were truncated."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    quick = {"reader_lease_s": 0.3, "watch_timeout_s": 0.1, "retry_timeout_s": 0.05}
    options = ap.Settings(**quick, rollup_every=2)
    async with (
        ap.open(url, settings=options) as client,
        ap.open(blob=ap.open_blob(url), consensus=consensus, settings=options) as other,
        client.indexed("ix", background=False) as ix,
        other.indexed("ix", readonly=True) as reader,
    ):
        a = await stream_of(ix)
        _, events = await reader.listen(a)
        faults.rates = {Outcome.REFUSED: 1.0}
        await asyncio.sleep(0.6)
        for t in range(12):
            await ix.write([(a, at(t))])
            await ix.step()
        faults.heal()
        yield LostLease(ix, a, reader, events)
