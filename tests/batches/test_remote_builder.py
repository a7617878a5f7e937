"""Goal: batches that other processes stage under one writer are appended once and whole; the sweep deletes
the blobs that they leave as soon as that writer is gone, and never before; it never deletes a blob of a
committed batch."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.model import Model
from tests.batches.remote_builder_kit import (
    BLOBS,
    built,
    contents,
    place,  # noqa: F401  # a fixture
    some_rows,
    swept,
)
from tests.conftest import StoreUrls
from tests.support.internals import session_of, shard_of, shards_of, staged_of
from tests.support.processes import Place, place_in_memory
from tests.support.schemas import SCHEMA, V1, V2
from tests.support.shards import is_sound
from tests.support.virtual import in_virtual_time

pytestmark = pytest.mark.usefixtures("started_postgres")


LAYOUTS: dict[str, dict[str, Any]] = {"inline": {}, "blobs": BLOBS}


async def writers(client: ap.Client) -> dict[str, Any]:
    return dict((await shards_of(client).at(await client.shard_id("t")).open()).writers)


ONE, TWO = ap.Schema(key=str, val=V1), ap.Schema(key=str, val=V2)


# --- built elsewhere, appended here -------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
async def test_batches_of_other_clients_are_one_append(location: StoreUrls, layout: str) -> None:
    """Goal: on every store; three build under one registration, at the same time, one appends."""
    settings, model = ap.Settings(**LAYOUTS[layout]), Model()
    urls = {"blob": location.blob, "consensus": location.consensus}
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ap.open(**urls, settings=settings, maintenance=False))
            for _ in range(4)
        ]
        w = await stack.enter_async_context(clients[0].writer("t", SCHEMA))
        told = w.to_transmittable()
        assert isinstance(told, bytes)
        for time in (0, 2):
            rows = [some_rows(10 * time + n, time) + some_rows(n, time + 1) for n in range(3)]
            staged = await asyncio.gather(
                *(built(c, told, r, time, time + 2) for c, r in zip(clients[1:], rows))
            )
            assert list(await writers(clients[0])) == [w.writer_id]  # one registration
            batches = [await w.batch_from_transmittable(data) for data in staged]
            await w.compare_and_append_batch(batches, time, time + 2)
            model.append([row for some in rows for row in some], [time], [time + 2])
        for as_of in range(4):
            assert await contents(clients[1], as_of) == model.contents(as_of)
        await w.aclose()
        assert not await swept(clients[2])
        await is_sound(clients[3])


async def test_a_batch_may_be_appended_where_it_was_built(place: Place) -> None:
    """Goal: no bytes are needed within a process; nor must the appending writer be the one it is under."""
    client, other = await place.client(), await place.client()
    async with client.writer("t", SCHEMA) as w, other.writer("t", SCHEMA) as v:
        async with client.workers.builder_from_transmittable(w.to_transmittable(), 0) as builder:
            await builder.extend(some_rows(1))
            batch = await builder.finish(1)
        await w.compare_and_append_batch([batch], 0, 1)
        data = await built(client, w.to_transmittable(), some_rows(2, 1), 1, 9)
        await v.compare_and_append_batch([await v.batch_from_transmittable(data)], 1, 2)
        again = await w.batch_from_transmittable(data)
        with pytest.raises(ap.AlreadyAppended):
            await w.compare_and_append_batch([again], 2, 3)
    model = Model()
    model.append(some_rows(1) + some_rows(2, 1), [0], [2])
    assert await contents(client) == model.contents(1)
    await is_sound(client)


async def test_product_times(place: Place) -> None:
    client, other = await place.client(), await place.client()
    schema: Any = ap.Schema(key=str, val=int, time=2)
    async with client.writer("t", schema) as w:
        for lower in (0, (0, 0, 0)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await other.builder_from_transmittable(w.to_transmittable(), lower)  # type: ignore[arg-type]
            assert caught.value.kind == ap.UsageKind.INVALID_TIME
        rows: Any = [(f"k{n}", n, (n % 2, n % 3), 1) for n in range(30)]
        data = await built(other, w.to_transmittable(), rows, (0, 0), (5, 5))  # type: ignore[arg-type]
        await w.compare_and_append_batch([await w.batch_from_transmittable(data)], (0, 0), (5, 5))
    async with other.reader("t", schema) as r, r.snapshot((1, 1)) as s:
        expected = sorted((k, v, d) for k, v, (a, b), d in rows if a <= 1 and b <= 1)
        assert await s.rows() == expected


async def test_the_rules_of_builders(place: Place) -> None:
    client, other = await place.client(), await place.client()
    async with client.writer("t", SCHEMA) as w:
        async with other.builder_from_transmittable(w.to_transmittable(), 5) as builder:
            assert builder.lower == ap.Antichain(5)
            with pytest.raises(ap.InvalidUsage) as caught:
                await builder.add("a", 1, 4, 1)
            assert caught.value.kind == ap.UsageKind.UPDATE_NOT_BEYOND_LOWER
            with pytest.raises(ap.InvalidUpdate):
                await builder.add("a", "x", 5, 1)
            await builder.add("a", 1, 5, 1)
            with pytest.raises(ap.InvalidUsage) as caught:
                await builder.finish(5)
            assert caught.value.kind == ap.UsageKind.UPDATE_BEYOND_UPPER


# --- schemas ------------------------------------------------------------------------------------------


async def test_the_schema_is_the_writers(place: Place) -> None:
    """Goal: also one that is newer than what the other process has seen; given, it must be one of the
    shard's."""
    client, other = await place.client(), await place.client()
    async with client.writer("t", ONE) as old:
        await other.schema("t")
        await client.compare_and_evolve_schema("t", 0, TWO)
        async with client.writer("t", TWO) as new:
            found = []
            for number, (w, schema, val) in enumerate(
                [
                    (old, None, {"name": "a"}),
                    (old, ONE, V1(name="b")),
                    (new, None, {"name": "c", "age": 3}),
                    (new, TWO, V2(name="d", age=4)),
                    (new, ONE, V1(name="e")),
                ]
            ):
                told = w.to_transmittable()
                async with other.builder_from_transmittable(told, 0, schema) as builder:
                    await builder.add(f"k{number}", val, 0, 1)
                    found.append((await builder.finish(1)).to_transmittable())
            for wrong in (SCHEMA, ap.Schema(key=bytes, val=V2)):
                with pytest.raises(ap.CodecMismatch):
                    await other.builder_from_transmittable(new.to_transmittable(), 0, wrong)
            batches = [await new.batch_from_transmittable(data) for data in found]
            await new.compare_and_append_batch(batches, 0, 1)
    async with other.reader("t", TWO) as r, r.snapshot() as s:
        rows = [(val.name, val.age) for _, val, _ in await s.rows()]
        assert rows == [("a", None), ("b", None), ("c", 3), ("d", 4), ("e", None)]


