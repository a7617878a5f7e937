"""Goal: the last versions stay readable while the shard is compacted and collected; then their files and
blobs go, and nothing else does."""

import asyncio
from pathlib import Path
from typing import Any

import aiopersist as ap
from tests.iceberg.kit import SETTINGS, Rows, assert_shows, by_pyiceberg, contents, own_files, path_of
from tests.support.shards import named_parts

SCHEMA: Any = ap.Schema(str, int)


async def parts(folder: Path) -> set[str]:
    """The blobs of parts in the store, without those of publications."""
    root = folder / "blob"
    keys = {str(path.relative_to(root)) for path in root.rglob("*.parquet")}
    return {key for key in keys if not key.startswith("iceberg/")}


async def replace_all(client: ap.Client, time: int) -> None:
    """All rows of the time before go, new ones come."""
    gone = [(f"k{i}", time - 1, time, -1) for i in range(20)] if time else []
    async with client.writer("t", SCHEMA) as writer:
        await writer.compare_and_append(
            [*gone, *((f"k{i}", time, time, 1) for i in range(20))], time, time + 1
        )


async def compact_and_collect(client: ap.Client) -> None:
    await client.admin.retain("t", 1)
    await client.admin.force_compaction("t")
    await client.admin.force_gc("t")
    await client.admin.sweep_leaked_blobs(dry_run=False)


async def test_old_versions_stay_readable(tmp_path: Path) -> None:
    async with (
        ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client,
        ap.open(tmp_path, settings=SETTINGS, maintenance=False) as other,
    ):
        versions: list[tuple[ap.Published, Rows]] = []
        for time in range(6):
            await replace_all(client, time)
            versions.append((await client.publish("t"), await contents(client)))
            await compact_and_collect(other)
            for published, expected in versions[-3:]:
                assert_shows(published.metadata, expected)
            assert (await other.admin.fsck("t")).ok
        for published, _ in versions[:-3]:
            assert not path_of(published.metadata).exists()


async def test_a_reader_walks_while_all_is_replaced(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await replace_all(client, 0)
        published, expected = await client.publish("t"), await contents(client)
        over = asyncio.Event()

        def walk() -> int:
            walks = 0
            while not over.is_set() or not walks:
                assert by_pyiceberg(published.metadata) == expected
                walks += 1
            return walks

        walking = asyncio.create_task(asyncio.to_thread(walk))
        for time in range(1, 12):
            await replace_all(client, time)
            await compact_and_collect(client)
        over.set()
        assert await walking


async def test_expiry_frees(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        for time in range(5):
            await replace_all(client, time)
            await client.publish("t", keep=2)
        assert len(await client.tags("t")) == 2
        await compact_and_collect(client)
        assert len(await parts(tmp_path)) > len(await named_parts(client))
        assert await client.unpublish("t") > 0
        assert own_files(tmp_path) == {}
        assert await client.tags("t") == {}
        await compact_and_collect(client)
        assert await parts(tmp_path) == set(await named_parts(client))
        assert await client.unpublish("t") == 0


async def test_engines_may_litter(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await replace_all(client, 0)
        first = await client.publish("t", keep=1)
        folder = path_of(first.location)
        litter = [folder / "data/part-0.parquet", folder / "metadata/x.avro", folder / "metadata/.v1.crc"]
        for path in litter:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"litter")
        (folder / "metadata/v2.metadata.json").write_bytes(b"{}")  # a version of somebody else
        await replace_all(client, 1)
        second = await client.publish("t", keep=1)
        assert second.version == 3
        assert_shows(second.metadata, await contents(client))
        assert all(path.exists() for path in litter)
        assert (await client.admin.sweep_leaked_blobs()).keys == ()
        assert (await client.admin.fsck("t")).ok
        await client.unpublish("t")
        assert own_files(tmp_path) == {}


async def test_a_dropped_shard_is_unpublished(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await replace_all(client, 0)
        await client.publish("t")
        await client.admin.drop("t")
        assert await client.unpublish("t") > 0
        assert own_files(tmp_path) == {}
