"""Goal: a staged batch that is handed over, as bytes, to another handle, client or process is appended
there once, or deleted once, even if several processes have the same bytes; and no deletion takes a blob
that a state names."""

import asyncio
import subprocess
import sys
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pydantic
import pytest

import aiopersist as ap
from tests.batches.shared_kit import ROWS, World
from tests.support.schemas import SCHEMA, Colour
from tests.support.shards import updates_of


def described(batch: ap.Batch) -> Any:
    parts = [(p.key, p.encoded_size_bytes, p.key_lower, p.stats, p.rewrite) for p in batch.parts]
    return batch.shard_id, batch.id, batch.lower, batch.upper, batch.len, batch.runs, parts


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    name: str
    price: float | None
    tags: list[str]
    at: datetime


AT = datetime(2024, 5, 1, tzinfo=UTC)


VALUES = [
    pytest.param(bytes, [b"\xff\x00", b"\xfe" * 400, b""], id="bytes"),
    pytest.param(str, ["ä" * 300, "", "\U0010ffff" * 100], id="str"),
    pytest.param(float, [float("inf"), float("-inf"), float("nan"), -0.0, 1e308], id="float"),
    pytest.param(int, [-(2**63), 2**63 - 1], id="int"),
    pytest.param(bool, [True, False], id="bool"),
    pytest.param(Decimal, [Decimal("0.000000001"), Decimal(10) ** 20], id="decimal"),
    pytest.param(datetime, [AT], id="datetime"),
    pytest.param(date, [date(1, 1, 1), date(9999, 12, 31)], id="date"),
    pytest.param(uuid.UUID, [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)], id="uuid"),
    pytest.param(Colour, [Colour.RED, Colour.BLUE], id="enum"),
    pytest.param(int | None, [None, 3], id="optional"),
    pytest.param(list[str], [[], ["x", "y" * 300]], id="list"),
    pytest.param(
        Item,
        [Item(name="n", price=None, tags=["t"], at=AT), Item(name="", price=float("inf"), tags=[], at=AT)],
        id="model",
    ),
]


