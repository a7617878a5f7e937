"""Goal: `erase` is done only if no tag has any of the rows, and drops only tags that it is told to."""

import asyncio
from datetime import timedelta
from typing import Any

import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.storage.wrapper import WrappedBlob
from tests.erase.kit import NOW, SECRET, places, with_history
from tests.support.internals import shards_of, stack_of
from tests.support.processes import Place

IN_BLOBS: dict[str, Any] = {"inline_writes_single_max_bytes": 0}
FORMS = [pytest.param({}, id="inline"), pytest.param(IN_BLOBS, id="blobs")]


async def by_key(people: ap.Table[str, bytes], tag: str) -> dict[str, bytes]:
    contents = await people.to_arrow(tag=tag)
    return dict(zip(*contents.to_pydict().values(), strict=True))


@pytest.mark.parametrize("settings", FORMS)
async def test_tags_keep_rows_until_they_are_dropped(place: Place, settings: dict[str, Any]) -> None:
    client = await place.client(**settings)
    people = await with_history(client)
    await client.tag(people, "has it")
    await people.delete("ada")
    await client.admin.erase(people, ["nobody"], wait=NOW)
    dry = await client.admin.erase(people, ["ada"], dry_run=True)
    assert not dry.done and [(h.kind, h.id) for h in dry.holders] == [("tag", "has it")]
    erased = await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["another"])
    assert not erased.done and [(h.kind, h.id) for h in erased.holders] == [("tag", "has it")]
    assert {remnant.kind for remnant in erased.remnants} == {"part" if settings else "rollup"}
    assert (await by_key(people, "has it"))["ada"] == SECRET and await places(client)
    await client.tag(people, "without it")
    await client.untag(people, "has it")
    erased = await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["without it"])
    assert erased.done and not erased.ended and await places(client) == []
    assert (await by_key(people, "without it")).keys() == {"bob", *(f"other {n}" for n in range(20))}


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize("name", ["old", "tag:old"])
async def test_tags_are_dropped_if_they_are_named(place: Place, settings: dict[str, Any], name: str) -> None:
    client = await place.client(**settings)
    people = await with_history(client)
    old = await client.tag(people, "old", expires=timedelta(days=9))
    await client.tag(people, "new")
    erased = await client.admin.erase(people, where=pc.field("val") == SECRET, wait=NOW, end_holds=[name])
    assert not erased.done and [h.id for h in erased.holders] == ["new"]
    (ended,) = erased.ended
    assert (ended.kind, ended.id, ended.since, ended.until) == (
        "tag",
        "old",
        ap.Antichain(old.as_of),
        old.expires_at,
    )
    assert {*await client.tags(people)} == {"new"}
    erased = await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["new"])
    assert erased.done and not await client.tags(people) and await places(client) == []


async def test_rows_after_the_time_of_a_tag_lie_in_its_blobs(place: Place) -> None:
    client = await place.client(**IN_BLOBS)
    people = await with_history(client)
    before = (await client.upper("people")).time
    assert isinstance(before, int)
    await people.put("cid", SECRET)
    await client.admin.force_compaction("people")  # both are in one blob
    await client.tag(people, "before cid", before - 1)
    erased = await client.admin.erase(people, ["cid"], wait=NOW)
    assert not erased.done and [h.id for h in erased.holders] == ["before cid"]
    assert "cid" not in await by_key(people, "before cid")


async def test_it_waits_for_a_tag_that_expires(place: Place) -> None:
    client, other = await place.client(**IN_BLOBS), await place.client()
    people = await with_history(client)
    await client.tag(people, "short", expires=timedelta(hours=1))
    await client.tag(people, "dropped")
    erasing = asyncio.create_task(client.admin.erase(people, ["ada"], wait=timedelta(seconds=50)))
    while (await client.admin.inspect("people")).since.time == 0 or await people.get("ada"):
        await asyncio.sleep(0.001)
    await other.untag("people", "dropped")
    place.clock.ahead_s = 3601.0
    assert (await erasing).done and await places(client) == []


class Slow(WrappedBlob):
    """Rollups wait to be written."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.waits, self.may_go = asyncio.Event(), asyncio.Event()

    async def set(self, key: str, data: bytes | memoryview) -> None:
        if key.endswith(".rollup"):
            self.waits.set()
            await self.may_go.wait()
        await super().set(key, data)


async def test_a_tag_that_was_begun_before_does_not_bring_rows_back(place: Place) -> None:
    """Goal: small rows lie in the rollup of a tag. One of a version that is collected is not added."""
    client = await place.client()
    people = await with_history(client)
    slow = Slow(place.blob)
    consensus = stack_of(client).consensus
    async with ap.open(blob=slow, consensus=consensus, maintenance=False) as other:
        tagging = asyncio.create_task(other.tag("people", "late"))
        await slow.waits.wait()
        erased = await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["late"])
        assert erased.done
        slow.may_go.set()
        with pytest.raises(ap.SinceViolation):
            await tagging
    assert await places(client) == [] and not await client.tags(people)


async def test_a_tag_whose_blobs_are_missing(place: Place) -> None:
    """Goal: what cannot be read is not called erased."""
    client = await place.client()
    people = await with_history(client)
    await client.tag(people, "x")
    await client.admin.erase(people, ["nobody"], wait=NOW)
    await people.delete("ada")
    tag = (await shards_of(client).existing("people")).state.tags["x"]
    await place.blob.delete([tag.rollup.key])
    erased = await client.admin.erase(people, ["ada"], wait=NOW)
    assert not erased.done and [h.id for h in erased.holders] == ["x"]
    assert [(r.kind, tag.rollup.key in r.name) for r in erased.remnants] == [("unread", True)]
    assert (await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["x"])).done
