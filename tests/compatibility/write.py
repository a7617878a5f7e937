"""Writes the location that `test_compatibility.py` reads for ever.

    python tests/compatibility/write.py FOLDER

It is run once per release, with that release installed, and its output is committed under the number of the
release. It uses public names only, so the release of its time or a later one can run it. `contents.json` says
what a reader must find; it is computed from the lists below, not read from the location.
"""

import asyncio
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import aiopersist as ap
from aiopersist.stash import TypedCollection

FOR_EVER_S = 3_000_000_000.0  # a lease that outlives the library
SETTINGS = ap.Settings(
    inline_writes_single_max_bytes=1024,
    txn_retention_s=FOR_EVER_S,
    once_keep_s=FOR_EVER_S,
    writer_lease_s=60.0,
)
PRICES = ap.Schema(key=str, val=int)
INLINE = [("tea", 3), ("milk", 1)]
BLOB = [(f"item {n:04}", n) for n in range(300)]
LATER = [(f"later {n:04}", n) for n in range(100)]
MOMENTS = [("a", 1, (0, 0), 1), ("b", 2, (0, 1), 1), ("c", 3, (1, 0), 1)]
PLACED = [("a", 10, 3, 1), ("b", 20, 9, 1), ("c", 30, 2, 1)]
MANY = [(f"order {n:04}", n, n % 10, 1) for n in range(200)]


class Person(BaseModel):
    name: str


class PersonWithCity(BaseModel):
    name: str
    city: str | None = None


async def prices(client: ap.Client) -> dict[str, Any]:
    """Inline and blob parts, transactions, a named hold, a critical since, a cursor, a staged batch."""
    async with client.writer("prices", PRICES) as w:
        await w.compare_and_append([(*row, 0, 1) for row in INLINE], 0, 1, txn=("orders", 41))
        await w.compare_and_append([(*row, 1, 1) for row in BLOB], 1, 2)
        await w.compare_and_append([("tea", 3, 2, -1), ("tea", 4, 2, 1)], 2, 3, txn=("orders", 42))
    holder = await client.reader("prices", hold=1, hold_name="nightly", lease_s=FOR_EVER_S)
    async with client.critical_since("prices", "pipeline", opaque=1) as position:
        await position.compare_and_downgrade_since(1, 2, 1)
    async with client.reader("prices", PRICES) as r, r.listen(as_of=1) as listening:
        cursor = listening.cursor
    await holder.aclose()
    sent = await client.workers.register_writer("prices", PRICES, FOR_EVER_S)
    async with client.workers.builder_from_transmittable(sent, 3, PRICES) as builder:
        await builder.extend([(*row, 3, 1) for row in LATER])
        batch = await builder.finish(4)
    return {
        "at": {
            "1": sorted([*INLINE, *BLOB]),
            "2": sorted([("tea", 4), ("milk", 1), *BLOB]),
        },
        "cursor": cursor,
        "batch": batch.to_transmittable().decode(),
        "batch_rows": LATER,
    }


async def people(client: ap.Client) -> dict[str, Any]:
    """A schema that evolved, with parts of both."""
    async with client.writer("people", ap.Schema(key=int, val=Person)) as w:
        await w.compare_and_append([(n, Person(name=f"person {n}"), 0, 1) for n in range(60)], 0, 1)
    number, _ = await client.schema("people")
    evolved = ap.Schema(key=int, val=PersonWithCity)
    await client.compare_and_evolve_schema("people", number, evolved)
    async with client.writer("people", evolved) as w:
        await w.compare_and_append([(60, PersonWithCity(name="ada", city="London"), 1, 1)], 1, 2)
    return {"names": [*(f"person {n}" for n in range(60)), "ada"], "city": "London"}


async def moments(client: ap.Client) -> dict[str, Any]:
    """Product times."""
    async with client.writer("moments", ap.Schema(key=str, val=int, time=2)) as w:
        lower, upper = ap.Antichain((0, 0)), ap.Antichain((0, 2), (2, 0))
        await w.compare_and_append(MOMENTS, lower, upper)
    return {"at": {"0,1": [("a", 1), ("b", 2)], "1,0": [("a", 1), ("c", 3)]}}


