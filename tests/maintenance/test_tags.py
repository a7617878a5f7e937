"""Goal: a tag keeps exact contents, and nothing else, until it is dropped or expires."""

import asyncio
import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.gc.collect import can_collect
from tests.conftest import StoreUrls
from tests.maintenance.maintenance_kit import state_of
from tests.support.internals import stack_of
from tests.support.schemas import KIND, PRODUCT, SCHEMA
from tests.support.shards import f, open_at, open_mem

BLOBS: dict[str, Any] = {"inline_writes_single_max_bytes": 64, "blob_target_size": 600, "blob_cache_bytes": 0}


async def grow(client: ap.Client, times: int, seed: int = 0) -> None:
    """Append as many batches; small ones are inline. Some rows are retracted again."""
    rng = random.Random(seed)
    async with client.writer("t", SCHEMA) as w:
        for _ in range(times):
            time: Any = w.upper.time
            rows = [
                (f"k{rng.randrange(20)}", rng.randrange(3), time, rng.choice((1, 1, -1))) for _ in range(9)
            ]
            await w.compare_and_append(rows[: rng.choice((1, 9))], time, time + 1)


async def contents(client: ap.Client, tag: str | None = None, as_of: int | None = None) -> list[Any]:
    async with client.reader("t", SCHEMA) as r, r.snapshot(as_of, tag=tag) as s:
        return await s.rows()


async def advance(client: ap.Client) -> None:
    """Give up all history but that of the newest time, compact, and collect."""
    await client.admin.retain("t", 0)
    await client.admin.force_compaction("t")
    await client.admin.force_gc("t")


async def blobs(client: ap.Client) -> set[str]:
    return {key async for key, _ in stack_of(client).blob.list("") if key.endswith((".parquet", ".rollup"))}


async def test_a_tag_outlives_fifty_rounds_of_maintenance(location: StoreUrls) -> None:
    async with open_at(location, **BLOBS) as client, open_at(location, **BLOBS) as other:
        await grow(client, 12)
        old, now = await contents(client, as_of=7), await contents(client)
        view = await client.tag("t", "old", 7)
        assert (view.as_of, view.expires_at) == (7, None) and view.parts > 0
        assert (await client.tag("t", "now")).as_of == 11
        for seed in range(50):
            await grow(other, 1, seed)
            await advance(other)
            if seed % 10 == 0:
                await other.admin.sweep_leaked_blobs(dry_run=False)
                assert (await contents(client, "old"), await contents(other, "now")) == (old, now)
        assert (await contents(client, "old"), await contents(client, "now")) == (old, now)
        assert {*await other.tags("t")} == {"old", "now"}
        with pytest.raises(ap.SinceViolation):
            await contents(client, as_of=7)
        assert (await other.admin.fsck("t")).ok


async def test_dropping_a_tag_frees_what_nobody_else_names(location: StoreUrls) -> None:
    async with open_at(location, **BLOBS) as client:
        await grow(client, 12)
        await client.tag("t", "one", 7)
        await client.tag("t", "two")
        await advance(client)
        await grow(client, 3, seed=2)
        await advance(client)
        kept = await contents(client, "two")
        state = await state_of(client)
        only_one = state.tags["one"].keys - state.tags["two"].keys
        assert only_one <= await blobs(client)
        before = await client.admin.usage()
        assert before.tagged > 0 and before.total == before.live + before.tagged + rollups(state)
        await client.untag("t", "one")
        await advance(client)
        assert await blobs(client) == await named(client) and not await blobs(client) & only_one
        assert await contents(client, "two") == kept
        await client.untag("t", "two")
        await advance(client)
        assert (await client.admin.usage()).tagged == 0
        assert await blobs(client) == await named(client)
        assert not can_collect(await state_of(client)) and not await client.tags("t")


def rollups(state: Any) -> int:
    return sum(rollup.size for rollup in state.rollups.values())


async def named(client: ap.Client) -> set[str]:
    """The blobs that the newest version names, told apart from the library's own list."""
    state = await state_of(client)
    parts = {part.key for batch in state.batches.values() for part in batch.parts if part.key}
    tags = {key for tag in state.tags.values() for key in (tag.rollup.key, *tag.parts)}
    return parts | tags | {rollup.key for rollup in state.rollups.values()}


