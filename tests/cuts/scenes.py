"""Appends and reads with one fault. A scene prepares itself on a stage, and gives the call."""

from collections.abc import Awaitable, Callable
from typing import Any

import aiopersist as ap
from tests.cuts.stage import NAME, OTHER, SCHEMA, Stage, at, few, many
from tests.support.shards import Call

Scene = Callable[[Stage], Awaitable[Call]]
SCENES: dict[str, Scene] = {}


def scene(prepare: Scene) -> Scene:
    SCENES[prepare.__name__] = prepare
    return prepare


# --- opening ------------------------------------------------------------------------------------------


@scene
async def open_client(s: Stage) -> Call:
    await s.client.aclose()

    async def call() -> None:
        s.client = None
        s.client = await s.opened(open_timeout_s=0.5)
        await s.client.ping()

    return call


@scene
async def open_new_writer(s: Stage) -> Call:
    async def call() -> None:
        await s.client.writer(NAME, SCHEMA)

    async def there(client: Any) -> None:
        async with client.writer(NAME, SCHEMA) as w:
            assert w.upper == ap.Antichain(0)

    s.afresh.append(there)
    return call


@scene
async def open_writer_and_close(s: Stage) -> Call:
    await s.filled()

    async def call() -> None:
        async with s.client.writer(NAME, SCHEMA):
            pass

    return call


@scene
async def close_client(s: Stage) -> Call:
    await s.filled()
    await s.client.reader(NAME, SCHEMA, hold=2)

    async def call() -> None:
        client, s.client = s.client, None
        await client.aclose()

    return call


# --- appends ------------------------------------------------------------------------------------------


def appending(rows: list[Any], call: Callable[[Any, list[Any]], Awaitable[Any]]) -> Scene:
    async def prepare(s: Stage) -> Call:
        w = await s.filled()

        async def append() -> None:
            await s.append(w, rows, lambda: call(w, rows))

        async def again() -> None:
            """Its handle goes on, with any outcome."""
            await s.append(w, rows := few("again"), lambda: w.write(rows))

        s.after.append(again)
        return append

    return prepare


SCENES["compare_and_append_few"] = appending(
    few("x"), lambda w, rows: w.compare_and_append(at(3, rows), 3, 4)
)
SCENES["compare_and_append_many_parts"] = appending(
    many("x"), lambda w, rows: w.compare_and_append(at(3, rows), 3, 4)
)
SCENES["compare_and_append_txn"] = appending(
    many("x"), lambda w, rows: w.compare_and_append(at(3, rows), 3, 4, txn=("app", 1))
)
SCENES["append"] = appending(many("x"), lambda w, rows: w.append(at(3, rows), 2, 4))
SCENES["write"] = appending(many("x"), lambda w, rows: w.write(rows))


@scene
async def append_several(s: Stage) -> Call:
    one, two = await s.filled(), await s.filled(OTHER)

    async def call() -> None:
        rows, others = many("x"), many("y")

        async def both() -> None:
            await s.client.compare_and_append_many(
                [ap.Append(one, at(3, rows), 3, 4), ap.Append(two, at(3, others), 3, 4)]
            )

        await s.append(one, rows, lambda: s.append(two, others, both, OTHER))

    return call


@scene
async def build_and_append(s: Stage) -> Call:
    w = await s.filled()

    async def call() -> None:
        rows = many("x")
        async with w.builder(3) as builder:
            for key, val in rows:
                await builder.add(key, val, 3, 1)
            batch = await builder.finish(4)
        await s.append(w, rows, lambda: w.compare_and_append_batch([batch], 3, 4))

    return call


@scene
async def append_staged(s: Stage) -> Call:
    """A batch that was not appended is the caller's again."""
    w, rows = await s.filled(), many("x")
    batch = await w.batch(at(3, rows), 3, 4)

    async def call() -> None:
        await s.append(w, rows, lambda: w.append_batch(batch, 3, 4))

    async def again() -> None:
        if s.told[-1].happened is False:
            try:
                await w.append_batch(batch, 3, 4)
            except ap.BatchExpired:
                assert s.trouble.ahead_s
            else:
                s.told[-1].happened = True

    s.after.append(again)
    return call


