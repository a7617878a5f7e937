"""Goal: an erasure is done only if no file of a published table may have the rows."""

from datetime import timedelta
from pathlib import Path

import aiopersist as ap
from tests.iceberg.kit import SETTINGS, assert_shows, contents, own_files

AT_ONCE = timedelta(0)


async def filled(client: ap.Client) -> ap.Table[str, int]:
    table = client.table("t", key=str, val=int)
    await table.put_many({"ada": 1, "bob": 2})
    await table.put("ada", 3)
    return table


async def test_publications_hold_an_erasure_back(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = await filled(client)
        await client.publish(table)
        erased = await client.admin.erase(table, ["ada"], wait=AT_ONCE)
        assert not erased.done
        (tag,) = await client.tags(table)
        assert [(holder.kind, holder.id) for holder in erased.holders] == [("tag", tag)]
        files = {r.name.removeprefix("iceberg/") for r in erased.remnants if r.kind == "publication"}
        assert files == {name for name in own_files(tmp_path) if "/v" not in name}
        published = await client.publish(table, keep=1)
        assert (await client.admin.erase(table, ["ada"], wait=AT_ONCE)).done
        assert_shows(published.metadata, await contents(client))


async def test_without_its_tag_a_publication_still_counts(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = await filled(client)
        await client.publish(table)
        (tag,) = await client.tags(table)
        erased = await client.admin.erase(table, ["ada"], end_holds=[tag], wait=AT_ONCE)
        assert not erased.done
        assert {remnant.kind for remnant in erased.remnants} == {"publication"}
        await client.unpublish(table)
        assert (await client.admin.erase(table, ["ada"], wait=AT_ONCE)).done


async def test_a_key_that_never_was(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = await filled(client)
        await client.publish(table)
        erased = await client.admin.erase(table, ["nobody"], wait=AT_ONCE)
        assert erased.done
        assert erased.holders == []