async def test_an_open_snapshot_outlives_its_tag(location: StoreUrls) -> None:
    async with open_at(location, **BLOBS) as client, open_at(location, **BLOBS) as other:
        await grow(client, 12)
        await client.tag("t", "x", 5)
        expected = await contents(client, as_of=5)
        async with client.reader("t", SCHEMA) as r, r.snapshot(tag="x") as s:
            await other.untag("t", "x")
            await grow(other, 2)
            await advance(other)
            await other.admin.sweep_leaked_blobs(dry_run=False)
            assert await s.rows() == expected
            with pytest.raises(ap.UnknownTag):
                await contents(client, "x")
        await client.admin.force_gc("t")
        await advance(other)
        assert await blobs(other) == await named(other)


async def test_shared_reads_and_readonly_clients_read_tags(location: StoreUrls) -> None:
    async with open_at(location, **BLOBS) as client:
        await grow(client, 12)
        expected = Counter((key, val, diff) for key, val, diff in await contents(client, as_of=5))
        await client.tag("t", "x", 5)
        await grow(client, 2)
        await advance(client)
        async with client.workers.shared_read("t", tag="x") as shared:
            pieces = await shared.pieces(3)
            batches = [b for piece in pieces async for b in client.workers.read_piece(piece)]
        rows = (row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True))
        assert Counter(rows) == expected
        async with ap.open(blob=location.blob, consensus=location.consensus, readonly=True) as reader:
            assert Counter(await contents(reader, "x")) == expected
            assert (await reader.tags("t"))["x"].as_of == 5
            with pytest.raises(ap.UnknownTag):
                await contents(reader, "y")


async def test_a_readonly_snapshot_whose_tag_was_dropped_says_so(location: StoreUrls) -> None:
    async with open_at(location, **BLOBS) as client:
        await grow(client, 12)
        await client.tag("t", "x", 5)
        await grow(client, 2)
        await advance(client)
        options: dict[str, Any] = {"readonly": True, "settings": ap.Settings(blob_cache_bytes=0)}
        async with ap.open(blob=location.blob, consensus=location.consensus, **options) as reader:
            async with reader.reader("t", SCHEMA) as r, r.snapshot(tag="x") as s:
                await client.untag("t", "x")
                await advance(client)
                with pytest.raises(ap.UnknownTag, match="no tag 'x'"):
                    await s.rows()


async def test_tables() -> None:
    async with open_mem(**BLOBS) as client:
        table = client.table("users", str, int)
        with pytest.raises(ap.UnknownShard):
            await client.tag(table, "nothing")
        with pytest.raises(ap.UnknownTag):
            await table.to_arrow(tag="nothing")
        assert not await client.list_shards()
        await table.put_many({f"u{n}": n for n in range(99)})
        await client.tag(table, "monday")
        await table.put_many({f"u{n}": -n for n in range(50)})
        moment = datetime.now(UTC)
        view = await client.tag(table, "noon", moment)
        assert view.as_of == int(moment.timestamp() * 1e6)
        await table.delete(*(f"u{n}" for n in range(99)))
        await client.admin.retain("users", timedelta(0))
        await client.admin.force_compaction("users")
        await client.admin.force_gc("users")
        monday, noon = await table.to_arrow(tag="monday"), await table.to_arrow(tag="noon", columns=["val"])
        assert dict(zip(*monday.to_pydict().values(), strict=True)) == {f"u{n}": n for n in range(99)}
        assert sum(noon.column("val").to_pylist()) == sum(range(50, 99)) - sum(range(50))
        assert (await table.to_arrow("u1", "u2", tag="monday")).num_rows == 11
        assert (await table.to_arrow()).num_rows == 0
        with pytest.raises(ap.InvalidUsage) as error:
            await table.to_arrow(as_of=moment, tag="noon")
        assert error.value.kind == KIND.INVALID_TIME


