"""Reads a page of the contents of a stream of an `Indexed`.

A trace is sorted, but unsealed batches are not. So a page sums the whole stream up to its time in memory, on
a worker thread. A stream that would need more than `settings.read_memory_bytes` has no pages.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiopersist.base.errors import InvalidUsage, LeaseExpired, UsageKind, shown
from aiopersist.base.frontier import Antichain
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.consolidate import contents
from aiopersist.indexed.snapshot import StreamSnapshot
from aiopersist.parts.fetch import Fetch
from aiopersist.shard.catalog import resolve_any
from aiopersist.shard.shard import Shard
from aiopersist.state.record import goodbytes_at_most
from aiopersist.state.streams import Arrangement
from aiopersist.web.reading import PAGE_ROWS, Question, RawRows, conditions_of
from aiopersist.web.words import size_text

MEMORY_SHARE = 4  # to sum updates takes this many times their goodbytes
NAMES_SHOWN = 8
PLANS_MAX = 4  # attempts of a client without a lease: parts may be replaced while it reads them


def arrangement_of(shard: Shard, stream: str) -> Arrangement:
    """The arrangement of a stream; `InvalidUsage` if it does not exist or is too large for pages."""
    streams = shard.state.streams
    if streams is None or stream not in streams.names:
        names = sorted(streams.names)[:NAMES_SHOWN] if streams else []
        named = ", ".join(map(shown, names)) or "none"
        text = f"stream={shown(stream)}: its streams are {named}"
        raise InvalidUsage(UsageKind.INVALID_NAME, text)
    arrangement = streams.arrangements.get(stream, Arrangement())
    size = sum(map(goodbytes_at_most, arrangement.parts))
    most = shard.stack.settings.read_memory_bytes // MEMORY_SHARE
    if size > most:
        text = (
            f"stream {shown(stream)} has {size_text(size)} of updates, and pages sum at most "
            f"{size_text(most)} in memory: read it with Indexed.snapshot"
        )
        raise InvalidUsage(UsageKind.INVALID_BOUNDS, text)
    return arrangement


async def read_stream(client: Client, shard: str, question: Question) -> RawRows:
    """The rows of a page, and one more if there is one. `InvalidUsage` for a wrong key."""
    for plans_left in reversed(range(PLANS_MAX)):
        try:
            async with _opened(client, shard, question.stream) as snapshot:
                tables = await _tables(snapshot, question)
                return await client._stack.compute(_rows, tables, question, snapshot._fetch.schema)
        except LeaseExpired:
            if not plans_left:
                raise
    raise AssertionError("the last attempt returns or raises")


@asynccontextmanager
async def _opened(client: Client, name: str, stream: str) -> AsyncIterator[StreamSnapshot[Any, Any]]:
    """A snapshot of the stream as it is now."""
    shards = client._shards
    with shards.calls.call():
        shard = shards.at(await resolve_any(client._stack, name), name)
        await shard.hold.acquire()
    try:
        snapshot = await _snapshot(shard, stream, client)
        try:
            yield snapshot
        finally:
            await snapshot.aclose()
    finally:
        shard.hold.release_soon()


async def _snapshot(shard: Shard, stream: str, client: Client) -> StreamSnapshot[Any, Any]:
    await shard.open()
    await shard.hold.ensure()
    while not shard.hold.registered:
        await shard.hold.ensure()
    arrangement = arrangement_of(shard, stream)  # no await from here to the pin
    streams = shard.state.streams
    assert streams is not None
    fetch = Fetch(shard, shard.schema(streams.names[stream]))
    return StreamSnapshot(client._shards.scope, fetch, shard.hold, arrangement, streams.seqno)


async def _tables(snapshot: StreamSnapshot[Any, Any], question: Question) -> list[pa.Table]:
    """The updates up to `question.as_of`; for changes, only those after `question.since`. Stored times may be
    before the stream's since; advanced to it, they stay on the same side of both times."""
    as_of, since = question.as_of, question.since
    assert isinstance(as_of, int)
    assert isinstance(since, int | None)
    lower = None if since is None else Antichain(since + 1)
    upper, trace_upper = Antichain(as_of + 1), snapshot._trace_upper
    trace, unsealed = snapshot._parts()
    from_trace = await snapshot._table(trace, lower, upper)
    beyond = trace_upper if lower is None else trace_upper.join(lower)
    return [from_trace, await snapshot._table(unsealed, beyond, upper)]


def _rows(tables: list[pa.Table], question: Question, schema: Any) -> RawRows:
    _, condition = conditions_of(question, schema)
    table = contents(concat(tables, schema), schema)
    table = table if condition is None else table.filter(condition)
    return RawRows(table.slice(question.place.past, PAGE_ROWS + 1), schema)
