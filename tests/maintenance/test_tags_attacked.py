"""Goal: whoever pauses, races, jumps or is restored, a tag has its contents, or is not there."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.storage.memory import MemoryConsensus
from aiopersist.storage.wrapper import WrappedBlob
from tests.maintenance.maintenance_kit import state_of
from tests.support.processes import Place
from tests.support.schemas import SCHEMA

BLOBS: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 600,
    "watch_timeout_s": 0.02,
}
DAY = timedelta(days=1)


@pytest.fixture
async def place() -> Any:
    async with AsyncExitStack() as stack:
        yield Place(stack, BLOBS)


class Slow(WrappedBlob):
    """Requests of one kind wait until they may go."""

    def __init__(self, inner: Any, op: str, of: Callable[[Any], bool]) -> None:
        super().__init__(inner)
        self.op, self.of = op, of
        self.waits, self.may_go = asyncio.Event(), asyncio.Event()

    async def set(self, key: str, data: bytes | memoryview) -> None:
        await self._slowly("set", key)
        await super().set(key, data)

    async def delete(self, keys: Any) -> None:
        await self._slowly("delete", [*keys])
        await super().delete(keys)

    async def _slowly(self, op: str, what: Any) -> None:
        if op == self.op and self.of(what):
            self.waits.set()
            await self.may_go.wait()


def beside(place: Place, slow: Slow) -> Any:
    """A client of that store."""
    return ap.open(blob=slow, consensus=place.clock, settings=ap.Settings(**BLOBS), maintenance=False)


async def grow(client: ap.Client, times: int = 6, name: str = "t") -> None:
    async with client.writer(name, SCHEMA) as w:
        for _ in range(times):
            time: Any = w.upper.time
            await w.compare_and_append([(f"k{n}", time, time, 1) for n in range(5)], time, time + 1)


async def contents(client: ap.Client, tag: str | None = None) -> list[Any]:
    async with client.reader("t", SCHEMA) as r, r.snapshot(tag=tag) as s:
        return sorted(await s.rows())


async def advance(client: ap.Client) -> None:
    await client.admin.retain("t", 0)
    await client.admin.force_compaction("t")
    await client.admin.force_gc("t")


async def check_no_leak(place: Place, client: ap.Client) -> None:
    """After all leases every blob is named, without a sweep by anybody before."""
    place.clock.ahead_s += 4000.0
    await client.admin.maintain()
    usage = await client.admin.usage()
    assert not (await client.admin.sweep_leaked_blobs()).keys, usage
    assert (await client.admin.fsck("t")).ok


# --- pauses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collects", ["before", "after", "both"])
async def test_parts_that_are_replaced_while_a_tag_is_added(place: Place, collects: str) -> None:
    """Goal: the tag names only parts that are live as it is added, whenever the others are collected."""
    client = await place.client()
    await grow(client)
    expected = await contents(client)
    slow = Slow(place.blob, "set", lambda key: key.endswith(".rollup"))
    async with beside(place, slow) as other:
        tagging = asyncio.create_task(other.tag("t", "x"))
        await slow.waits.wait()
        await client.admin.retain("t", 0)
        await client.admin.force_compaction("t")
        if collects != "after":
            await client.admin.force_gc("t")
        slow.may_go.set()
        view = await tagging
        if collects != "before":
            await client.admin.force_gc("t")
        assert view.seqno >= 8 and view == (await client.tags("t"))["x"]
        await grow(client)
        await advance(client)
        assert await contents(other, "x") == expected
    await check_no_leak(place, client)


async def test_a_collector_that_stood_still_while_a_tag_was_added(place: Place) -> None:
    """Goal: what it had decided to delete was named by no version that the tag could be made of."""
    client = await place.client()
    await grow(client)
    await client.tag("t", "first")
    await client.admin.retain("t", 0)
    await client.admin.force_compaction("t")
    await client.untag("t", "first")
    slow = Slow(place.blob, "delete", lambda keys: any(key.endswith(".parquet") for key in keys))
    async with beside(place, slow) as other:
        collecting = asyncio.create_task(other.admin.force_gc("t"))
        await slow.waits.wait()
        expected = await contents(client)
        await client.tag("t", "second")
        await grow(client)
        await advance(client)
        await client.tag("t", "third")
        slow.may_go.set()
        await collecting
        newest = await contents(client)
        await advance(other)
        assert (await contents(client, "second"), await contents(other, "third")) == (expected, newest)
    await check_no_leak(place, client)


async def test_of_two_that_add_a_name_one_has_it(place: Place) -> None:
    client, other = await place.client(), await place.client()
    await grow(client)
    for number in range(5):
        calls = (each.tag("t", f"x{number}", as_of) for each, as_of in ((client, 3), (other, 4)))
        told = await asyncio.gather(*calls, return_exceptions=True)
        (view,) = [each for each in told if isinstance(each, ap.TagView)]
        assert sum(isinstance(each, ap.TagExists) for each in told) == 1
        assert (await client.tags("t"))[f"x{number}"] == view
    await check_no_leak(place, client)


# --- clocks, restores ---------------------------------------------------------------------------------


async def test_clocks_that_jump(place: Place) -> None:
    """Goal: the store's clock decides, at a commit: forward ends a tag early, back keeps it longer."""
    client, other = await place.client(), await place.client()
    await grow(client)
    await client.tag("t", "day", expires=DAY)
    await client.tag("t", "year", expires=365 * DAY)
    place.clock.ahead_s = -1e6
    await advance(client)
    assert {*await other.tags("t")} == {"day", "year"}
    with pytest.raises(ap.TagExists):
        await other.tag("t", "day")
    place.clock.ahead_s = DAY.total_seconds() + 60
    assert {*await other.tags("t")} == {"day", "year"}  # there was no commit
    again = await other.tag("t", "day")
    await advance(other)
    assert (await client.tags("t"))["day"] == again and again.expires_at is None
    place.clock.ahead_s = 400 * DAY.total_seconds()
    await client.admin.maintain()
    assert {*await other.tags("t")} == {"day"}
    await check_no_leak(place, client)


