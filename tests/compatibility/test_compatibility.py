"""Goal: the data of every earlier release is read for ever, and can be written, compacted and collected.

Each folder beside this file is a location that `write.py` wrote with the release of that number. A folder is
never written again. `0.1.0-format-1` is from before the first release: all its versions have format 1.
"""

import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.indexed import UnknownStream
from aiopersist.stash import TypedCollection
from tests.compatibility.write import PRICES, SETTINGS, PersonWithCity

HERE = Path(__file__).parent
RELEASES = sorted(path.parent.name for path in HERE.glob("*/contents.json"))
FORMATS = {"0.1.0": {1, 2}, "0.1.0-format-1": {1}, "0.2.0": {1, 2, 3, 4}}
SHARDS = ("prices", "people", "moments", "readings", "lately", "finished")

Rows = list[tuple[Any, ...]]


class Old(NamedTuple):
    """A copy of a location, opened, and what it must contain."""

    client: ap.Client
    contents: dict[str, Any]
    folder: Path


@pytest.fixture(params=RELEASES)
async def old(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Old]:
    folder = Path(shutil.copytree(HERE / request.param, tmp_path / "old"))
    contents = json.loads((folder / "contents.json").read_text(encoding="utf-8"))
    async with ap.open(**urls(folder), settings=SETTINGS, maintenance=False) as client:
        yield Old(client, contents, folder)


def urls(folder: Path) -> dict[str, Any]:
    return {"blob": f"file://{folder}/blob", "consensus": f"sqlite://{folder}/state.db"}


def tuples(rows: list[list[Any]]) -> Rows:
    return [tuple(row) for row in rows]


async def contents_of(client: ap.Client, shard: str, as_of: Any = None) -> Rows:
    """The pairs of key and val, in order of keys; each is there once."""
    async with client.reader(shard) as r, r.snapshot(as_of) as s:
        rows: Rows = await s.rows()
    assert all(diff == 1 for _, _, diff in rows)
    return [(key, val) for key, val, _ in rows]


def test_this_release_has_a_location() -> None:
    assert ap.__version__ in RELEASES, f"python {HERE}/write.py {HERE}/{ap.__version__}"


@pytest.mark.parametrize("release", RELEASES)
def test_a_location_has_the_formats_that_it_is_kept_for(release: str) -> None:
    uri = f"file:{HERE / release / 'state.db'}?immutable=1"
    database = sqlite3.connect(uri, uri=True)
    versions = database.execute("SELECT data FROM versions WHERE key LIKE 'shard/%'").fetchall()
    database.close()
    assert {json.loads(data)["format"] for (data,) in versions} == FORMATS[release]


async def test_names_are_found(old: Old) -> None:
    assert {*SHARDS} <= {*await old.client.list_shards()}
    assert "dropped" not in await old.client.list_shards()


async def test_every_time_that_was_held_is_read(old: Old) -> None:
    for as_of, rows in old.contents["prices"]["at"].items():
        assert await contents_of(old.client, "prices", int(as_of)) == tuples(rows)
    for as_of, rows in old.contents["moments"]["at"].items():
        time = tuple(map(int, as_of.split(",")))
        assert await contents_of(old.client, "moments", time) == tuples(rows)
    assert await contents_of(old.client, "readings") == tuples(old.contents["readings"]["rows"])
    assert await contents_of(old.client, "finished", 0) == tuples(old.contents["ends"]["rows"])


async def test_rows_of_an_earlier_schema_are_read_by_the_later(old: Old) -> None:
    expected = old.contents["people"]
    async with old.client.reader("people", ap.Schema(key=int, val=PersonWithCity)) as r, r.snapshot() as s:
        people = [val for _, val, _ in await s.rows()]
    assert [person.name for person in people] == expected["names"]
    assert [person.city for person in people] == [None] * (len(people) - 1) + [expected["city"]]


async def test_holds_transactions_and_cursors_are_where_they_were(old: Old) -> None:
    client = old.client
    holder = await client.reader("prices", hold_name="nightly")
    assert holder.since == ap.Antichain(1)
    async with client.critical_since("prices", "pipeline") as position:
        assert (position.opaque, position.since) == (2, ap.Antichain(1))
    assert await client.txn_number("prices", "orders") == 42
    async with client.writer("prices", PRICES) as w:
        await w.write([("never", 0)], txn=("orders", 42))
    async with client.reader("prices", PRICES) as r:
        async with r.listen(cursor=old.contents["prices"]["cursor"]) as listening:
            step = await anext(listening.steps())
    assert sorted(step.updates.rows()) == [("tea", 3, 2, -1), ("tea", 4, 2, 1)]
    await holder.release()


