"""Gets and puts of a table that is not resident, beside ranged reads by hand: of the footer of a part, once,
and of the row group that has the key."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import aiopersist as ap


class RangedReads:
    """The parts of a table whose keys are known to be in order. Footers stay parsed."""

    def __init__(self, blob: Any, parts: list[Any]) -> None:
        self._blob = blob
        self._parts = parts
        self._known: dict[str, Any] = {}

    async def get(self, key: int) -> str | None:
        for part in self._parts:
            if part.stats["key"]["min"] <= key <= part.stats["key"]["max"]:
                return await self._get(part, key)
        return None

    async def _get(self, part: Any, key: int) -> str | None:
        metadata = self._known.get(part.key)
        if metadata is None:
            at = part.size - part.footer_bytes
            footer = await self._blob.get_range(part.key, at, part.footer_bytes)
            metadata = self._known[part.key] = pq.read_metadata(pa.BufferReader(footer))
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            bounds = group.column(0).statistics
            if bounds.min <= key <= bounds.max:
                columns = [group.column(n) for n in range(group.num_columns)]
                starts = [c.dictionary_page_offset or c.data_page_offset for c in columns]
                end = max(s + c.total_compressed_size for s, c in zip(starts, columns, strict=True))
                data = await self._blob.get_range(part.key, min(starts), end - min(starts))
                sparse = pa.allocate_buffer(part.size)
                memoryview(sparse).cast("B")[min(starts) : min(starts) + len(data)] = data
                file = pq.ParquetFile(pa.BufferReader(sparse), metadata=metadata)
                found = file.read_row_group(number, columns=["key", "val"]).filter(pc.field("key") == key)
                return str(found.column("val")[0].as_py()) if found.num_rows else None
        return None


def entries(count: int) -> Iterator[pa.Table]:
    """Keys in order, and vals that compress to half."""
    for first in range(0, count, 100_000):
        key = pl.int_range(first, min(first + 100_000, count), eager=True)
        digits = [key.hash(seed).cast(pl.String).str.zfill(20) for seed in (1, 2)]
        yield pl.DataFrame({"key": key, "val": "val " + digits[0] + digits[1]}).to_arrow()


@pytest.mark.parametrize("place", ["files+sqlite", "s3+postgres"], indirect=True)
@pytest.mark.parametrize("count", [1_000_000, pytest.param(10_000_000, marks=pytest.mark.long)])
@pytest.mark.timeout(3600)
def test_large_table(place: Any, run: Any, rounds: Any, enabled: bool, count: int) -> None:
    """Each round another key. The cache of blobs is off, so that each get fetches its row group."""
    count = count if enabled else 20_000
    settings = ap.Settings(blob_cache_bytes=0, inline_writes_single_max_bytes=0 if not enabled else 16_384)
    dice, numbers = random.Random(1), itertools.count()

    async def opened() -> Any:
        client = await ap.open(
            blob=place.blob, consensus=place.consensus, settings=settings, maintenance=False
        )
        table = client.table("t", int, str, resident=False)
        await table.put_many(entries(count))
        await client.admin.force_compaction("t")
        state = await client._shards.at(await client.shard_id("t")).open()
        parts = [part for batch in state.batches.values() for part in batch.parts if part.key]
        return client, await client.table("t", int, str), RangedReads(ap.open_blob(place.blob), parts)

    client, table, hand = run(opened())
    probe = dice.randrange(count)
    assert run(hand.get(probe)) == run(table.get(probe))
    contenders = {
        "get by hand": lambda: hand.get(dice.randrange(count)),
        "get": lambda: table.get(dice.randrange(count)),
        "put": lambda: table.put(dice.randrange(count), f"new {next(numbers)}"),
    }
    medians = rounds(contenders, 40)
    assert medians["get"] > 0
    run(hand._blob.aclose())
    run(client.aclose())
