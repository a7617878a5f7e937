"""Goal: `fsck` tells damage from a store that is away, and finds rows lost on the way to a part."""

from typing import Any

import pytest

import aiopersist as ap
from aiopersist.data.part import part as parts
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.support.schemas import SCHEMA

BLOBS = ap.Settings(inline_writes_single_max_bytes=0, retry_timeout_s=0.01, rollup_every=4)


async def grown(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        for time in range(6):
            rows = [("up", 1, time, 5), ("down", 1, time, -3), (f"k{time}", time, time, 2**62)]
            await w.compare_and_append(rows, time, time + 1)
        await client.admin.force_gc("t")


class Away(FaultyBlob):
    """Raises `error` of the requests that `fails` names."""

    error: ap.Error | None = None
    fails = ""

    async def get(self, key: str) -> bytes | None:
        if self.error is not None and key.endswith(self.fails):
            raise self.error
        return await super().get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        if self.error is not None and self.fails == "a range":
            raise self.error
        return await super().get_range(key, offset, length)


@pytest.mark.parametrize("fails", [".parquet", ".rollup", "a range"])
@pytest.mark.parametrize("error", [ap.StorageUnavailable("away"), ap.Indeterminate("away")], ids=repr)
async def test_a_store_that_is_away_is_no_damage(fails: str, error: ap.Error) -> None:
    """Goal: no report while anything could not be looked at; afterwards the shard is sound."""
    blob = Away(ap.open_blob("mem://"), Faults())
    async with ap.open(
        blob=blob, consensus=ap.open_consensus("mem://"), settings=BLOBS, maintenance=False
    ) as client:
        await grown(client)
        blob.fails, blob.error = fails, error
        with pytest.raises(ap.StorageUnavailable):
            await client.admin.fsck("t")
        blob.error = None
        report = await client.admin.fsck("t")
        assert report.ok and report.updates == 18


@pytest.mark.parametrize("keys", [1, 30])  # sorted as tuples, and by codes
async def test_a_sum_of_several_rows_is_no_damage(keys: int) -> None:
    """Goal: a sum beyond 64 bits, which is stored as several rows, is sound; so is NaN."""
    schema = ap.Schema(key=int, val=float)
    most = 2**63 - 1
    async with ap.open("mem://", settings=BLOBS, maintenance=False) as client:
        async with client.writer("t", schema) as w:
            rows = [(key, float("nan"), 0, diff) for key in range(keys) for diff in (most, most, 7)]
            await w.compare_and_append(rows, 0, 1)
        report = await client.admin.fsck("t")
        assert (report.ok, report.updates) == (True, 3 * keys), report.problems


async def test_sums_of_diffs_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a part whose rows are not those that its writer had is told, though every checksum holds."""
    async with ap.open("mem://", settings=BLOBS, maintenance=False) as client:
        written = parts.writable

        def one_is_doubled(table: Any) -> Any:
            diff = table.schema.get_field_index("diff")
            column = parts.pa.array([2 * table["diff"][0].as_py(), *table["diff"].to_pylist()[1:]])
            return written(table.set_column(diff, table.schema.field("diff"), column))

        async with client.writer("t", SCHEMA) as w:
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            with monkeypatch.context() as patch:
                patch.setattr(parts, "writable", one_is_doubled)
                await w.compare_and_append([("b", 1, 1, 7), ("c", 1, 1, -1)], 1, 2)
            await w.compare_and_append([("d", 1, 2, 1)], 2, 3)
        report = await client.admin.fsck("t")
        (problem,) = report.problems
        assert not report.ok
        assert "sum to 13 modulo 2**64, not to 6" in problem


async def test_a_part_of_an_earlier_version_says_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: it is read, compacted and checked as before."""
    index = parts._index

    def without_sum(*args: Any) -> str:
        told = parts.loads(index(*args))
        del told["diffs"]
        return parts.dumps(told)

    async with ap.open("mem://", settings=BLOBS, maintenance=False) as client:
        with monkeypatch.context() as patch:
            patch.setattr(parts, "_index", without_sum)
            await grown(client)
        assert (await client.admin.fsck("t")).ok
        await client.admin.force_compaction("t")
        assert (await client.admin.fsck("t")).ok


async def test_sums_are_kept_of_every_part() -> None:
    """Goal: of appends, flushes and compactions alike; modulo 2**64, with diffs at its bounds."""
    settings = ap.Settings(inline_writes_single_max_bytes=200, inline_writes_total_max_bytes=600)
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        async with client.writer("t", SCHEMA) as w:
            for time in range(30):
                rows = [(f"k{n}", n, time, (2**63 - 1) if n % 2 else -(2**63)) for n in range(time % 7 + 1)]
                await w.compare_and_append(rows, time, time + 1)
            assert (await client.admin.fsck("t")).ok
            await client.admin.force_compaction("t")
            assert (await client.admin.fsck("t")).ok
        assert [b for b in (await client.admin.inspect("t")).batches if b.blob_bytes]