async def test_a_batch_that_was_built_is_appended(old: Old) -> None:
    expected = old.contents["prices"]
    async with old.client.writer("prices", PRICES) as w:
        batch = await w.batch_from_transmittable(expected["batch"].encode())
        await w.compare_and_append_batch([batch], 3, 4)
    wanted = sorted([*tuples(expected["at"]["2"]), *tuples(expected["batch_rows"])])
    assert await contents_of(old.client, "prices") == wanted


async def test_retention_goes_on(old: Old) -> None:
    async with old.client.writer("readings", PRICES) as w:
        for time in range(41, 50):
            await w.compare_and_append([("later", time, time, 1)], time, time + 1)
    await old.client.admin.force_compaction("readings")
    assert (await old.client.admin.inspect("readings")).since == ap.Antichain(45)
    assert (await old.client.admin.inspect("lately")).retention is not None


async def test_appended_compacted_and_collected_it_stays_sound(old: Old) -> None:
    client = old.client
    before = {shard: await contents_of(client, shard) for shard in ("prices", "readings")}
    for shard, rows in before.items():
        async with client.writer(shard, PRICES) as w:
            await w.write([("zebra", 1)])
            await w.write([(f"zebra {n:04}", n) for n in range(300)])
        await client.admin.force_compaction(shard)
        rows += [("zebra", 1), *((f"zebra {n:04}", n) for n in range(300))]
    for shard in ("people", "moments"):
        await client.admin.force_compaction(shard)
    for shard in SHARDS:
        await client.admin.force_gc(shard)
    done = await client.admin.maintain()
    assert not done.failures
    await client.admin.sweep_leaked_blobs(dry_run=False)
    for shard in SHARDS:
        report = await client.admin.fsck(shard)
        assert report.ok, report.problems
    async with ap.open(**urls(old.folder), readonly=True) as again:
        for shard, rows in before.items():
            assert await contents_of(again, shard) == rows


async def test_an_indexed_goes_on(old: Old) -> None:
    expected = old.contents["orders"]
    async with old.client.indexed("orders", background=False) as ix:
        streams = {name: await ix.register(name, str, int) for name in ("placed", "many")}
        for name, stream in streams.items():
            async with ix.snapshot(stream) as snapshot:
                assert snapshot.seal == ap.Antichain(expected["seal"])
                assert sorted(await snapshot.rows()) == tuples(expected[name])
        with pytest.raises(UnknownStream):
            await ix.load("gone", str, int)
        await ix.write([(streams["many"], [("later", 1, 12, 1)])])
        await ix.seal([*streams.values()], 20)
        await ix.allow_compaction([(stream, 15) for stream in streams.values()])
        while requests := await ix.step():
            for request in requests:
                await ix.apply(request.stream, await ix.compact(request))
        wanted = sorted((k, v, max(t, 15), d) for k, v, t, d in [*expected["many"], ("later", 1, 12, 1)])
        async with ix.snapshot(streams["many"]) as snapshot:
            assert sorted(await snapshot.rows()) == wanted


async def test_a_stash_goes_on(old: Old) -> None:
    class Person(BaseModel):
        name: str

    expected = old.contents["stash"]
    users: TypedCollection[int, Person] = TypedCollection("users", int, Person)
    async with old.client.stash() as stash:
        names = {str(key): person.name for key, person in (await users.peek_one(stash)).items()}
        assert names == expected["users"]
        await users.upsert_key(stash, 3, Person(name="eve"))
        assert await users.peek_key_one(stash, 3) == Person(name="eve")
        prices = await stash.collection("prices", str, int)
        assert await stash.peek(prices) == tuples(expected["prices"])
        assert await stash.upper(prices) == ap.Antichain(expected["upper"])
        await stash.compact(prices, 1)
        await stash.seal(prices, 2)
        assert await stash.peek(prices) == [("milk", 1, 1), ("tea", 3, 1)]


async def test_tables_and_subscriptions_go_on(old: Old) -> None:
    expected = old.contents.get("stock")
    if expected is None:
        pytest.skip("the release had no tables")
    client = old.client
    table, log = client.table("stock", key=str, val=int), client.table("log", key=int, val=str)
    assert (await table.get("tea"), await log.get(1)) == (expected["tea"], expected["log"])
    assert await table.get("tea", as_of=expected["before"]) == 4
    assert await table.count() == expected["entries"]
    assert await table.put("tea", 99, once="first tea") == expected["first"]  # a repeat: nothing is written
    assert await client.happened("sale 1") is not None
    async with table.subscription(name="audit") as subscription:
        step = await anext(subscription)
        assert [(c.key, c.old, c.new) for c in step.changes] == [("tea", 4, 3)]
        await subscription.ack(step, durable=True)
    await table.put("tea", 5)
    await client.admin.force_compaction("stock")
    await client.admin.force_gc("stock")
    assert (await client.admin.fsck("stock")).ok and await table.get("tea") == 5
