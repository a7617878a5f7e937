"""Large appends beside sort + encode + put by hand, uploads at once, and small appends with and without
a blob."""

import itertools
import uuid
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from benches import byhand

SCHEMA = ap.Schema(key=bytes, val=bytes)
MIB = 2**20
PART = 128 * MIB  # goodbytes: the default target


@pytest.fixture
def size(request: pytest.FixtureRequest) -> int:
    """Goodbytes of a large append; as a test it is a small one."""
    return 512 * MIB if request.config.getoption("benchmark_enable") else 4 * MIB


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["files+sqlite", "s3+postgres"], indirect=True)
def test_large_append(place: Any, run: Any, rounds: Any, size: int) -> None:
    table = byhand.large_table(size)
    client = run(
        ap.open(blob=place.blob, consensus=place.consensus, settings=ap.Settings(blob_cache_bytes=0))
    )
    blob, consensus = ap.open_blob(place.blob), ap.open_consensus(place.consensus)
    writer = run(client.writer("shard", SCHEMA))
    times, seqnos, key = itertools.count(), itertools.count(-1), f"bench/{uuid.uuid4()}"

    async def ours() -> None:
        time = next(times)
        await writer.compare_and_append(at(table, time), time, time + 1)

    async def by_hand() -> None:
        rows = PART // 96
        for start in range(0, table.num_rows, rows):
            data = byhand.part(byhand.consolidate(at(table, 0).slice(start, rows)))
            await blob.set(f"bench/{uuid.uuid4()}", data)
        seqno = next(seqnos)
        assert await consensus.compare_and_set(key, None if seqno < 0 else seqno, b"names of the blobs")

    rounds({"by hand, one part after the other": by_hand, "compare_and_append": ours}, 3, warmup=1)
    for resource in (client, blob, consensus):
        run(resource.aclose())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["s3+postgres"], indirect=True)
def test_parts_in_flight(place: Any, run: Any, rounds: Any, size: int) -> None:
    """The same data in parts of an eighth of the usual size."""
    table, contenders, clients = byhand.large_table(size // 2), {}, []
    for outstanding in (1, 2, 4, 8):
        settings = ap.Settings(
            blob_cache_bytes=0,
            blob_target_size=PART // 8,
            batch_builder_max_outstanding_parts=outstanding,
        )
        client = run(ap.open(blob=place.blob, consensus=place.consensus, settings=settings))
        clients.append(client)
        contenders[f"{outstanding} in flight"] = _append(run(client.writer("shard", SCHEMA)), table)
    rounds(contenders, 3, warmup=1)
    for client in clients:
        run(client.aclose())


@pytest.mark.parametrize("place", ["files+sqlite", "s3+postgres"], indirect=True)
def test_inline_or_blob(place: Any, run: Any, rounds: Any) -> None:
    contenders, clients = {}, []
    for name, limit in (("in the state", 16384), ("as a blob", 0)):
        settings = ap.Settings(inline_writes_single_max_bytes=limit)
        client = run(ap.open(blob=place.blob, consensus=place.consensus, settings=settings))
        clients.append(client)
        contenders[f"100 rows {name}"] = _append(run(client.writer(name, SCHEMA)), byhand.table(100))
    rounds(contenders, 100)
    for client in clients:
        run(client.aclose())


def at(table: pa.Table, time: int) -> pa.Table:
    return table.set_column(2, byhand.SCHEMA.field(2), pa.repeat(pa.scalar(time, pa.int64()), table.num_rows))


def _append(writer: ap.WriteHandle[bytes, bytes], table: pa.Table) -> Any:
    async def append() -> None:
        time: Any = (await writer.fetch_recent_upper()).time
        await writer.compare_and_append(at(table, time), time, time + 1)

    return append
