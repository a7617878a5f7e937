"""Goal: in all orders of the requests of a slow reader, a compaction, a collection and a sweep, what the
reader holds is there, and so is what a tag names; what a collector that stops at any step leaves can be read;
and no upload is swept before its commit.

Each rule is needed: without it an order is found in which a part is gone."""

import asyncio
from collections.abc import Awaitable, Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.gc.collect import collect
from aiopersist.gc.rollup import write_rollup
from aiopersist.gc.sweep import sweep
from aiopersist.maintenance import tags
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import Replace, Total
from aiopersist.state.writing import RegisterWriter
from tests.exhaustive.kit import Cast, Model, played
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA
from tests.worlds.planted import keeping, tagging

ROWS = [("a", 1, 1), ("b", 2, 1)]
MORE = ("c", 3, 1)
KEEPER = "wkeeper"
Act = Callable[[], Awaitable[None]]


class Scene:
    """A shard with two batches in blobs. `KEEPER` is registered, and has uploaded what a compaction of the
    first one makes."""

    stored: tuple[dict[str, bytes], dict[str, Any], ShardId] | None = None

    def __init__(self, model: Model) -> None:
        self.model = model

    async def begin(self) -> None:
        if Scene.stored is None:
            Scene.stored = await self.fill()
        blobs, logs, self.id = Scene.stored
        self.model.blob._shared.blobs.update(blobs)
        self.model.consensus._shared.logs.update(deepcopy(logs))

    async def fill(self) -> tuple[dict[str, bytes], dict[str, Any], ShardId]:
        client = await self.model.fresh("setup")
        async with client.writer("s", SCHEMA) as writer:
            for time, (key, val, diff) in enumerate(ROWS):
                await writer.compare_and_append([(key, val, time, diff)], time, time + 1)
        shard_id = await client.shard_id("s")
        shard = Shard(stack_of(client), shard_id)
        await shard.open()
        await commit(shard.register, RegisterWriter(KEEPER, 1e9))
        await write_rollup(shard, KEEPER)
        first = shard.state.batches[min(shard.state.batches)].parts[0]
        data = await self.model.blob.get(str(first.key))
        assert data is not None
        await self.model.blob.set(self.compacted(shard_id), data)
        await client.aclose()
        shared = self.model.consensus._shared
        return dict(self.model.blob._shared.blobs), deepcopy(shared.logs), shard_id

    def compacted(self, shard_id: ShardId) -> str:
        return f"{shard_id}/{KEEPER}/compacted.parquet"

    async def shard(self, who: str) -> Shard:
        shard = Shard(stack_of(await self.model.client(who)), self.id)
        await shard.open()
        return shard

    async def reader(self, *, begins: bool = False, beats: bool = False) -> Act:
        """Reads a snapshot, which is open already unless it `begins`; its lease may be renewed before."""
        client = await self.model.fresh("r")
        opened: list[Any] = []

        async def begin() -> None:
            opened.append(await client.reader(self.id, SCHEMA))
            opened.append(await opened[0].snapshot())

        async def read() -> None:
            if begins:
                await begin()
            if beats:
                await opened[0]._session.hold.heartbeat()
            rows = await opened[1].rows()
            assert rows in (ROWS, [*ROWS, MORE]), f"a snapshot has {rows}"

        if not begins:
            await begin()
        return read

    async def compaction(self) -> Act:
        """Replaces the first batch by what was made of it."""
        shard = await self.shard("c")

        async def compact() -> None:
            first, batch = next(iter(shard.state.batches.items()))
            part = batch.parts[0].replace(key=self.compacted(self.id))
            result = batch.replace(parts=(part,))
            total = Total(1, 1)
            await commit(shard.register, Replace(KEEPER, {first: batch}, result, total, total))

        return compact

    async def collector(self) -> Act:
        """One round, which may stop anywhere."""
        shard = await self.shard("g")

        async def collected() -> None:
            try:
                await shard.open()
                await write_rollup(shard, KEEPER)
                await collect(shard)
            except asyncio.CancelledError:
                return

        return collected

    async def sweeper(self) -> Act:
        stack = stack_of(await self.model.client("s"))

        async def swept() -> None:
            await sweep(stack, dry_run=False)

        return swept

    async def tagger(self) -> Act:
        shard = await self.shard("t")

        async def tag() -> None:
            registration: Any = SimpleNamespace(writer=KEEPER)
            await tags._added(shard, "x", 1, None, registration)

        return tag

    async def uploader(self) -> Act:
        client = await self.model.fresh("u")

        async def upload() -> None:
            writer = await client.writer(self.id, SCHEMA)
            key, val, diff = MORE
            await writer.compare_and_append([(key, val, 2, diff)], 2, 3)

        return upload

    async def check(self) -> None:
        """A new process reads all of it."""
        client = await self.model.fresh("check")
        async with client.reader(self.id, SCHEMA) as reader, reader.snapshot() as snapshot:
            rows = await snapshot.rows()
        assert rows in (ROWS, [*ROWS, MORE]), f"at the end there is {rows}"
        for tag in await client.tags(self.id):
            async with client.reader(self.id, SCHEMA) as reader, reader.snapshot(tag=tag) as snapshot:
                assert await snapshot.rows() == ROWS, "at the end a tag has other rows"
        report = await client.admin.fsck(self.id)
        assert report.ok, f"at the end: {report.problems}"


