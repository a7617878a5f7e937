"""100,000 rows in and out, beside sort + encode + put and read + sum by hand."""

import itertools
import uuid
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from benches import byhand

SCHEMA = ap.Schema(key=bytes, val=bytes)
ROWS = 100_000
PLACES = pytest.mark.parametrize("place", ["files+sqlite", "s3+postgres"], indirect=True)


class Opened(NamedTuple):
    client: ap.Client
    blob: ap.Blob
    consensus: ap.Consensus


@pytest.fixture
def opened(place: Any, run: Any) -> Any:
    """A client without a cache, and the bare stores beside it."""
    settings = ap.Settings(blob_cache_bytes=0)
    client = run(ap.open(blob=place.blob, consensus=place.consensus, settings=settings))
    stores = Opened(client, ap.open_blob(place.blob), ap.open_consensus(place.consensus))
    yield stores
    for resource in stores:
        run(resource.aclose())


@PLACES
def test_append(opened: Opened, run: Any, rounds: Any) -> None:
    writer = run(opened.client.writer("shard", SCHEMA))
    seqnos, times, key = itertools.count(-1), itertools.count(), f"bench/{uuid.uuid4()}"
    tables = [byhand.table(ROWS).set_column(2, byhand.SCHEMA.field(2), [[t] * ROWS]) for t in range(12)]

    async def ours() -> None:
        time = next(times)
        await writer.compare_and_append(tables[time], time, time + 1)

    async def by_hand() -> None:
        seqno = next(seqnos)
        name = f"bench/{uuid.uuid4()}"
        await opened.blob.set(name, byhand.part(byhand.consolidate(tables[0])))
        expected = None if seqno < 0 else seqno
        assert await opened.consensus.compare_and_set(key, expected, name.encode())

    rounds({"by hand": by_hand, "append": ours}, 9)


@PLACES
def test_snapshot(opened: Opened, run: Any, rounds: Any) -> None:
    table, name = byhand.table(ROWS), f"bench/{uuid.uuid4()}"

    async def prepare() -> Any:
        await opened.blob.set(name, byhand.part(byhand.consolidate(table)))
        async with opened.client.writer("shard", SCHEMA) as writer:
            await writer.compare_and_append(table, 0, 1)
        return await opened.client.reader("shard", SCHEMA)

    reader = run(prepare())

    async def ours() -> None:
        async with reader.snapshot(0) as snapshot:
            assert (await snapshot.to_arrow()).num_rows == ROWS

    async def by_hand() -> None:
        data = await opened.blob.get(name)
        assert data is not None
        assert byhand.read([data]).height == ROWS

    rounds({"by hand": by_hand, "snapshot": ours}, 9)