# --- the life of the writer ---------------------------------------------------------------------------


async def test_a_writer_that_was_closed(place: Place) -> None:
    """Goal: nothing can be staged, restored or appended any more; its blobs are the sweep's, and only
    then."""
    client, other = await place.client(), await place.client()
    w = await client.writer("t", SCHEMA)
    told = w.to_transmittable()
    first = await built(other, told, some_rows(1), 0, 1)
    second = await built(other, told, some_rows(2, 1), 0, 9)
    third = await built(other, told, some_rows(3), 0, 1)
    async with other.writer("t", SCHEMA) as v:
        await v.compare_and_append_batch([await v.batch_from_transmittable(first)], 0, 1)
        committed = {part.key for b in (await shard_of(v).open()).batches.values() for part in b.parts}
        early = await v.batch_from_transmittable(second)
        assert not await swept(other)
        await w.aclose()
        with pytest.raises(ap.InvalidUsage):
            w.to_transmittable()
        with pytest.raises(ap.BatchExpired):
            await other.builder_from_transmittable(told, 0)
        with pytest.raises(ap.BatchExpired):
            await v.batch_from_transmittable(third)
        with pytest.raises(ap.BatchExpired):
            await v.compare_and_append_batch([early], 1, 2)
        staged_of(early).consumed_elsewhere()
        leaked = await swept(other)
        assert leaked
        assert not leaked & committed
        assert await place.parts() == committed
    model = Model()
    model.append(some_rows(1), [0], [1])
    assert await contents(other) == model.contents(0)
    await is_sound(other)