async def test_what_is_refused() -> None:
    async with open_mem(**BLOBS) as client:
        async with client.writer("t", SCHEMA):
            with pytest.raises(ap.NotReadable):
                await client.tag("t", "x")
        await grow(client, 5)
        await client.tag("t", "x", 2)
        with pytest.raises(ap.TagExists, match="there is a tag 'x'"):
            await client.tag("t", "x", 3)
        with pytest.raises(ap.NotReadable):
            await client.tag("t", "y", 5)
        await advance(client)
        with pytest.raises(ap.SinceViolation):
            await client.tag("t", "y", 2)
        with pytest.raises(ap.UnknownTag):
            await client.untag("t", "y")
        for wrong, options in (
            (KIND.INVALID_NAME, {"name": ""}),
            (KIND.INVALID_TIME, {"expires": timedelta(0)}),
        ):
            with pytest.raises(ap.InvalidUsage) as error:
                await client.tag("t", **{"name": "y", **options})  # type: ignore[arg-type]
            assert error.value.kind == wrong
        async with client.reader("t", SCHEMA) as r:
            with pytest.raises(ap.InvalidUsage):
                await r.snapshot(4, tag="x")
        with pytest.raises(TypeError, match="5 is neither a name nor"):
            await client.tag(5, "y")  # type: ignore[arg-type]
        assert {*await client.tags("t")} == {"x"}
        assert not (await client.admin.sweep_leaked_blobs()).keys


async def test_a_refused_call_writes_nothing() -> None:
    async with open_mem(**BLOBS) as client:
        await grow(client, 5)
        await client.tag("t", "x", 4)
        await advance(client)
        refused = (("x", 4, ap.TagExists), ("y", 2, ap.SinceViolation), ("y", 9, ap.NotReadable))
        async with ap.open(blob=stack_of(client).blob, consensus=stack_of(client).consensus) as other:
            before = (await other.admin.inspect("t")).seqno
            for name, as_of, error in refused:
                with pytest.raises(error):
                    await other.tag("t", name, as_of)
            with pytest.raises(ap.UnknownTag):
                await other.untag("t", "y")
            assert (await other.admin.inspect("t")).seqno == before


async def test_product_times() -> None:
    async with open_mem(**BLOBS) as client:
        async with client.writer("t", PRODUCT) as w:
            await w.compare_and_append([("a", 1, (0, 0), 1), ("b", 2, (1, 3), 1)], f((0, 0)), f((4, 4)))
            with pytest.raises(ap.InvalidUsage):
                await client.tag("t", "x")
            assert (await client.tag("t", "x", (1, 2))).as_of == (1, 2)
        async with client.reader("t", PRODUCT) as r, r.snapshot(tag="x") as s:
            assert (s.as_of, await s.rows()) == ((1, 2), [("a", 1, 1)])


async def test_a_tag_expires_with_the_next_commit() -> None:
    async with open_mem(**BLOBS) as client:
        await grow(client, 5)
        await client.tag("t", "short", 2, expires=timedelta(milliseconds=1))
        await client.tag("t", "long", 2, expires=timedelta(days=1))
        await asyncio.sleep(0.01)
        await client.tag("t", "short", 3)  # the name is free again
        assert (await client.tags("t"))["short"].as_of == 3
        await client.untag("t", "short")
        await client.tag("t", "short", 2, expires=timedelta(milliseconds=1))
        await asyncio.sleep(0.01)
        await client.admin.maintain()  # an idle shard
        assert {*await client.tags("t")} == {"long"}
        await advance(client)
        assert await blobs(client) == await named(client)


async def test_adding_tags_beside_compactions() -> None:
    """Goal: parts that are replaced while the tag is added make it begin again; no blob leaks."""
    async with open_mem(**BLOBS) as client:
        await grow(client, 8)
        expected = await contents(client, as_of=7)

        async def compactions() -> None:
            for seed in range(10):
                await grow(client, 3, seed)
                await client.admin.force_compaction("t")
                await client.admin.force_gc("t")

        going = asyncio.create_task(compactions())
        for number in range(20):
            await client.tag("t", f"tag {number}", 7)
            await asyncio.sleep(0)
        await going
        for number in range(20):
            assert await contents(client, f"tag {number}") == expected
        await client.admin.force_gc("t")
        assert await blobs(client) == await named(client)


async def test_older_releases_refuse_a_shard_with_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_mem(**BLOBS) as client:
        await grow(client, 5)
        await client.tag("t", "x")
        monkeypatch.setattr("aiopersist.state.diff.FORMAT", 4)
        async with ap.open(blob=stack_of(client).blob, consensus=stack_of(client).consensus) as older:
            with pytest.raises(ap.Corruption, match="has format 5, this version reads up to 4"):
                await contents(older)
        monkeypatch.undo()
        await client.untag("t", "x")
        await advance(client)
        monkeypatch.setattr("aiopersist.state.diff.FORMAT", 4)
        async with ap.open(blob=stack_of(client).blob, consensus=stack_of(client).consensus) as older:
            assert await contents(older)
