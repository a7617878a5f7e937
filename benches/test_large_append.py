"""100,000 rows in and out, beside sort + encode + put and read + sum by hand."""

import itertools
import uuid
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import aiopersist as ap
from benches import byhand

SCHEMA = ap.Schema(key=bytes, val=bytes)
ROWS = 100_000
PLACES = pytest.mark.parametrize("place", ["files+sqlite", "s3+postgres"], indirect=True)


def rows_of(enabled: bool) -> tuple[int, pa.Table]:
    """A tenth of them where nothing is measured."""
    rows = ROWS if enabled else ROWS // 10
    return rows, byhand.table(rows)


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
def test_append(opened: Opened, run: Any, rounds: Any, enabled: bool) -> None:
    writer = run(opened.client.writer("shard", SCHEMA))
    seqnos, times, key = itertools.count(-1), itertools.count(), f"bench/{uuid.uuid4()}"
    rows, table = rows_of(enabled)
    tables = [table.set_column(2, byhand.SCHEMA.field(2), [[t] * rows]) for t in range(12)]

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
def test_snapshot(opened: Opened, run: Any, rounds: Any, enabled: bool) -> None:
    rows, table = rows_of(enabled)
    name = f"bench/{uuid.uuid4()}"

    async def prepare() -> Any:
        await opened.blob.set(name, byhand.part(byhand.consolidate(table)))
        async with opened.client.writer("shard", SCHEMA) as writer:
            await writer.compare_and_append(table, 0, 1)
        return await opened.client.reader("shard", SCHEMA)

    reader = run(prepare())

    async def ours() -> None:
        async with reader.snapshot(0) as snapshot:
            assert (await snapshot.to_arrow()).num_rows == rows

    async def by_hand() -> None:
        data = await opened.blob.get(name)
        assert data is not None
        assert byhand.read([data]).height == rows

    rounds({"by hand": by_hand, "snapshot": ours}, 9)