def of(*names: str, cancels: int = 0, **options: Any) -> Cast:
    async def cast(model: Model) -> Any:
        scene = Scene(model)
        await scene.begin()
        model.cancels["collector"] = cancels
        return {name: await getattr(scene, name)(**options.get(name, {})) for name in names}, scene.check

    return cast


BEATS, BEGINS = {"beats": True}, {"begins": True}
CASTS: dict[str, Cast] = {
    "a reader and a collection": of("reader", "compaction", "collector"),
    "a collector that stops": of("compaction", "collector", cancels=1),
    "an upload and a sweep": of("uploader", "sweeper"),
}
LARGER: dict[str, Cast] = {
    "a reader whose lease is renewed": of("reader", "compaction", "collector", reader=BEATS),
    "a reader that begins": of("reader", "compaction", "collector", reader=BEGINS),
    "a tag and a collection": of("tagger", "compaction", "collector"),
    "a reader and a sweep": of("reader", "compaction", "sweeper"),
    "an upload and both": of("uploader", "collector", "sweeper"),
}


@pytest.fixture(autouse=True)
def _anew() -> None:
    Scene.stored = None


@pytest.mark.parametrize("name", CASTS)
def test_what_is_needed_is_there(name: str) -> None:
    runs = played(CASTS[name], blob_steps=True)
    print(f"{runs} runs")
    assert runs > 10


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGER)
def test_what_is_needed_is_there_in_larger_models(name: str) -> None:
    runs = played(LARGER[name], blob_steps=True)
    print(f"{runs} runs")
    assert runs > 100


WITHOUT: dict[str, tuple[Any, str]] = {
    "holds of readers": (keeping.collection_beside_readers, "a reader and a collection"),
    "pins of snapshots": (keeping.a_heartbeat_that_forgets_versions, "a reader whose lease is renewed"),
    "what is named": (keeping.collection_of_what_is_named, "a reader and a collection"),
    "the horizon": (keeping.collection_of_what_is_dropped_later, "a reader and a collection"),
    "rollups": (keeping.truncation_to_any_version, "a reader and a collection"),
    "the order of deletions": (keeping.rollups_go_before_their_versions, "a collector that stops"),
    "a list before the head": (keeping.a_sweep_that_reads_the_head_first, "an upload and a sweep"),
    "what tags name": (tagging.a_collection_that_ignores_tags, "a tag and a collection"),
    "what is live as a tag is added": (tagging.a_tag_of_what_was_replaced, "a tag and a collection"),
    "registrations": (keeping.a_sweep_beside_writers, "an upload and a sweep"),
}


CASES = [pytest.param(w, marks=pytest.mark.long if WITHOUT[w][1] in LARGER else ()) for w in WITHOUT]


@pytest.mark.parametrize("without", CASES)
def test_without_a_rule_something_is_gone(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = WITHOUT[without]
    plant(monkeypatch)
    with pytest.raises(
        (AssertionError, ap.Error), match=r"snapshot has|at the end|names part|rollup|for ever"
    ):
        played((CASTS | LARGER)[name], blob_steps=True)
