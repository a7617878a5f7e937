"""Programs that follow a subscription and write what they make of it in the same commit."""

from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA
from tests.worlds.scene import Scene


async def biller(scene: Scene, name: str, client: ap.Client) -> None:
    """All of them write a bill for each event, and fight for the subscription."""
    await consume(scene, client, "bills", {"name": "billing"})


async def sharer(scene: Scene, name: str, client: ap.Client) -> None:
    """Two shares divide the events among them."""
    share = (int(name.removeprefix("sharer")) % 2, 2)
    await consume(scene, client, "shares", {"name": "shared", "share": share})


async def consume(scene: Scene, client: ap.Client, into: str, wanted: Any) -> None:
    table = client.table(into, str, int)

    async def bill(tx: ap.Transaction) -> None:
        for update in step.updates:
            tx.put(table, str(update.val), (await tx.get(table, str(update.val)) or 0) + update.diff)

    try:
        async with client.subscription("events", SCHEMA, **wanted) as sub:
            while (step := await scene.next_of(sub)) is not None:
                if scene.rolled(0.2):
                    await scene.slowly()
                await client.transact(bill, acks=[(sub, step)])
                scene.counts["billed"] += 1
    except ap.OpaqueMismatch:
        scene.counts["taken over"] += 1
    except ap.InvalidUsage as error:
        if error.kind is not ap.UsageKind.CONSUMED:
            raise
        scene.counts["consumed before"] += 1
    if not scene.is_over:
        raise ap.StorageUnavailable("again")


async def acker(scene: Scene, name: str, client: ap.Client) -> None:
    """What was acknowledged for good does not come again, to whoever takes over afterwards. Whoever opened
    before, and has heard nothing of the other one yet, may be told it, and cannot acknowledge it."""
    promised = scene.ledger.promised
    before = promised.get("acked", 0)
    try:
        async with client.subscription("events", SCHEMA, name="acked") as sub:
            while (step := await scene.next_of(sub)) is not None:
                again = [u.time for u in step.updates if u.time < before and not step.contents]
                assert not again, f"acknowledged until {before}, and told again: {again}"
                known = promised.get("acked", 0)
                await sub.ack(step, durable=True)
                if not step.contents:
                    assert known < step.upper.time, f"acknowledged until {known}, and again: {step.upper}"
                    promised["acked"] = max(promised.get("acked", 0), step.upper.time)
                scene.counts["acknowledged"] += 1
                if scene.rolled(0.1):
                    raise ap.StorageUnavailable("it ends without a word")
    except ap.OpaqueMismatch:
        scene.counts["taken over"] += 1
    if not scene.is_over:
        raise ap.StorageUnavailable("again")


async def relay(scene: Scene, name: str, client: ap.Client) -> None:
    """Copies the events to another shard: each step and its acknowledgement are one commit."""
    try:
        async with (
            client.subscription("events", SCHEMA, name="relay") as sub,
            client.writer("copies", SCHEMA) as handle,
        ):
            while (step := await scene.next_of(sub)) is not None:
                time = (await handle.fetch_recent_upper()).time
                rows = [(u.key, u.val, time, u.diff) for u in step.updates]
                try:
                    await sub.commit(step, [ap.Append(handle, rows, time, time + 1)])
                except ap.UpperMismatch:
                    break  # an earlier life has written: begin again
                scene.counts["relayed"] += 1
    except (ap.OpaqueMismatch, ap.LeaseExpired):
        scene.counts["taken over"] += 1
    except ap.InvalidUsage as error:
        if error.kind is not ap.UsageKind.CONSUMED:
            raise
        scene.counts["consumed before"] += 1
    if not scene.is_over:
        raise ap.StorageUnavailable("again")
