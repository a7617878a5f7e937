"""Goal: parts of earlier releases, which have neither field ids nor statistics of `diff`, are published by
their names."""

from pathlib import Path
from shutil import copytree

import pytest

import aiopersist as ap
from tests.iceberg.kit import assert_shows, contents

OLD = Path(__file__).parents[1] / "compatibility"
RELEASES = ["0.1.0", "0.1.0-format-1", "0.2.0"]
SHARDS = ["prices", "people", "readings", "lately"]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("shard", SHARDS)
async def test_parts_of_a_release(tmp_path: Path, release: str, shard: str) -> None:
    folder = copytree(OLD / release, tmp_path / "old")
    urls = {"blob": f"file://{folder}/blob", "consensus": f"sqlite://{folder}/state.db"}
    async with ap.open(**urls, maintenance=False) as client:
        if shard not in await client.list_shards():
            pytest.skip(f"{release} has no {shard}")
        published = await client.publish(shard)
        assert_shows(published.metadata, await contents(client, shard))
        await client.admin.force_compaction(shard)
        await client.unpublish(shard)
        assert_shows((await client.publish(shard)).metadata, await contents(client, shard))
