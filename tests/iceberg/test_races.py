"""Goal: of several publishers each shows the contents at or after its call, and no version is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.wrapper import WrappedBlob, WrappedConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome
from tests.iceberg.kit import SETTINGS, assert_shows, by_pyiceberg, contents, own_files, static_table

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


class Interrupting(WrappedBlob):
    """Does something else at the next commit of a publication."""

    def __init__(self, inner: Blob) -> None:
        super().__init__(inner)
        self.work: Callable[[], Awaitable[object]] | None = None

    async def create(self, key: str, data: bytes) -> bool:
        work, self.work = self.work, None
        if work is not None:
            await work()
        return await super().create(key, data)


@pytest.mark.parametrize("before", [0, 2], ids=["first", "third"])
async def test_an_unpublish_before_the_commit(tmp_path: Path, before: int) -> None:
    """Either ends the publication, or does not touch it: no version lacks files."""
    blob = Interrupting(ap.open_blob(f"file://{tmp_path}/blob"))
    consensus = f"sqlite://{tmp_path}/state.db"
    async with (
        ap.open(blob=blob, consensus=consensus, settings=SETTINGS, maintenance=False) as client,
        ap.open(tmp_path, settings=SETTINGS, maintenance=False) as other,
    ):
        table = client.table("t", key=str, val=int)
        for number in range(before):
            await table.put("a", number)
            await client.publish(table)
        await table.put("b", 1)
        blob.work = lambda: other.unpublish("t")
        with pytest.raises(ap.Conflict, match="publication"):
            await client.publish(table)
        assert own_files(tmp_path) == {}
        assert await client.tags("t") == {}
        assert_shows((await client.publish(table)).metadata, await contents(client))
    await blob.aclose()


class Following(WrappedConsensus):
    """Does something else after each commit."""

    def __init__(self, inner: Consensus) -> None:
        super().__init__(inner)
        self.work: Callable[[], Awaitable[object]] | None = None

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        won = await super().compare_and_set(key, expected, data)
        if self.work is not None:
            await self.work()
        return won


async def test_an_unpublish_before_the_first_file(tmp_path: Path) -> None:
    """It drops the pin."""
    consensus = Following(ap.open_consensus(f"sqlite://{tmp_path}/state.db"))
    blob = f"file://{tmp_path}/blob"
    async with (
        ap.open(blob=blob, consensus=consensus, settings=SETTINGS, maintenance=False) as client,
        ap.open(tmp_path, settings=SETTINGS, maintenance=False) as other,
    ):
        table = client.table("t", key=str, val=int)
        await table.put("a", 1)

        async def unpinned() -> None:
            if await other.tags("t"):
                consensus.work = None
                await other.unpublish("t")

        consensus.work = unpinned
        with pytest.raises(ap.Conflict, match="publication"):
            await client.publish(table)
        assert own_files(tmp_path) == {}
        assert await client.tags("t") == {}
    await consensus.aclose()


async def test_an_unpublish_and_a_publication_before_the_commit(tmp_path: Path) -> None:
    """The version without files goes, and the hint names that of the other."""
    blob = Interrupting(ap.open_blob(f"file://{tmp_path}/blob"))
    consensus = f"sqlite://{tmp_path}/state.db"
    async with (
        ap.open(blob=blob, consensus=consensus, settings=SETTINGS, maintenance=False) as client,
        ap.open(tmp_path, settings=SETTINGS, maintenance=False) as other,
    ):
        table = client.table("t", key=str, val=int)
        for number in range(2):
            await table.put("a", number)
            published = await client.publish(table)
        await table.put("b", 1)

        async def begun_anew() -> None:
            await other.unpublish("t")
            assert (await other.publish("t")).version == 1

        blob.work = begun_anew
        with pytest.raises(ap.Conflict, match="publication"):
            await client.publish(table)
        assert by_pyiceberg(published.location) == await contents(client)
    await blob.aclose()


async def test_a_tag_that_somebody_dropped(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        for number in range(3):
            await table.put("a", number)
            await client.publish(table)
        oldest, middle, newest = sorted(await client.tags("t"))
        await client.untag("t", middle)
        await table.put("a", 3)
        fourth = await client.publish(table, keep=4)
        listed = [str(s.snapshot_id) for s in static_table(fourth.metadata).metadata.snapshots]
        assert listed == [name.rpartition("-")[2] for name in (oldest, newest)] + [str(fourth.snapshot_id)]
        await client.untag("t", max(await client.tags("t")))
        fifth = await client.publish(table)  # its data may be gone
        assert fifth.version == fourth.version + 1
        assert_shows(fifth.metadata, await contents(client))


@pytest.mark.slow
async def test_publications_beside_writers_and_maintenance(tmp_path: Path) -> None:
    limits = SETTINGS.model_copy(update={"compaction_inputs_min": 2})
    async with ap.open(tmp_path, settings=limits) as client, ap.open(tmp_path) as other:
        tables = [each.table("t", key=int, val=str) for each in (client, other)]
        await tables[0].put_many(dict.fromkeys(range(200), "first"))
        await client.admin.retain("t", timedelta(minutes=5))

        async def write(table: ap.Table[int, str], number: int) -> None:
            for step in range(60):
                keys = range(step % 7 + number, 200, 11)
                await table.put_many(dict.fromkeys(keys, f"{number}/{step}"))
                await table.delete(*range(step + number, 200, 29))

        writing = asyncio.gather(*(write(table, number) for number, table in enumerate(tables)))
        seen = list[ap.Published]()
        while not writing.done() or len(seen) < 5:
            seen.append(await client.publish("t", keep=100))
            if len(seen) % 3 == 0:
                await client.admin.force_compaction("t")
                await client.admin.force_gc("t")
        await writing
        for published in {p.version: p for p in seen}.values():
            expected = await contents(client, as_of=published.as_of)
            await asyncio.to_thread(assert_shows, published.metadata, expected)
        assert (await client.publish("t", keep=1)).rows == (await contents(client)).total()
        assert len(await client.tags("t")) == 1


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.REFUSED, Outcome.LATE])
async def test_an_answer_to_the_commit_is_lost(tmp_path: Path, outcome: Outcome) -> None:
    faults, inner = Faults(), ap.open_blob(f"file://{tmp_path}/blob")
    stores: dict[str, Any] = {"blob": FaultyBlob(inner, faults), "consensus": f"sqlite://{tmp_path}/state.db"}
    async with ap.open(**stores, settings=SETTINGS, maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        for version in (1, 2):
            await table.put("a", version)
            faults.fail_next("create", outcome)
            published = await client.publish(table)
            await faults.land()
            assert published.version == version
            assert_shows(published.metadata, await contents(client))
        assert len(await client.tags("t")) == 2
    await inner.aclose()
