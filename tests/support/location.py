"""A location in memory whose requests can be held, crashed and counted, and the contents that its shard
should have."""

import asyncio
import copy
import random
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.log import consensus_key
from aiopersist.state.diff import decode_diff
from aiopersist.state.rollup_file import decode_rollup
from aiopersist.state.writing import ExpireWriter
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.storage.urls import parse_location
from aiopersist.testing.faults import FaultyBlob, FaultyConsensus
from aiopersist.testing.model import Model
from tests.conftest import LOCATIONS
from tests.support.internals import shards_of
from tests.support.schemas import SCHEMA
from tests.support.shards import Call

NAME = "t"
LIMITS: dict[str, Any] = {
    "inline_writes_single_max_bytes": 0,
    "blob_target_size": 150,
    "row_group_bytes": 80,
    "retry_timeout_s": 0.0,
    "watch_timeout_s": 0.02,
    "blob_cache_bytes": 0,
}


class Way:
    """What happens on the way of one client to the stores. It crashes at the `crash_at`-th call, which
    happened (`landed`) or not; from then on no call of it arrives. Calls that `holds` are held back."""

    def __init__(self, crash_at: int | None = None, *, landed: bool = False) -> None:
        self.crash_at, self.landed = crash_at, landed
        self.calls = 0
        self.crashed = False
        self.holds: Callable[[str, Any], bool] = lambda op, what: False
        self.held: list[tuple[str, Any]] = []
        self.go = asyncio.Event()

    async def call(self, op: str, act: Call, what: Any = None) -> Any:
        if self.crashed:
            raise StorageUnavailable("the client has crashed")
        if op == "watch":
            return await act()
        self.calls += 1
        if self.calls == self.crash_at:
            if self.landed:
                await act()
            self.crashed = True
            raise Indeterminate("the client has crashed")
        if self.holds(op, what):
            self.held.append((op, what))
            await self.go.wait()
        return await act()

    async def until_held(self) -> None:
        async with asyncio.timeout(50):
            while not self.held:
                await asyncio.sleep(0.001)

    def outcome(self, op: str) -> Any:
        raise AssertionError

    losing_hints = False


