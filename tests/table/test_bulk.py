"""Goal: a put of any number of entries is one commit, in bounded memory, beside everything else."""

import asyncio
import gc
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.conftest import StoreUrls
from tests.support.processes import Place, place_in_memory
from tests.table.kit import Gate, entries, in_time, small_writes, updates_of, versions
from tests.table.test_types import KEYS, same
from tests.table.versions import Versions

LIMITS = {
    "table_resident_bytes": 20_000,
    "row_group_bytes": 4000,
    "blob_target_size": 30_000,
    "inline_writes_single_max_bytes": 0,
}


def stream(count: int, val: str, step: int = 1) -> Iterator[tuple[str, str]]:
    """In an order that is not that of the keys."""
    order = list(range(0, count, step))
    random.Random(count).shuffle(order)
    return ((f"k{n:05}", f"{val}{n}") for n in order)


async def test_a_large_put_is_one_commit(location: StoreUrls) -> None:
    """New keys, changed ones, unchanged ones, and keys that come several times: the last val counts."""
    settings = ap.Settings(**LIMITS)
    async with ap.open(
        blob=location.blob, consensus=location.consensus, settings=settings, maintenance=False
    ) as client:
        table = client.table("t", str, str)
        first = await table.put_many(stream(3000, "a"))
        assert dict(await entries(table)) == dict(stream(3000, "a"))
        assert await versions(client, "t") > 0
        before = await versions(client, "t")
        second = await table.put_many(
            [*stream(4000, "wrong", 2), *stream(4000, "b", 2), *stream(3000, "a", 3)] * 3
        )
        expected = {**dict(stream(3000, "a")), **dict(stream(4000, "b", 2)), **dict(stream(3000, "a", 3))}
        assert dict(await entries(table)) == expected
        assert second > first
        assert dict([e async for e in table.items(as_of=first)]) == dict(stream(3000, "a"))
        assert await table.get("k00002", stale=True) == "b2"
        at = await client.upper("t")
        assert await table.put_many(stream(3000, "a", 3)) >= second, "nothing changes"
        assert await client.upper("t") == at
        assert await versions(client, "t") < before + 12, "some are of leases"
        async with client.reader("t", table.schema) as reader, reader.snapshot() as snapshot:
            assert all(diff == 1 for _, _, diff in await snapshot.rows())
        report = await client.admin.fsck("t")
        assert report.ok, report.problems


@pytest.mark.parametrize("name", KEYS)
async def test_keys_of_each_type(name: str) -> None:
    type_, keys = KEYS[name]
    settings = ap.Settings(table_resident_bytes=0, row_group_bytes=1, inline_writes_single_max_bytes=0)
    async with ap.open(f"mem://{uuid.uuid4().hex}", settings=settings, maintenance=False) as client:
        table = client.table("t", type_, int)
        await table.put_many((key, -1) for key in keys[1:])
        await table.put_many((key, number) for number, key in [*enumerate(keys[::-1]), *enumerate(keys)])
        assert same(await entries(table), list(zip(keys, range(len(keys)), strict=True)))
        assert (await client.admin.fsck("t")).ok


async def test_other_writers_meanwhile(place: Place) -> None:
    """Both clients put and delete all the time. The large put comes through, and no key has two vals."""
    client, other = await place.client(**LIMITS), await place.client()
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    await table.put_many(stream(2000, "a"))
    writers = (table, "x", 0.001), (theirs, "y", 0.03), (table, "z", 0.001)
    async with small_writes(*writers):
        times = [await in_time(table.put_many(stream(2200, f"bulk{n}:"))) for n in range(2)]
    for n, time in enumerate(times):
        at = dict([entry async for entry in theirs.items(as_of=time)])
        expected = dict(stream(2200, f"bulk{n}:"))
        assert {key: val for key, val in at.items() if key in expected} == expected, "all of it, at one time"
    updates = await updates_of(other, theirs)
    found = Versions({"t": updates})
    assert found.wrong == []
    assert dict(await entries(table)) == await theirs.get_many({key for key, *_ in updates})


async def test_a_repeat_writes_nothing(place: Place) -> None:
    client, other = await place.client(**LIMITS), await place.client(**LIMITS)
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    first = await table.put_many(stream(2000, "a"), once="it")
    await table.put("k00001", "later")
    assert await theirs.put_many(stream(2000, "a"), once="it") == first
    assert await theirs.get("k00001") == "later"
    time = await table.put_many(stream(2000, "b"), txn=("app", 3))
    assert await theirs.put_many(stream(2000, "c"), txn=("app", 2)) >= time
    assert await theirs.get("k00001") == "b1"
    same_vals = await table.put_many(stream(2000, "b"), once="no change")
    await theirs.put("k00001", "later")
    assert await theirs.put_many(stream(2000, "b"), once="no change") == same_vals
    assert await client.happened("no change", "t") == same_vals