async def test_a_restored_consensus_store(place: Place) -> None:
    """Goal: a tag that was added since the backup is gone, and its rollup is swept; one that was dropped and
    collected since then is told as damaged, and can be dropped."""
    client = await place.client()
    await grow(client)
    await client.tag("t", "dropped")
    store: Any = place.clock.inner
    assert isinstance(store, MemoryConsensus)
    head = await state_of(client)
    log = store._shared.logs[consensus_key(head.shard)]
    backup = log.first, [*log.data]
    kept = await contents(client)
    await client.untag("t", "dropped")
    await client.tag("t", "added")
    await client.admin.force_gc("t")
    await client.aclose()
    log.first, log.data = backup
    async with beside(place, Slow(place.blob, "", bool)) as fresh:
        assert {*await fresh.tags("t")} == {"dropped"} and await contents(fresh) == kept
        with pytest.raises(ap.MissingPart, match="the blob store does not have it"):
            await contents(fresh, "dropped")
        report = await fresh.admin.fsck("t")
        assert any("tag 'dropped'" in problem for problem in report.problems)
        await fresh.untag("t", "dropped")
        await fresh.tag("t", "again")
        await advance(fresh)
        assert await contents(fresh, "again") == kept
        place.clock.ahead_s = 4000.0
        await fresh.admin.sweep_leaked_blobs(dry_run=False)
        usage = await fresh.admin.usage()
        assert usage.total == usage.referenced and (await fresh.admin.fsck("t")).ok


# --- the ends of shards, copies -----------------------------------------------------------------------


