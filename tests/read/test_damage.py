"""Damaged bytes are never data: they are read again at most twice, then `Corruption`."""

from collections.abc import AsyncIterator, Sequence

import pytest

import aiopersist as ap

SCHEMA = ap.Schema(key=int, val=bytes)
ROWS = [(i, b"%064d" % i, 0, 1) for i in range(2_000)]


class DamagingBlob(ap.Blob):
    """A store whose next `damaged` reads of parts come with one bit flipped."""

    def __init__(self, inner: ap.Blob) -> None:
        self.inner = inner
        self.damaged = 0
        self.reads = 0

    async def get(self, key: str) -> bytes | None:
        return self._maybe(key, await self.inner.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return self._maybe(key, await self.inner.get_range(key, offset, length))

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await self.inner.set(key, data)

    async def delete(self, keys: Sequence[str]) -> None:
        await self.inner.delete(keys)

    def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        return self.inner.list(prefix)

    async def aclose(self) -> None:
        await self.inner.aclose()

    def _maybe(self, key: str, data: bytes | None) -> bytes | None:
        if not key.endswith(".parquet") or not data:
            return data
        self.reads += 1
        if self.damaged <= 0:
            return data
        self.damaged -= 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("ranged", [False, True], ids=["whole parts", "row groups"])
@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
async def test_damage_on_the_way_is_healed_damage_that_stays_is_told(ranged: bool, damaged: int) -> None:
    blob = DamagingBlob(ap.open_blob("mem://"))
    settings = ap.Settings(row_group_bytes=8_192 if ranged else 8 << 20)
    async with ap.open(blob=blob, consensus=ap.open_consensus("mem://"), settings=settings) as client:
        async with client.writer("shard", SCHEMA) as writer:
            await writer.compare_and_append(ROWS, 0, 1)
        reader = await client.reader("shard")
        blob.damaged = damaged
        async with reader.snapshot(0) as snapshot:
            if damaged < 3:
                assert sum([batch.num_rows async for batch in snapshot.batches()]) == len(ROWS)
            else:
                with pytest.raises(ap.Corruption) as told:
                    assert [batch async for batch in snapshot.batches()]
                assert told.value.shard_id == reader.shard_id
                assert blob.reads == 3
