"""Goal: a DataFrame of a tag has its contents when the history is gone, and to its end when the tag is."""

from typing import Any

import aiopersist as ap
from aiopersist.spark import connect
from tests.spark.format_kit import contents, fill, reading
from tests.spark.plain_client import at, counted

BLOBS = {"inline_writes_single_max_bytes": 0, "blob_target_size": 100}


def test_contents_of_a_tag(spark: Any, place: str, name: str) -> None:
    async def tag(client: ap.Client) -> None:
        await client.admin.force_compaction(name)  # writes blobs
        assert (await client.tag(name, "monday", 1)).parts > 0

    async def forget(client: ap.Client) -> None:
        async with client.critical_since(name, "c") as held:
            await held.release(held.opaque)
        await client.admin.retain(name, 0)
        await client.admin.force_compaction(name)
        await client.admin.force_gc(name)

    async def untag(client: ap.Client) -> None:
        await client.untag(name, "monday")
        await client.admin.force_gc(name)

    fill(place, name)
    at(place, tag, **BLOBS)
    at(place, forget, **BLOBS)
    with connect(spark, place) as sc:
        assert counted(sc.snapshot_df(name, tag="monday")) == contents(1)
        df = reading(spark, place, tag="monday", where="key = 'a'").load(name)
        by_format = counted(df)
        assert by_format == {row: n for row, n in contents(1).items() if row[0] == "a"}
        assert counted(sc.snapshot_df(name)) == contents(3)
        planned = sc.snapshot_df(name, tag="monday", parallelism=2)
        at(place, untag, **BLOBS)
        assert counted(planned) == contents(1)
        assert counted(df) == by_format