async def test_a_writer_that_ends_while_a_batch_is_built(place: Place) -> None:
    client, other = await place.client(), await place.client()
    w = await client.writer("t", SCHEMA)
    v = await place.stack.enter_async_context(other.writer("t", SCHEMA))
    async with other.builder_from_transmittable(w.to_transmittable(), 0) as builder:
        await builder.extend(some_rows(1))
        await w.aclose()
        await builder.extend(some_rows(2))
        batch = await builder.finish(1)
    with pytest.raises(ap.BatchExpired):
        await v.compare_and_append_batch([batch], 0, 1)
    assert await v.fetch_recent_upper() == ap.Antichain(0)
    staged_of(batch).consumed_elsewhere()
    assert await swept(client)
    assert not await place.parts()


@in_virtual_time
async def test_a_builder_keeps_the_writer_alive() -> None:
    """Goal: a builder renews the lease, though the process that registered the writer is suspended or
    dead."""
    async with place_in_memory(**BLOBS) as place:
        client, other = await place.client(writer_lease_s=0.5), await place.client()
        w = await client.writer("t", SCHEMA)
        session_of(w).registration.stop()  # the process is gone
        async with other.writer("t", SCHEMA) as v:
            async with other.builder_from_transmittable(w.to_transmittable(), 0) as builder:
                for n in range(10):
                    await builder.extend(some_rows(n))
                    await asyncio.sleep(0.1)
                    await v.compare_and_append([], 0, 0)  # expires what is overdue
                batch = await builder.finish(1)
            await v.compare_and_append_batch([batch], 0, 1)
        model = Model()
        model.append([row for n in range(10) for row in some_rows(n)], [0], [1])
        assert await contents(other) == model.contents(0)


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "left"])
@in_virtual_time
async def test_a_builder_that_is_done_lets_the_writer_go(finished: bool) -> None:
    """Goal: the writer of a process that died does not live for ever because some process once built a
    batch."""
    async with place_in_memory(**BLOBS) as place:
        client, other = await place.client(writer_lease_s=0.4), await place.client()
        w = await client.writer("t", SCHEMA)
        session_of(w).registration.stop()
        async with other.builder_from_transmittable(w.to_transmittable(), 0) as builder:
            await builder.extend(some_rows(1))
            if finished:
                (await builder.finish(1)).to_transmittable()
        await asyncio.sleep(0.7)
        async with other.writer("t", SCHEMA) as v:
            await v.compare_and_append([], 0, 0)  # expires what is overdue
            assert list(await writers(other)) == [v.writer_id]


async def test_opening_renews_what_is_overdue_soon(place: Place) -> None:
    """Goal: the lease is the writer's own, not that of this process; a commit at most once a quarter."""
    client, other = await place.client(writer_lease_s=100.0), await place.client(writer_lease_s=10.0)
    w = await client.writer("t", SCHEMA)

    async def heard() -> float:
        return float((await writers(other))[w.writer_id].heartbeat)

    begun = await heard()
    place.clock.ahead_s += 20
    await built(other, w.to_transmittable(), some_rows(1), 0, 1)
    assert await heard() == begun
    place.clock.ahead_s += 10
    await built(other, w.to_transmittable(), some_rows(1), 0, 1)
    assert await heard() >= begun + 30


async def test_a_lease_that_ran_out(place: Place) -> None:
    client, other = await place.client(), await place.client()
    w = await client.writer("t", SCHEMA)
    told = w.to_transmittable()
    place.clock.ahead_s += 3601
    async with other.writer("t", SCHEMA) as v:
        await v.compare_and_append([], 0, 0)
        with pytest.raises(ap.BatchExpired):
            await other.builder_from_transmittable(told, 0)
        await w.fetch_recent_upper()
        await w.compare_and_append(some_rows(1), 0, 1)  # it registers anew
        data = await built(other, w.to_transmittable(), some_rows(2, 1), 1, 2)
        await w.compare_and_append_batch([await w.batch_from_transmittable(data)], 1, 2)
    await is_sound(other)


@in_virtual_time
async def test_a_writer_that_builds_many_batches_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: while the handle is open, what was staged under it can be appended, whatever it does itself."""
    async with place_in_memory(**BLOBS) as place:
        monkeypatch.setattr("aiopersist.shard.registration.BATCHES_MAX", 2)
        client, other = await place.client(writer_lease_s=0.4), await place.client()
        async with client.writer("t", SCHEMA) as w:
            data = await built(other, w.to_transmittable(), some_rows(1), 0, 1)
            await other.aclose()
            for _ in range(3):
                await (await w.batch(some_rows(2), 0, 1)).delete()
            await asyncio.sleep(0.3)
            batch = await w.batch_from_transmittable(data)
            await w.compare_and_append_batch([batch], 0, 1)
