"""Goal: of several publishers each shows the contents at or after its call, and no version is lost."""

import asyncio
from pathlib import Path
from typing import Any

import aiopersist as ap
from tests.iceberg.kit import SETTINGS, assert_shows, contents, static_table

SCHEMA: Any = ap.Schema(str, int)


async def test_publishers_at_once(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        async with client.writer("t", SCHEMA) as writer:
            for time in range(6):
                await writer.compare_and_append([(f"k{time}", time, time, 1)], time, time + 1)
        others = [await ap.open(tmp_path, settings=SETTINGS, maintenance=False) for _ in range(2)]
        clients = [client, *others]
        times = [0, 1, 2, 3, 4, 5]
        calls = [clients[time % 3].publish("t", as_of=time, keep=10) for time in times]
        all_published = await asyncio.gather(*calls)
        assert sorted(p.version for p in all_published) == [1, 2, 3, 4, 5, 6]
        newest = max(all_published, key=lambda p: p.version)
        ids = [s.snapshot_id for s in static_table(newest.metadata).metadata.snapshots]
        assert ids == [p.snapshot_id for p in sorted(all_published, key=lambda p: p.version)]
        for published in all_published:
            assert_shows(published.metadata, await contents(client, as_of=published.as_of))
        assert (await client.publish("t", as_of=newest.as_of)).version == 6
        assert len(await client.tags("t")) == 6
        for other in others:
            await other.aclose()


async def test_a_newer_publication_is_enough(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        await table.put("a", 1)
        others = [await ap.open(tmp_path, settings=SETTINGS, maintenance=False) for _ in range(3)]
        published = await asyncio.gather(*(other.publish("t") for other in [client, *others]))
        assert len({p.version for p in published}) <= 2
        for each in published:
            assert_shows(each.metadata, await contents(client))
        for other in others:
            await other.aclose()