async def readings(client: ap.Client) -> dict[str, Any]:
    """Retention, compactions, a rollup; and a shard whose history is kept for a duration."""
    async with client.writer("readings", PRICES) as w:
        for time in range(40):
            await w.compare_and_append([(f"sensor {time % 3}", time, time, 1)], time, time + 1)
    await client.admin.retain("readings", 5)
    await client.admin.force_compaction("readings")
    await client.admin.force_gc("readings")
    async with client.writer("readings", PRICES) as w:
        await w.compare_and_append([("sensor 9", 40, 40, 1)], 40, 41)
    async with client.writer("lately", PRICES) as w:
        await w.write([("x", 1)])
    await client.admin.retain("lately", timedelta(days=7))
    return {"rows": sorted([*((f"sensor {time % 3}", time) for time in range(40)), ("sensor 9", 40)])}


async def ends(client: ap.Client) -> dict[str, Any]:
    """A shard that is finished, and one that was dropped."""
    for name in ("finished", "dropped"):
        async with client.writer(name, PRICES) as w:
            await w.compare_and_append([("last", 1, 0, 1)], 0, ap.Antichain())
    await client.admin.drop("dropped")
    return {"rows": [("last", 1)]}


async def orders(client: ap.Client) -> dict[str, Any]:
    """An `Indexed`: sealed updates, unsealed ones, a trace, a stream that was destroyed."""
    async with client.indexed("orders", background=False) as ix:
        placed = await ix.register("placed", str, int)
        many = await ix.register("many", str, int)
        await ix.write([(placed, PLACED), (many, MANY)])
        await ix.seal([placed, many], 4)
        await ix.step()
        await ix.write([(placed, [("d", 40, 7, 1)])])
        await ix.allow_compaction([(placed, 2)])
        await ix.register("gone", str, int)
        await ix.destroy("gone")
    advanced = [(key, val, max(time, 2), diff) for key, val, time, diff in [*PLACED, ("d", 40, 7, 1)]]
    return {"placed": sorted(advanced), "many": sorted(MANY), "seal": 4}


async def stash(client: ap.Client) -> dict[str, Any]:
    """A table with history, and a collection."""
    users: TypedCollection[int, Person] = TypedCollection("users", int, Person)
    async with client.stash() as opened:
        await users.upsert(opened, [(1, Person(name="ann")), (2, Person(name="bob"))])
        await users.upsert_key(opened, 2, Person(name="bert"))
        found = await opened.collection("prices", str, int)
        await opened.update_many(found, [(("milk", 1), 0, 1), (("tea", 3), 1, 1)])
        await opened.seal(found, 1)
    return {"users": {"1": "ann", "2": "bert"}, "prices": [("milk", 1, 1)], "upper": 1}


async def stock(client: ap.Client) -> dict[str, Any]:
    """Tables on a wall clock: a transaction, ids of `once=`, parts in blobs, a subscription's position."""
    table, log = client.table("stock", key=str, val=int), client.table("log", key=int, val=str)
    await table.put_many(BLOB)
    first = await table.put("tea", 3, once="first tea")
    before = await table.put("tea", 4)
    async with table.subscription(name="audit", start="now") as subscription:
        await table.put("milk", 1)
        step = await anext(subscription)
        await subscription.ack(step, durable=True)

        async def sell(tx: ap.Transaction) -> None:
            tx.put(table, "tea", (await tx.get(table, "tea") or 0) - 1)
            tx.put(log, 1, "sold tea")

        await client.transact(sell, once="sale 1")
    return {"first": first, "before": before, "tea": 3, "log": "sold tea", "entries": len(BLOB) + 2}


WRITES = (prices, people, moments, readings, ends, orders, stash, stock)


async def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    urls = {"blob": f"file://{folder.absolute()}/blob", "consensus": f"sqlite://{folder.absolute()}/state.db"}
    async with ap.open(**urls, settings=SETTINGS, maintenance=False) as client:
        contents = {write.__name__: await write(client) for write in WRITES}
    lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in contents.items()]
    (folder / "contents.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