async def test_what_fails_or_is_cancelled_leaves_nothing() -> None:
    """A refused entry behind many; a cancellation at any moment: all or nothing of it is there, and no blob
    more."""
    url, gate = f"mem://{uuid.uuid4().hex}", Gate()
    opening = ap.open(
        blob=FaultyBlob(ap.open_blob(url), gate),
        consensus=ap.open_consensus(url),
        settings=ap.Settings(**LIMITS),
        maintenance=False,
    )
    async with opening as client:
        blob = ap.open_blob(url)
        table = client.table("t", str, str)
        await table.put_many(stream(1000, "a"))

        async def parts() -> set[str]:
            return {key async for key, _ in blob.list("") if key.endswith(".parquet")}

        def broken() -> Iterator[Any]:
            yield from stream(2000, "b")
            yield ("k", 7)

        here = await parts()
        with pytest.raises(ap.InvalidUpdate):
            await table.put_many(broken())
        for pause in range(0, 120, 7):
            before = dict(await entries(table))
            putting = asyncio.ensure_future(table.put_many(stream(1500, f"{pause}:")))
            for _ in range(pause):
                await asyncio.sleep(0.0005)
            putting.cancel()
            await asyncio.wait([putting])
            await table.delete("nothing")  # behind what was sent
            found = dict(await entries(table))
            assert found in (before, {**before, **dict(stream(1500, f"{pause}:"))}), pause
        async with asyncio.timeout(50):
            while True:
                named = await _named(client)
                left = await parts() - named - here
                if not left:
                    break
                await asyncio.sleep(0.01)


class Appends(FaultyConsensus):
    """Its gate holds appends as such."""

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        if b'"batches"' in data:
            await self.faults.call("append", partial(asyncio.sleep, 0))
        return await super().compare_and_set(key, expected, data)


@pytest.mark.parametrize("swept", [False, True])
@pytest.mark.parametrize("again", [True, False], ids=["arrow", "iterator"])
async def test_a_process_that_stood_still(swept: bool, again: bool) -> None:
    """Goal: for longer than the lease of its writer, when all is spilled, or staged: it goes on. Only what
    came from an iterator, and was swept, must be put again."""
    async with place_in_memory(**LIMITS) as place:
        gate = Gate()
        opening = ap.open(
            blob=FaultyBlob(place.blob, gate),
            consensus=Appends(place.clock, gate),
            settings=ap.Settings(**LIMITS),
            maintenance=False,
        )
        async with opening as client:
            other = await place.client(**LIMITS)
            table, theirs = client.table("t", str, str), other.table("t", str, str)
            await table.put_many(stream(1000, "a"))
            keys, vals = zip(*stream(1500, "b"), strict=True)
            given = pa.table({"key": keys, "val": vals})
            gate.hold(*(("get", "get_range") if swept else ("append",)))
            putting = asyncio.create_task(table.put_many(given if again else zip(keys, vals, strict=True)))
            await in_time(gate.held.wait())
            place.clock.ahead_s += 2 * client._stack.settings.writer_lease_s
            await theirs.put("theirs", "1")
            if swept:
                assert (await other.sweep_leaked_blobs(dry_run=False)).keys
            gate.open()
            if swept and not again:
                with pytest.raises(ap.BatchExpired, match="put them again"):
                    await in_time(putting)
            else:
                await in_time(putting)
                assert dict(await entries(theirs)) == {**dict(stream(1500, "b")), "theirs": "1"}


async def test_what_is_long_in_doubt_is_deleted_once_it_is_known() -> None:
    """The commit was not made, and no answer tells so, for as long as anyone asks."""
    url, faults = f"mem://{uuid.uuid4().hex}", Unanswered()
    opening = ap.open(
        blob=ap.open_blob(url),
        consensus=FaultyConsensus(ap.open_consensus(url), faults),
        settings=ap.Settings(**LIMITS, retry_timeout_s=0.0),
        maintenance=False,
    )
    async with opening as client:
        table = client.table("t", str, str)
        await table.put_many(stream(1000, "a"))
        await nothing_is_left_over(client)
        faults.active = True
        with pytest.raises(ap.Indeterminate):
            await in_time(table.put_many(stream(1500, "b")))
        faults.active = False
        await table.delete("nothing")
        assert await table.get("k00001") == "a1"
        await nothing_is_left_over(client)
        gc.collect()  # it warns of batches that are left over


async def nothing_is_left_over(client: ap.Client) -> None:
    async with asyncio.timeout(50):
        while (usage := await client.admin.usage()).total != usage.referenced:
            await asyncio.sleep(0.01)


class Unanswered(Faults):
    """While it is active no commit is made, and no answer comes: nor to who asks what became of it."""

    active = False
    sent = False

    def outcome(self, op: str) -> Outcome:
        self.sent = self.active and (self.sent or op.startswith("compare_and_set"))
        return Outcome.DROPPED if self.sent else super().outcome(op)


async def _named(client: ap.Client) -> set[str]:
    """The blobs that the newest state names."""
    state = await client._shards.at(await client.shard_id("t")).open()
    return {part.key for batch in state.batches.values() for part in batch.parts if part.key}


MEMORY = """
import asyncio, resource, sys
import aiopersist as ap

async def main(url, count):
    settings = ap.Settings(table_resident_bytes=2**23, blob_target_size=2**22, read_memory_bytes=2**25,
                           blob_cache_bytes=2**20, row_group_bytes=2**19)
    async with ap.open(url, settings=settings, maintenance=False) as client:
        table = client.table("t", str, str)
        await table.put_many((f"key {n:09}", f"{n:0100}") for n in range(20_000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await table.put_many((f"key {n * 7919 % count:09}", f"{n:0100}") for n in range(count))
        assert await table.get(f"key {7919:09}") == f"{1:0100}"
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_put(tmp_path: Any) -> None:
    """Goal: four times the entries take about the same memory; as texts these are some 350 MB."""
    grown = []
    for count in (300_007, 1_200_007):
        command = [sys.executable, "-c", MEMORY, str(tmp_path / str(count)), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown.append(int(done.stdout) / 1024)
    assert grown[1] < 200, grown
    assert grown[1] < 1.6 * grown[0] + 30, grown