async def test_a_shard_with_tags_is_dropped(place: Place) -> None:
    client, other = await place.client(), await place.client()
    await grow(client)
    await client.tag("t", "x")
    async with other.reader("t", SCHEMA) as r, r.snapshot(tag="x") as snapshot:
        await client.admin.drop("t")
        with pytest.raises((ap.ShardFinalized, ap.LeaseExpired)):
            await snapshot.rows()
    for call in (client.tags("t"), client.tag("t", "y"), client.untag("t", "x"), other.tags("t")):
        with pytest.raises((ap.UnknownShard, ap.ShardFinalized)):
            await call
    await grow(client, 2)
    assert not await client.tags("t")
    new = (await state_of(client)).shard
    assert {key.partition("/")[0] async for key, _ in place.blob.list("")} <= {new, "location"}


async def test_a_shard_that_ends_while_a_tag_is_added(place: Place) -> None:
    client = await place.client()
    await grow(client)
    slow = Slow(place.blob, "set", lambda key: key.endswith(".rollup"))
    async with beside(place, slow) as other:
        tagging = asyncio.create_task(other.tag("t", "x"))
        await slow.waits.wait()
        await client.admin.drop("t")
        slow.may_go.set()
        with pytest.raises(ap.ShardFinalized):
            await tagging


async def test_a_copy_has_no_tags_and_leaves_them_alone(place: Place) -> None:
    client = await place.client()
    await grow(client)
    expected = await contents(client)
    await client.tag("t", "x")
    await advance(client)
    async with ap.open("mem://", maintenance=False) as target:
        await client.admin.copy_shard("t", target, verify=True)
        assert not await target.tags("t")
        await target.tag("t", "in the copy")
        await grow(client)
        await advance(client)
        await client.admin.copy_shard("t", target, verify=True)
        assert await contents(client, "x") == await contents(target, "in the copy") == expected


# --- many, and beside transactions --------------------------------------------------------------------


async def test_transactions_over_tagged_tables(place: Place) -> None:
    """Goal: a commit to several shards drops their expired tags, and keeps the others."""
    client, other = await place.client(), await place.client()
    left, right = (client.table(name, str, int) for name in ("left", "right"))

    async def move(tx: ap.Transaction) -> None:
        for table, sign in ((left, -1), (right, 1)):
            tx.put(table, "a", (await tx.get(table, "a") or 0) + sign)

    for _ in range(5):
        await client.transact(move)
    for table in (left, right):
        await client.tag(table, "kept")
        await client.tag(table, "short", expires=timedelta(seconds=60))
    place.clock.ahead_s = 61.0
    for _ in range(5):
        await client.transact(move)
    for table, sign in ((left, -1), (right, 1)):
        assert {*await other.tags(table)} == {"kept"}
        theirs = other.table(table.name, str, int)
        assert (await theirs.to_arrow(tag="kept")).column("val").to_pylist() == [5 * sign]
        assert await table.get("a") == await theirs.get("a") == 10 * sign
        with pytest.raises(ap.UnknownTag):
            await theirs.to_arrow(tag="short")


async def test_fsck_reads_what_many_tags_share_once(place: Place) -> None:
    """Also small parts, which lie in the rollup of each tag."""
    client = await place.client(inline_writes_single_max_bytes=100)
    await grow(client)
    async with client.writer("t", SCHEMA) as w:
        await w.write([("small", 1)])
    assert (await client.admin.inspect("t")).inline_bytes
    first = await client.admin.fsck("t")
    for number in range(5):
        await client.tag("t", f"x{number}")
    assert first.ok and await client.admin.fsck("t") == first
    await client.admin.force_compaction("t")
    assert (again := await client.admin.fsck("t")).ok and first.parts < again.parts < 2 * first.parts


async def test_a_readonly_client_adds_and_drops_none(place: Place) -> None:
    client = await place.client()
    await grow(client)
    await client.tag("t", "x")
    async with ap.open(blob=place.blob, consensus=place.clock, readonly=True) as reader:
        for call in (reader.tag("t", "y"), reader.untag("t", "x")):
            with pytest.raises(ap.Unsupported, match="readonly"):
                await call
    assert {*await client.tags("t")} == {"x"}