class WayBlob(FaultyBlob):
    async def get(self, key: str) -> bytes | None:
        return await self.faults.call("get", lambda: self.inner.get(key), key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return await self.faults.call("get", lambda: self.inner.get_range(key, offset, length), key)

    async def set(self, key: str, data: bytes | memoryview) -> None:
        kept = bytes(data)
        await self.faults.call("set", lambda: self.inner.set(key, kept), key)

    async def delete(self, keys: Sequence[str]) -> None:
        kept = list(keys)
        await self.faults.call("delete", lambda: self.inner.delete(kept), kept)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        found: list[tuple[str, int]] = []

        async def collected() -> None:
            found.extend([item async for item in self.inner.list(prefix)])

        await self.faults.call("list", collected)
        for item in found:
            yield item


class WayConsensus(FaultyConsensus):
    async def scan(self, key: str, from_seqno: int, limit: int) -> list[Any]:
        return await self.faults.call("scan", lambda: self.inner.scan(key, from_seqno, limit), limit)

    async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
        return await self.faults.call(
            "compare_and_set", lambda: self.inner.compare_and_set(key, expected, data), data
        )


class Place:
    """Stores in memory, and what should be in the shard."""

    def __init__(self, other: "Place | None" = None) -> None:
        name = uuid.uuid4().hex
        self.blob, self.consensus, self.model = MemoryBlob(name), MemoryConsensus(name), Model()
        if other is not None:
            self.blob._shared.blobs.update(other.blob._shared.blobs)
            self.consensus._shared.logs.update(copy.deepcopy(other.consensus._shared.logs))
            self.model = copy.deepcopy(other.model)

    def open(self, way: Way | None = None, *, maintenance: bool = False, **limits: Any) -> Any:
        way = way or Way()
        return ap.open(
            blob=WayBlob(self.blob, way),  # type: ignore[arg-type]
            consensus=WayConsensus(self.consensus, way),  # type: ignore[arg-type]
            settings=ap.Settings(**{**LIMITS, **limits}),
            maintenance=maintenance,
        )

    def blobs(self, end: str = "") -> dict[str, bytes]:
        found = self.blob._shared.blobs
        return {key: data for key, data in found.items() if key.startswith("s") and key.endswith(end)}

    def versions(self, shard: str) -> Any:
        return self.consensus._shared.logs[consensus_key(shard)]

    def named(self, shard: str) -> set[str]:
        """The blobs that the live states name, told from the bytes alone."""
        log = self.versions(shard)
        diffs = [decode_diff(data) for data in log.data]
        if diffs[-1].changes.finalized:
            return set()
        rollups = dict(diffs[-1].changes.rollups)
        for diff in diffs:
            rollups |= diff.changes.rollups
            if diff.rollup is not None:
                assert diff.rollup.key
        keys = {rollup.key for rollup in rollups.values()}
        if log.first:
            (base,) = [
                state
                for key, data in self.blobs(".rollup").items()
                if (state := decode_rollup(data, _checksum(data))).seqno == log.first
                and any(d.rollup and d.rollup.key == key for d in diffs)
            ]
            keys |= {part.key for batch in base.batches.values() for part in batch.parts if part.key}
            keys |= {rollup.key for rollup in base.rollups.values()}
            keys |= {d.rollup.key for d in diffs if d.rollup is not None}
        gone = {s for diff in diffs for s in (diff.changes.drop or {}).get("rollups", ())}
        dropped = {r.key for s, r in rollups.items() if s in gone}
        if log.first:
            dropped |= {rollup.key for s, rollup in base.rollups.items() if s in gone}
        for diff in diffs:
            keys |= {p.key for b in diff.changes.batches.values() for p in b.parts if p.key}
        return keys - dropped


def _checksum(data: bytes) -> str:
    from aiopersist.state.rollup_file import checksum_of

    return checksum_of(data)


async def append(place: Place, w: Any, rng: random.Random, many: int = 6) -> None:
    lower = w.upper.time
    upper = lower + rng.choice([1, 2, 3])
    updates = [
        (
            rng.choice("abcdef") * rng.choice([1, 9]),
            rng.randrange(3),
            rng.randrange(lower, upper),
            rng.choice([-1, 1, 2]),
        )
        for _ in range(many)
    ]
    await w.compare_and_append(updates, lower, upper)
    place.model.append(updates, [lower], [upper])


async def move_since(client: Any, since: int) -> None:
    async with client.critical_since(NAME, "c") as c:
        await c.compare_and_downgrade_since(0, 0, since)


async def contents(client: Any, as_of: int | None = None) -> list[Any]:
    async with client.reader(NAME, SCHEMA) as r, r.snapshot(as_of) as s:
        return await s.rows()


async def sound(place: Place, client: Any) -> None:
    """The contents are the written updates, and all of them can be read."""
    report = await client.admin.fsck(NAME)
    assert report.ok, report.problems
    upper = place.model.upper[0]
    assert await contents(client, upper - 1) == place.model.contents(upper - 1)


async def expire_writers(client: Any, shard_id: str) -> None:
    shard = shards_of(client).at(ap.ShardId.parse(shard_id))
    state = await shard.register.refresh()
    for writer in state.writers:
        await commit(shard.register, ExpireWriter(writer), Slot())


async def prepared(collected: bool = True) -> tuple[Place, str]:
    """A shard with a history: batches in blobs, rollups, and something to compact and to collect."""
    place, rng = Place(), random.Random(1)
    async with place.open() as client, client.writer(NAME, SCHEMA) as w:
        for _ in range(2):
            await append(place, w, rng)
        await move_since(client, w.upper.time - 1)
        await client.admin.force_compaction(NAME)
        if collected:
            await client.admin.force_gc(NAME)
        for _ in range(2):
            await append(place, w, rng)
        await move_since(client, w.upper.time - 1)
        return place, w.shard_id


async def compaction(client: Any) -> None:
    await client.admin.force_compaction(NAME)


async def collection(client: Any) -> None:
    await client.admin.force_gc(NAME)


async def both(client: Any) -> None:
    await client.admin.force_compaction(NAME)
    await client.admin.force_gc(NAME)


async def finished(place: Place, shard_id: str) -> None:
    """After any event the shard is sound; a later run ends the work; the sweep leaves only named blobs."""
    async with asyncio.timeout(50), place.open() as client:
        await sound(place, client)
        await client.admin.sweep_leaked_blobs(dry_run=False)
        await expire_writers(client, shard_id)
        await client.admin.sweep_leaked_blobs(dry_run=False)
        await both(client)
        view = await client.admin.inspect(NAME)
        full, *rest = view.batches
        assert full.runs == 1
        assert not any(batch.parts for batch in rest), "what is newest and empty stays apart"
        assert len(view.rollups) == 1
        assert not view.claims
        await expire_writers(client, shard_id)
        await client.admin.sweep_leaked_blobs(dry_run=False)
        assert set(place.blobs()) == place.named(shard_id)
    async with asyncio.timeout(50), place.open() as client:
        await sound(place, client)


def of_kinds(*kinds: str) -> pytest.MarkDecorator:
    """`location` of these kinds; all of the others are for the long run."""
    every = [kind if isinstance(kind, str) else kind.values[0] for kind in LOCATIONS]
    params = [pytest.param(kind, marks=[] if kind in kinds else [pytest.mark.long]) for kind in every]
    return pytest.mark.parametrize("location", params, indirect=True)


ON_SERVERS = of_kinds("s3+postgres")


def both_in_a_bucket(url: str, test: pytest.Item | None = None) -> tuple[str, str]:
    """The URLs of both stores of a location in a bucket; skips a test that it cannot serve."""
    if test is not None and test.get_closest_marker("several_shards"):
        pytest.skip("an object store commits to one shard at a time")
    found = parse_location(f"{url}&poll_s=0.1")
    return str(found.blob), str(found.consensus)


def in_a_bucket(consensus: str) -> bool:
    """Whether the versions lie in a bucket, given the URL of the consensus store."""
    return consensus.startswith(("s3", "az"))
