"""Goal: entries that replace all contents of a table are one commit, in bounded memory, beside everything
else: at its time the table has them and nothing more."""

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.table.handle import overwrite
from tests.conftest import StoreUrls
from tests.support.processes import Place
from tests.table.kit import entries, in_time, small_writes, updates_of
from tests.table.test_bulk import LIMITS, nothing_is_left_over, stream
from tests.table.test_types import KEYS, same
from tests.table.versions import Versions

CASES: dict[str, list[dict[str, str]]] = {
    "into an empty table": [{}, dict(stream(2000, "a"))],
    "nothing": [dict(stream(2000, "a")), {}, {}],
    "fewer": [dict(stream(2000, "a")), dict(stream(2000, "a", 7)), {"k00007": "last"}],
    "more": [{"k00007": "first"}, dict(stream(100, "a", 9)), dict(stream(2000, "b", 2))],
    "others": [{f"{c}{n}": "x" for n in range(1500)} for c in "akz"],
    "between": [dict(stream(3000, "a", 2)), dict(stream(3001, "a", 3)), {"k00000": "a0", "k02999": "x"}],
}


@pytest.mark.parametrize("name", CASES)
async def test_contents(name: str, elsewhere: StoreUrls) -> None:
    """Goal: exactly the entries; each key has one val; a repeat writes nothing."""
    async with ap.open(
        blob=elsewhere.blob,
        consensus=elsewhere.consensus,
        settings=ap.Settings(**LIMITS),
        maintenance=False,
    ) as client:
        table = client.table("t", str, str)
        for wanted in CASES[name]:
            time = await overwrite(table, iter(wanted.items()))
            assert dict(await entries(table)) == wanted
            at = await client.upper("t")
            assert await overwrite(table, wanted) >= time
            assert await client.upper("t") == at, "nothing changes"
            async with client.reader("t", table.schema) as reader, reader.listen(0, until=time) as listen:
                updates = [update async for step in listen.steps() for update in step.updates]
            assert Versions({"t": updates}).wrong == []
            assert await table.get("k00007", stale=True) == wanted.get("k00007")
        await nothing_is_left_over(client)
        assert (await client.admin.fsck("t")).ok


@pytest.mark.parametrize("name", KEYS)
async def test_keys_of_each_type(name: str) -> None:
    """Goal: keys that are equal are those that stay, of any type; of several vals the last counts."""
    type_, keys = KEYS[name]
    settings = ap.Settings(table_resident_bytes=0, row_group_bytes=1, inline_writes_single_max_bytes=0)
    async with ap.open(f"mem://{uuid.uuid4().hex}", settings=settings, maintenance=False) as client:
        table = client.table("t", type_, int)
        await table.put_many((key, number) for number, key in enumerate(keys))
        await overwrite(table, ((key, number) for number, key in [(-1, keys[1]), *enumerate(keys)][::2]))
        kept = [(key, number) for number, key in enumerate(keys) if number % 2]
        assert same(await entries(table), kept)
        assert (await client.admin.fsck("t")).ok


async def test_other_writers_meanwhile(place: Place) -> None:
    """Goal: both clients put and delete all the time. As of the time of an overwrite there are its entries
    alone, and no key ever has two vals."""
    client, other = await place.client(**LIMITS), await place.client()
    table, theirs = client.table("t", str, str), other.table("t", str, str)
    await table.put_many(stream(2000, "a"))
    writers = (table, "x", 0.001), (theirs, "y", 0.03), (table, "z", 0.001)
    wanted = [dict(stream(2200, f"all{n}:", n + 1)) for n in range(2)]
    async with small_writes(*writers):
        times = [await in_time(overwrite(table, iter(some.items()))) for some in wanted]
    for time, some in zip(times, wanted, strict=True):
        assert dict([entry async for entry in theirs.items(as_of=time)]) == some
    updates = await updates_of(other, theirs)
    assert Versions({"t": updates}).wrong == []


async def test_what_fails_or_is_cancelled_leaves_nothing() -> None:
    """Goal: a refused entry, or a cancellation at any moment: all or nothing of it is there, and no blob
    more."""
    async with ap.open(
        f"mem://{uuid.uuid4().hex}", settings=ap.Settings(**LIMITS), maintenance=False
    ) as client:
        table = client.table("t", str, str)
        await table.put_many(stream(1000, "a"))

        def broken() -> Iterator[Any]:
            yield from stream(2000, "b")
            yield ("k", 7)

        with pytest.raises(ap.InvalidUpdate):
            await overwrite(table, broken())
        assert dict(await entries(table)) == dict(stream(1000, "a"))
        for pause in range(0, 120, 11):
            before, wanted = dict(await entries(table)), dict(stream(1500, f"{pause}:", 3))
            putting = asyncio.ensure_future(overwrite(table, wanted))
            for _ in range(pause):
                await asyncio.sleep(0.0005)
            putting.cancel()
            await asyncio.wait([putting])
            await table.delete("nothing")  # behind what was sent
            assert dict(await entries(table)) in (before, wanted), pause
        await nothing_is_left_over(client)


MEMORY = """
import asyncio, resource, sys
import aiopersist as ap
from aiopersist.table.handle import overwrite

async def main(url, count):
    settings = ap.Settings(table_resident_bytes=2**23, blob_target_size=2**22, read_memory_bytes=2**25,
                           blob_cache_bytes=2**20, row_group_bytes=2**19)
    async with ap.open(url, settings=settings, maintenance=False) as client:
        table = client.table("t", str, str)
        await table.put_many((f"key {n:09}", f"{n:0100}") for n in range(count))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        await overwrite(table, [("key", "last")])
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        assert [entry async for entry in table.items()] == [("key", "last")]

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.long
def test_memory_does_not_grow_with_what_goes(tmp_path: Any) -> None:
    """Goal: four times the contents that go take about the same memory."""
    grown = []
    for count in (200_000, 800_000):
        command = [sys.executable, "-c", MEMORY, str(tmp_path / str(count)), str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        grown.append(int(done.stdout) / 1024)
    assert grown[1] < 1.6 * grown[0] + 60, grown
