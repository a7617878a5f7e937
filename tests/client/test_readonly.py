"""Goal: a readonly client reads the contents, writes nothing at all, and takes no harm from clients that
write."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.urls import open_blob, open_consensus
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA

WRITES = ("compare_and_set", "compare_and_set_many", "truncate", "remove", "set", "delete")


def opened(location: Any, *, readonly: bool = True, **limits: Any) -> Any:
    settings = ap.Settings(**{"compaction_idle_s": 3600, **limits})
    return ap.open(blob=location.blob, consensus=location.consensus, settings=settings, readonly=readonly)


def write_requests(client: ap.Client) -> dict[str, int]:
    return {op: m.count for op, m in client.metrics.items() if op.split(".")[1] in WRITES and m.count}


async def stored(location: Any) -> tuple[list[Any], list[Any]]:
    """Every version and every blob that there is."""
    consensus, blob = open_consensus(location.consensus), open_blob(location.blob)
    try:
        keys = await consensus.list_keys("")
        versions = [(key, await consensus.scan(key, 0, 1000)) for key in keys]
        return versions, sorted([entry async for entry in blob.list("")])
    finally:
        await consensus.aclose()
        await blob.aclose()


async def test_it_reads_and_writes_nothing(location: Any) -> None:
    """Goal: snapshots, listens, cursors and views work; both stores are the same afterwards, to the byte."""
    async with opened(location, readonly=False, inline_writes_single_max_bytes=8) as client:
        async with client.writer("t", SCHEMA) as w:
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            await w.compare_and_append([("a" * 20, 2, 1, 1)], 1, 2)
    before = await stored(location)
    async with opened(location) as client:
        async with client.reader("t", SCHEMA) as r:
            async with r.snapshot() as s:
                assert await s.rows() == [("a", 1, 1), ("a" * 20, 2, 1)]
                assert [row async for row in s] == [("a", 1, 1), ("a" * 20, 2, 1)]
                told = [part.to_transmittable() for part in s.parts()]
                assert sum([len(await client.workers.fetch_part(part)) for part in told]) == 2
            async with r.listen(as_of=0, until=2) as listen:
                steps = [step async for step in listen.steps()]
                assert [step.updates.rows() for step in steps] == [[("a" * 20, 2, 1, 1)]]
            async with r.subscribe(as_of=1) as subscribe:
                await anext(subscribe)
                assert subscribe.cursor
            assert r.upper == ap.Antichain(2)
            assert await r.fetch_recent_upper() == ap.Antichain(2)
        assert set(await client.list_shards()) == {"t"}
        assert (await client.admin.inspect("t")).upper == ap.Antichain(2)
        assert (await client.admin.fsck("t")).ok
        await client.admin.usage()
        await client.admin.sweep_leaked_blobs(dry_run=True)
        assert write_requests(client) == {}
    assert await stored(location) == before


CALLS: dict[str, Callable[[ap.Client], Awaitable[Any]]] = {
    "writer": lambda c: c.writer("t", SCHEMA),
    "writer of a new shard": lambda c: c.writer("new", SCHEMA),
    "hold": lambda c: c.reader("t", SCHEMA, hold=0),
    "hold_name": lambda c: c.reader("t", SCHEMA, hold_name="nightly"),
    "create": lambda c: c.reader("new", SCHEMA, create=True),
    "critical_since": lambda c: c.critical_since("t", "x"),
    "drop": lambda c: c.drop("t"),
    "retain": lambda c: c.retain("t", 1),
    "evolve": lambda c: c.compare_and_evolve_schema("t", 0, ap.Schema(key=str, val=int | None)),
    "force_compaction": lambda c: c.force_compaction("t"),
    "force_gc": lambda c: c.force_gc("t"),
    "finalize": lambda c: c.finalize("t"),
    "shared_read": lambda c: c.shared_read("t"),
    "indexed": lambda c: c.indexed("i"),
    "stash": lambda c: c.stash(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_calls_that_write_are_refused(tmp_path: Path, call: str) -> None:
    """Goal: each is `Unsupported` (or refused for a reason of its own) at once, and nothing is there that was
    not before."""
    async with ap.open(tmp_path / "l") as client, client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])
    location = ap.Location(f"file://{tmp_path}/l/blob", f"sqlite://{tmp_path}/l/state.db")
    before = await stored(location)
    async with ap.open(tmp_path / "l", readonly=True) as client:
        with pytest.raises((ap.Unsupported, ap.IncompatibleSchema, ap.InvalidUsage)) as refused:
            await CALLS[call](client)
        if call not in ("evolve", "finalize"):
            assert isinstance(refused.value, ap.Unsupported), refused.value
            assert "readonly=True" in str(refused.value)
        assert write_requests(client).keys() <= {
            "consensus.compare_and_set",
            "blob.set",
        }  # refused before they are sent
    assert await stored(location) == before


async def test_downgrades_are_refused(location: Any) -> None:
    async with opened(location, readonly=False) as client, client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)])
        async with opened(location) as other, other.reader("t", SCHEMA) as r:
            with pytest.raises(ap.Unsupported):
                await r.downgrade_since(0)


async def test_no_location_is_made(location: Any, tmp_path: Path) -> None:
    """Goal: `InvalidLocation` where none is, and nothing is made."""
    with pytest.raises(ap.InvalidLocation):
        await opened(location)
    with pytest.raises(ap.InvalidLocation):
        await ap.open(tmp_path / "nowhere", readonly=True)
    assert not (tmp_path / "nowhere").exists()
    async with opened(location, readonly=False):
        pass
    async with opened(location) as client:
        with pytest.raises(ap.UnknownShard):
            await client.reader("t", SCHEMA)


async def test_it_follows_others(location: Any) -> None:
    """Goal: what others commit is heard, long before it would be looked for without a hint."""
    async with opened(location, readonly=False) as client, client.writer("t", SCHEMA) as w:
        await w.compare_and_append([], 0, 1)
        async with opened(location, watch_timeout_s=3600) as other, other.reader("t", SCHEMA) as r:
            async with r.listen(as_of=0) as listen:
                for time in range(1, 6):
                    waiting = asyncio.ensure_future(anext(listen.steps()))
                    await asyncio.sleep(0.1)
                    await w.compare_and_append([("a", time, time, 1)], time, time + 1)
                    async with asyncio.timeout(50):
                        assert (await waiting).updates.rows() == [("a", time, time, 1)]


# --- nothing keeps what it reads ---------------------------------------------------------------------


async def replaced(client: ap.Client) -> None:
    """Every blob that was there is replaced, and deleted."""
    before = await blobs(client)
    for _ in range(20):  # beside the maintenance in the background, which may be at it
        await client.admin.force_compaction("t")
        async with client.writer("t", SCHEMA):  # a version and a rollup after it: what was replaced may go
            pass
        await client.admin.force_gc("t")
        if not before & await blobs(client):
            return
    raise AssertionError("what was replaced stays")


async def blobs(client: ap.Client) -> set[str]:
    return {key async for key, _ in stack_of(client).blob.list("") if key.endswith(".parquet")}


async def written(w: Any, count: int, first: int = 0) -> None:
    for time in range(first, first + count):
        await w.compare_and_append([(f"k{time}", time, time, 1)], time, time + 1)


LIMITS = {"inline_writes_single_max_bytes": 0, "rollup_every": 1, "blob_cache_bytes": 0}


async def test_a_read_plans_again_where_blobs_were_replaced(location: Any) -> None:
    """Goal: a snapshot and a listen whose blobs are gone give the same by those that replaced them."""
    async with opened(location, readonly=False, **LIMITS) as client, client.writer("t", SCHEMA) as w:
        await written(w, 4)
        async with opened(location, **LIMITS) as other, other.reader("t", SCHEMA) as r:
            contents = [(f"k{time}", time, 1) for time in range(4)]
            async with r.snapshot(3) as s, r.snapshot(3) as t, r.snapshot(3) as u, r.listen(0) as listen:
                iteration = aiter(u.batches())
                await replaced(client)
                assert await s.rows() == contents
                assert [row async for row in t] == contents
                assert sum(batch.num_rows for batch in [b async for b in iteration]) == 4
                step = await anext(listen.steps())
                assert sorted(step.updates.rows()) == [(f"k{t}", t, t, 1) for t in range(1, 4)]
        assert write_requests(other) == {}


async def test_history_that_ends_is_told(location: Any) -> None:
    """Goal: since moves past an open snapshot and an open listen: `SinceViolation`, never other contents."""
    async with opened(location, readonly=False, **LIMITS) as client, client.writer("t", SCHEMA) as w:
        await written(w, 4)
        async with opened(location, **LIMITS) as other, other.reader("t", SCHEMA) as r:
            async with r.snapshot(1) as s, r.listen(0) as listen:
                async with client.reader("t", SCHEMA) as mover:
                    await mover.downgrade_since(3)
                await replaced(client)
                with pytest.raises(ap.SinceViolation):
                    await s.rows()
                with pytest.raises(ap.SinceViolation):
                    await anext(listen)
            async with r.snapshot() as s:
                assert await s.rows() == [(f"k{time}", time, 1) for time in range(4)]


async def test_a_read_that_has_begun_is_told(location: Any) -> None:
    """Goal: once rows were given, those that follow come from the same parts, or not at all."""
    limits = {**LIMITS, "row_group_bytes": 1, "read_memory_bytes": 1}
    async with opened(location, readonly=False, **limits) as client, client.writer("t", SCHEMA) as w:
        await written(w, 40)
        async with opened(location, **limits) as other, other.reader("t", SCHEMA) as r, r.snapshot(39) as s:
            rows = aiter(s.batches())
            await anext(rows)
            await replaced(client)
            try:
                later = [batch async for batch in rows]
            except ap.LeaseExpired as error:
                assert "readonly" in str(error)  # noqa: PT017  # either is right
            else:
                assert sum(batch.num_rows for batch in later) == 39


async def test_a_blob_that_is_lost_is_corruption(tmp_path: Path) -> None:
    """Goal: a part that the newest state names and that is not there is not one that was replaced."""
    async with ap.open(tmp_path / "l", settings=ap.Settings(**LIMITS), maintenance=False) as client:
        async with client.writer("t", SCHEMA) as w:
            await written(w, 2)
    (part, *_) = itertools.islice((tmp_path / "l" / "blob").rglob("*.parquet"), 1)
    part.unlink()
    async with ap.open(tmp_path / "l", readonly=True) as client, client.reader("t", SCHEMA) as r:
        async with r.snapshot(1) as s:
            with pytest.raises(ap.Corruption):
                await s.rows()


@pytest.mark.several_shards
async def test_what_stands_on_top_can_be_read(location: Any) -> None:
    """Goal: a stash and an `Indexed` are opened readonly, and neither store is written."""
    async with opened(location, readonly=False) as client:
        async with client.stash() as stash:
            collection = await stash.collection("c", str, int)
            await stash.update(collection, ("a", 1), 0, 1)
            await stash.seal(collection, 1)
        async with client.indexed("i") as ix:
            stream = await ix.register("s", str, int)
            await ix.write([(stream, [("a", 1, 0, 1)])])
    before = await stored(location)
    async with opened(location) as client:
        async with client.stash(readonly=True) as stash:
            collection = await stash.collection("c", str, int)
            assert await stash.peek_one(collection) == {"a": 1}
        async with client.indexed("i", readonly=True) as ix:
            found = await ix.load("s", str, int)
            assert found is not None
            async with await ix.snapshot(found) as snapshot:
                assert await snapshot.rows() == [("a", 1, 0, 1)]
        assert write_requests(client) == {}
    assert await stored(location) == before