@scene
async def transmit_and_append(s: Stage) -> Call:
    w = await s.filled()

    async def call() -> None:
        rows = many("x")
        data = (await w.batch(at(3, rows), 3, 4)).to_transmittable()
        batch = await w.batch_from_transmittable(data)
        await s.append(w, rows, lambda: w.append_batch(batch, 3, 4))

    return call


@scene
async def build_elsewhere(s: Stage) -> Call:
    w = await s.filled()

    async def call() -> None:
        rows = many("x")
        named = await s.client.workers.register_writer(NAME, SCHEMA, 600.0)
        async with s.client.workers.builder_from_transmittable(named, 3) as builder:
            await builder.extend(at(3, rows))
            data = (await builder.finish(4)).to_transmittable()
        batch = await w.batch_from_transmittable(data)
        await s.append(w, rows, lambda: w.append_batch(batch, 3, 4))
        await s.client.workers.release_writer(named)

    return call


@scene
async def flush_and_delete_a_batch(s: Stage) -> Call:
    w = await s.filled()
    batch, other = await w.batch(at(3, few("x")), 3, 4), await w.batch(at(3, many("y")), 3, 4)

    async def call() -> None:
        await batch.flush_to_blob()
        await batch.delete()
        await other.delete()

    return call


# --- reading ------------------------------------------------------------------------------------------


@scene
async def snapshot(s: Stage) -> Call:
    await s.filled()

    async def call() -> None:
        async with s.client.reader(NAME, SCHEMA) as r, r.snapshot(2) as snapshot:
            s.check_rows(NAME, await snapshot.rows())

    return call


@scene
async def listen(s: Stage) -> Call:
    """What was told before the trouble and after it is all there is, once; or it fails for good."""
    await s.filled()
    r = await s.client.reader(NAME, SCHEMA, hold=2)
    listening = await r.subscribe(2)
    followed: list[Any] = []

    async def call() -> None:
        async for item in listening:
            if isinstance(item, ap.Progress):
                if ap.Antichain(3) <= item.upper:
                    break
            else:
                followed.extend((u.key, u.val, u.diff) for u in item)

    async def rest() -> None:
        try:
            while not ap.Antichain(3) <= listening.frontier:
                item = await anext(listening)
                if isinstance(item, ap.Updates):
                    followed.extend((u.key, u.val, u.diff) for u in item)
        except (ap.StorageUnavailable, ap.Indeterminate, ap.LeaseExpired):
            return
        s.check_rows(NAME, followed)

    s.after.append(rest)
    return call


@scene
async def read_shared(s: Stage) -> Call:
    await s.filled()

    async def call() -> None:
        rows: list[Any] = []
        async with s.client.workers.shared_read(NAME) as shared:
            for piece in await shared.pieces(3):
                async for batch in s.client.workers.read_piece(piece):
                    rows += [(r["key"], r["val"], r["diff"]) for r in batch.to_pylist()]
        s.check_rows(NAME, rows)

    return call


@scene
async def hold_by_name(s: Stage) -> Call:
    await s.filled()
    async with s.client.reader(NAME, SCHEMA, hold=2, hold_name="mine"):
        pass

    async def call() -> None:
        async with s.client.reader(NAME, SCHEMA, hold=2, hold_name="mine") as r:
            await r.downgrade_since(2)

    async def over() -> None:
        async with s.client.reader(NAME, SCHEMA, hold=2, hold_name="mine") as r:
            await r.release()

    s.after.append(over)
    return call


@scene
async def move_a_critical_since(s: Stage) -> Call:
    w = await s.filled()
    await w.compare_and_append([], 3, 5)

    async def call() -> None:
        async with s.client.critical_since(NAME, "c", 7) as c:
            await c.compare_and_downgrade_since(7, 8, 3)
        async with s.client.critical_since(NAME, "c") as c:
            await c.release(8)

    async def goes_on() -> None:
        async with s.client.critical_since(NAME, "c", 7) as c:
            await c.compare_and_downgrade_since(c.opaque, 9, 3)
            await c.release(9)

    s.after.append(goes_on)
    return call