PROCESS = """
import asyncio, sys
import aiopersist as ap

async def main():
    blob, consensus, single, crash = *sys.argv[1:4], sys.argv[4] == "crash"
    limits = ap.Settings(inline_writes_single_max_bytes=int(single), writer_lease_s=60.0)
    async with ap.open(blob=blob, consensus=consensus, settings=limits) as client:
        async with client.writer("t", ap.Schema(key=str, val=int)) as w:
            batch = await w.batch([("a", 1, 0, 1), ("b", 2, 1, 1), ("b", 2, 0, 1)], 0, 2)
            sys.stdout.buffer.write(batch.to_transmittable())
            sys.stdout.buffer.flush()
            if crash:
                import os
                os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["same handle", "another handle", "another client"])
async def test_what_was_handed_over_arrives_whole(place: World, where: str) -> None:
    """Goal: every attribute, the statistics too, is the same there, and so are the updates."""
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    before = described(batch)
    data = batch.to_transmittable()
    assert isinstance(data, bytes)
    there = w
    if where == "another handle":
        client = await place.client()
        there = await place.stack.enter_async_context(client.writer("t", SCHEMA))
    if where == "another client":
        there = await place.writer()
    restored = await there.batch_from_transmittable(data)
    assert described(restored) == before
    await there.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS
    for used in (batch, restored):
        with pytest.raises(ap.InvalidUsage) as caught:
            await used.delete()
        assert caught.value.kind == ap.UsageKind.CONSUMED


@pytest.mark.parametrize(("kind", "values"), VALUES)
async def test_values_of_every_kind_arrive(place: World, kind: Any, values: list[Any]) -> None:
    """Goal: least keys and statistics go through the bytes unchanged, for every type."""
    schema = ap.Schema(key=kind, val=kind)
    client, other = await place.client(), await place.client()
    async with client.writer("v", schema) as w, other.writer("v", schema) as there:
        batch = await w.batch([(v, v, 0, 1) for v in values], 0, 1)
        before = repr(described(batch))
        restored = await there.batch_from_transmittable(batch.to_transmittable())
        assert repr(described(restored)) == before  # as text: NaN is not NaN
        await there.compare_and_append_batch([restored], 0, 1)
    async with other.reader("v", schema) as r, r.snapshot() as s:
        found = [key for key, _, _ in await s.rows()]
        assert len(found) == len(values)
        assert all(any(f == v or (f != f and v != v) for f in found) for v in values)


async def test_a_rewritten_batch_keeps_its_rewrite(place: World) -> None:
    """Goal: rewritten here, handed over, rewritten further there: it reads at its last time."""
    w, there = await place.writer(), await place.writer()
    batch = await w.batch([("a", 1, 0, 1), ("a", 1, 0, 1), ("b", 1, 0, -2)], 0, 1)
    batch.rewrite_ts(5, 6)
    restored = await there.batch_from_transmittable(batch.to_transmittable())
    assert restored.upper == ap.Antichain(6)
    assert [part.rewrite for part in restored.parts] == [ap.Antichain(5)]
    with pytest.raises(ap.InvalidUsage) as caught:
        restored.rewrite_ts(4, 8)  # it never goes back
    assert caught.value.kind == ap.UsageKind.INVALID_REWRITE
    restored.rewrite_ts(7, 8)
    again = await w.batch_from_transmittable(restored.to_transmittable())
    await again.flush_to_blob()
    assert [part.rewrite for part in again.parts] == [ap.Antichain(7)]
    await w.compare_and_append([], 0, 6)
    await w.compare_and_append_batch([again], 6, 8)
    assert await place.history() == [("a", 1, 7, 2), ("b", 1, 7, -2)]


async def test_a_batch_of_many_parts_and_runs_arrives(place: World) -> None:
    w = await place.writer(blob_target_size=0)
    there = await place.writer()
    rows = [(key, n, 0, 1) for n, key in enumerate("cabed")]
    async with w.builder(0) as builder:
        await builder.extend(rows)
        batch = await builder.finish(1)
    assert len(batch.parts) == 5
    before = described(batch)
    restored = await there.batch_from_transmittable(batch.to_transmittable())
    assert described(restored) == before
    await there.compare_and_append_batch([restored], 0, 1)
    assert await place.history() == sorted(rows)


async def test_a_batch_without_parts_arrives(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    batch = await w.batch([("a", 1, 0, 1), ("a", 1, 0, -1)], 0, 3)
    restored = await there.batch_from_transmittable(batch.to_transmittable())
    assert restored.parts == ()
    await there.compare_and_append_batch([restored], 0, 3)
    assert there.upper == ap.Antichain(3)
    assert await place.history() == []


async def test_a_schema_that_evolved_meanwhile(place: World) -> None:
    """Goal: a batch of a newer schema than the restoring handle's is appended there all the same."""

    class Old(pydantic.BaseModel):
        a: int

    class New(pydantic.BaseModel):
        a: int
        b: int | None = None

    old, new = ap.Schema(key=str, val=Old), ap.Schema(key=str, val=New)
    client, other = await place.client(), await place.client()
    async with client.writer("e", old) as w_old:
        await other.compare_and_evolve_schema("e", 0, new)
        async with other.writer("e", new) as w_new:
            batch = await w_new.batch([("k", New(a=1, b=2), 0, 1)], 0, 1)
            restored = await w_old.batch_from_transmittable(batch.to_transmittable())
            assert [part.key_lower for part in restored.parts] == ["k"]
            await w_old.compare_and_append_batch([restored], 0, 1)
    async with other.reader("e", new) as r, r.snapshot() as s:
        assert await s.rows() == [("k", New(a=1, b=2), 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("single", "ending"), [(16384, "crash"), (0, "close")], ids=["inline, crash", "blob, close"]
)
async def test_from_one_process_to_another(tmp_path: Path, single: int, ending: str) -> None:
    """Goal: built in a process that is gone, rewritten and appended here, it reads exactly at its new
    time; from a copy of the bytes nothing more comes."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"
    arguments = [sys.executable, "-c", PROCESS, *urls, str(single), ending]
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    async with ap.open(blob=urls[0], consensus=urls[1]) as client, client.writer("t", SCHEMA) as w:
        batch = await w.batch_from_transmittable(done.stdout)
        copy = await w.batch_from_transmittable(done.stdout)
        await w.compare_and_append([], 0, 10)
        batch.rewrite_ts(10, 11)
        await w.compare_and_append_batch([batch], 10, 11)
        assert await updates_of(client) == [("a", 1, 10, 1), ("b", 2, 10, 2)]
        copy.rewrite_ts(11, 12)
        with pytest.raises(ap.AlreadyAppended):
            await w.compare_and_append_batch([copy], 11, 12)
        assert await updates_of(client) == [("a", 1, 10, 1), ("b", 2, 10, 2)]
