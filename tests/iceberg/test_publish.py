"""Goal: a publication shows exactly the contents at its time; its data files are parts of the shard; the last
versions stay readable; what cannot be shown is refused before anything is written."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.iceberg.surplus import Surplus
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome
from tests.iceberg.kit import (
    SETTINGS,
    assert_shows,
    by_pyiceberg,
    contents,
    counted,
    files_of,
    own_files,
    part_key,
    path_of,
    static_table,
)
from tests.support.shards import named_parts

SCHEMA: Any = ap.Schema(str, int)


class Stock(BaseModel):
    amount: int
    note: str | None = None


async def filled(client: ap.Client, *appends: list[tuple[str, int, int]], name: str = "t") -> None:
    """A shard with an append of `(key, val, diff)` at each time from 0 on."""
    async with client.writer(name, SCHEMA) as writer:
        for time, rows in enumerate(appends):
            await writer.compare_and_append([(k, v, time, n) for k, v, n in rows], time, time + 1)


async def test_a_table_is_read_by_others(tmp_path: Path) -> None:
    async with ap.open(tmp_path) as client:
        table = client.table("stock", key=str, val=Stock)
        await table.put_many({f"k{i:03d}": Stock(amount=i) for i in range(300)})
        await table.put("k000", Stock(amount=7, note="new"))
        await table.delete("k001")
        published = await client.publish(table)
        assert published.shard == "stock"
        assert published.rows == 299
        assert published.location == f"file://{tmp_path}/blob/iceberg/stock"
        assert published.metadata == f"{published.location}/metadata/v1.metadata.json"
        assert_shows(published.metadata, await contents(client, "stock"))
    schema = static_table(published.metadata).schema()
    required = {name: schema.find_field(name).required for name in ("key", "val.amount", "val.note")}
    assert required == {"key": True, "val.amount": True, "val.note": False}
    by_hint = static_table(published.location).scan(row_filter="key == 'k000'").to_arrow().to_pylist()
    assert by_hint == [{"key": "k000", "val": {"amount": 7, "note": "new"}}]


async def test_parts_are_the_data_files(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1), ("b", 2, 1)], [("c", 3, 1)], [("a", 1, -1)])
        published = await client.publish("t")
        data = {part_key(uri) for uri in files_of(published.metadata, 0)}
        assert data <= set(await named_parts(client))
        assert len(data) == published.data_files == 2  # a part of retractions shows nothing
        assert len(files_of(published.metadata, 1)) == 1  # of the part with the retracted row
        assert_shows(published.metadata, counted([("b", 2, 1), ("c", 3, 1)]))


async def test_clean_parts_are_not_read(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [(f"k{i}", i, 1) for i in range(50)], [("l", 1, 1)])
        published = await client.publish("t")
        assert client.metrics["blob.get"].count == 1  # the rollup of the tag
        assert client.metrics["blob.get_range"].count == 0
        assert published.data_files == 2
        assert files_of(published.metadata, 1) == []


async def test_clean_parts_without_statistics_are_not_read(tmp_path: Path) -> None:
    limits = SETTINGS.model_copy(update={"stats_collection_enabled": False})
    async with ap.open(tmp_path, settings=limits, maintenance=False) as client:
        await filled(client, [("a", 1, 1)], [("b", 1, 1)], [("c", 1, 2)], [("d", 1, 1)])
        published = await client.publish("t", as_of=2)
        assert client.metrics["blob.get"].count == 2  # the rollup of the tag, and the part with two copies
        assert client.metrics["blob.get_range"].count == 3  # footers
        assert_shows(published.metadata, await contents(client, as_of=2))
    async with ap.open(tmp_path, settings=limits, maintenance=False) as client:
        assert_shows((await client.publish("t")).metadata, await contents(client))


async def test_a_time_of_the_past(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)], [("b", 1, 1), ("a", 1, -1)], [("c", 1, 1)])
        for time, expected in enumerate([["a"], ["b"], ["b", "c"]]):
            published = await client.publish("t", as_of=time)
            assert published.as_of == time
            assert_shows(published.metadata, counted([(key, 1, 1) for key in expected]))
        with pytest.raises(ap.SinceViolation):
            await client.admin.retain("t", 1)
            await client.admin.force_compaction("t")
            await client.publish("t", as_of=0)


async def test_multiplicities(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(
            client, [("a", 1, 3), ("b", 1, 1)], [("a", 1, 1), ("b", 1, 1)], [("a", 1, -2), ("b", 1, -2)]
        )
        for time, rows in enumerate([[("a", 1, 3), ("b", 1, 1)], [("a", 1, 4), ("b", 1, 2)], [("a", 1, 2)]]):
            published = await client.publish("t", as_of=time)
            assert_shows(published.metadata, counted(rows))


async def test_a_negative_multiplicity_is_refused(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)], [("a", 1, -1), ("gone", 4, -1)], [("gone", 4, 1)])
        with pytest.raises(ap.NegativeMultiplicity, match="key 'gone', val 4") as caught:
            await client.publish("t", as_of=1)
        assert (caught.value.key, caught.value.val) == ("gone", 4)
        assert own_files(tmp_path) == {}
        assert_shows((await client.publish("t")).metadata, counted([]))


async def test_too_many_copies_are_refused(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 2**62)])
        with pytest.raises(ap.Unsupported, match="10,000,000 copies"):
            await client.publish("t")
        assert own_files(tmp_path) == {}


async def test_nothing_new_writes_nothing(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)])
        first = await client.publish("t")
        assert first.bytes_written == sum(own_files(tmp_path).values()) - 1  # but for the hint
        files = own_files(tmp_path)
        again = await client.publish("t")
        assert again == first._replace(bytes_written=0)
        assert own_files(tmp_path) == files


async def test_a_schema_that_evolved(tmp_path: Path) -> None:
    class Wider(BaseModel):
        amount: int
        note: str | None = None
        origin: str | None = None

    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await client.table("stock", key=str, val=Stock).put("a", Stock(amount=1, note="x"))
        first = await client.publish("stock")
        number, _ = await client.schema("stock")
        await client.compare_and_evolve_schema("stock", number, ap.Schema(str, Wider))
        second = await client.publish("stock")
        assert second.version == first.version + 1  # its rows are the same, its schema is not
        await client.table("stock", key=str, val=Wider).put("b", Wider(amount=2, origin="here"))
        third = await client.publish("stock")
        assert_shows(third.metadata, await contents(client, "stock"))
        old = {"amount": 1, "note": "x"}
        assert by_pyiceberg(first.metadata) == counted([("a", old, 1)])
        assert by_pyiceberg(second.metadata) == counted([("a", {**old, "origin": None}, 1)])
        assert by_pyiceberg(third.metadata, snapshot_id=first.snapshot_id) == counted([("a", old, 1)])


async def test_a_published_name_of_another_shard(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)])
        first = await client.publish("t", keep=1)
        await client.admin.drop("t")
        await filled(client, [("b", 2, 1)])
        second = await client.publish("t", keep=1)
        tables = [static_table(p.metadata) for p in (second,)]
        assert second.version == first.version + 1
        assert not path_of(first.metadata).exists()
        assert len(tables[0].metadata.snapshots) == 1
        assert_shows(second.metadata, counted([("b", 2, 1)]))


@pytest.mark.parametrize("name", ["orders/eu 1", "..", "ä", "a#b?c%20", "x" * 200])
async def test_any_name_can_be_published(tmp_path: Path, name: str) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)], name=name)
        published = await client.publish(name)
        assert_shows(published.metadata, counted([("a", 1, 1)]))
        assert await client.unpublish(name) == 4


async def test_refusals_write_nothing(tmp_path: Path) -> None:
    async with ap.open(tmp_path, maintenance=False) as client:
        with pytest.raises(ap.UnknownShard):
            await client.publish("t")
        await client.table("t", key=str, val=timedelta).put("a", timedelta(1))
        with pytest.raises(ap.Unsupported, match=r"^shard 't': val is duration\[us\]"):
            await client.publish("t")
        for keep in (0, True, 1.5):
            with pytest.raises(ap.InvalidUsage, match="keep="):
                await client.publish("t", keep=keep)
    async with ap.open(tmp_path, readonly=True) as client:
        with pytest.raises(ap.Unsupported, match="readonly"):
            await client.publish("t")
        with pytest.raises(ap.Unsupported, match="readonly"):
            await client.unpublish("t")
    assert own_files(tmp_path) == {}


async def test_a_location_in_memory_is_refused() -> None:
    async with ap.open("mem://") as client:
        await filled(client, [("a", 1, 1)])
        with pytest.raises(ap.Unsupported, match="no place that other programs can read"):
            await client.publish("t")


async def test_a_path_that_engines_read_as_a_url_is_refused(tmp_path: Path) -> None:
    async with ap.open(tmp_path / "a#b") as client:
        await filled(client, [("a", 1, 1)])
        with pytest.raises(ap.Unsupported, match="#"):
            await client.publish("t")


async def test_product_times(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        schema: Any = ap.Schema(str, int, time=2)
        async with client.writer("t", schema) as writer:
            rows = [("a", 1, (0, 0), 1), ("b", 2, (0, 3), 1), ("c", 3, (3, 0), 1), ("a", 1, (2, 2), -1)]
            await writer.compare_and_append(rows, ap.Antichain((0, 0)), ap.Antichain((5, 0), (0, 5)))
        for as_of in [(0, 0), (2, 2), (0, 3), (4, 4), (3, 1)]:
            published = await client.publish("t", as_of=as_of)
            assert published.as_of == as_of
            assert_shows(published.metadata, await contents(client, as_of=as_of))


async def test_pruning_by_bounds(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, *[[(f"k{i:02d}", i, 1)] for i in range(10)])
        published = await client.publish("t")
        frame = pl.scan_iceberg(published.metadata, reader_override="native").filter(pl.col("val") == 3)
        assert frame.collect().to_dicts() == [{"key": "k03", "val": 3}]
        scan = static_table(published.metadata).scan
        assert len(list(scan(row_filter="val == 3").plan_files())) == 1
        assert len(list(scan(row_filter="key >= 'k08'").plan_files())) == 2


async def test_a_folder_that_was_moved(tmp_path: Path) -> None:
    async with ap.open(tmp_path / "old", settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)])
        await client.publish("t", keep=1)
    (tmp_path / "old").rename(tmp_path / "new")
    async with ap.open(tmp_path / "new", settings=SETTINGS, maintenance=False) as client:
        published = await client.publish("t", keep=1)
        assert published.bytes_written
        assert published.metadata.startswith(f"file://{tmp_path}/new/")
        assert len(static_table(published.metadata).metadata.snapshots) == 1
        assert_shows(published.metadata, counted([("a", 1, 1)]))
        assert len(await client.tags("t")) == 1


async def test_by_name_and_by_id(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("a", 1, 1)])
        by_name, by_id = await client.publish("t"), await client.publish(await client.shard_id("t"))
        await client.unpublish(await client.shard_id("t"))
        assert not path_of(by_id.metadata).exists()
        await filled(client, [("b", 1, 1)], name="other")
        for _ in range(2):
            await client.admin.force_compaction("t")
            await client.admin.force_gc("t")
        assert_shows(by_name.metadata, counted([("a", 1, 1)]))
        assert len(await client.tags("t")) == 1


async def test_a_failed_publication_leaves_nothing(tmp_path: Path) -> None:
    faults, inner = Faults(), ap.open_blob(f"file://{tmp_path}/blob")
    limits = SETTINGS.model_copy(update={"retry_timeout_s": 0.0})
    stores: dict[str, Any] = {"blob": FaultyBlob(inner, faults), "consensus": f"sqlite://{tmp_path}/state.db"}
    async with ap.open(**stores, settings=limits, maintenance=False) as client:
        await filled(client, [("a", 1, 2)], [("a", 1, -1), ("b", 1, 1)])
        for done in range(4):  # the rollup of the tag, the rows of no part, a manifest, the list
            faults.fail_next("set", Outcome.DONE, times=done)
            faults.fail_next("set", Outcome.REFUSED)
            with pytest.raises(ap.StorageUnavailable):
                await client.publish("t", as_of=0)
            faults.heal()
            assert own_files(tmp_path) == {}
            assert await client.tags("t") == {}
        published = await client.publish("t")
        assert_shows(published.metadata, counted([("a", 1, 1), ("b", 1, 1)]))
    await inner.aclose()


async def test_rewritten_parts(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        async with client.writer("t", SCHEMA) as writer:
            batch = await writer.batch([("a", 1, 0, 1), ("b", 1, 1, 1)], 0, 2)
            batch.rewrite_ts(3, 4)
            await writer.compare_and_append_batch([batch], 0, 4)
        for as_of, rows in [(0, []), (2, []), (3, [("a", 1, 1), ("b", 1, 1)])]:
            published = await client.publish("t", as_of=as_of)
            assert_shows(published.metadata, counted(rows))


async def test_truncated_parts(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await filled(client, [("x", 1, 1)], [])
        async with client.writer("t", SCHEMA) as writer:
            batch = await writer.batch([(f"k{time}", 1, time, 1) for time in range(6)], 0, 6)
            await writer.compare_and_append_batch([batch], 2, 4)
        for as_of, keys in [(1, ["x"]), (2, ["x", "k2"]), (3, ["x", "k2", "k3"])]:
            published = await client.publish("t", as_of=as_of)
            assert_shows(published.metadata, counted([(key, 1, 1) for key in keys]))


async def test_many_differences_are_divided_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment memory has more sums of differences than its share."""
    sizes: list[int] = []
    of = Surplus.of

    def measured(sums: Any) -> Surplus | None:
        sizes.append(sums.nbytes)
        return of(sums)

    monkeypatch.setattr(Surplus, "of", measured)
    memory = 16 * 8192
    limits = SETTINGS.model_copy(update={"compaction_memory_bytes": memory, "row_group_bytes": 2048})
    async with ap.open(tmp_path, settings=limits, maintenance=False) as client:
        numbers = range(2000)
        await filled(client, [(f"k{i}", i, 1) for i in numbers], [(f"k{i}", i, -1) for i in numbers if i % 3])
        published = await client.publish("t")
        assert published.rows == 667
        assert_shows(published.metadata, await contents(client))
    assert len(sizes) > 4
    assert max(sizes) <= memory // 16
