"""Programs that append to shards, by every way there is."""

import asyncio
from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA
from tests.worlds.scene import Scene


async def writer(scene: Scene, name: str, client: ap.Client) -> None:
    """A number is sent once only, whatever becomes of it. Some appends are cancelled, and settled."""
    async with client.writer("events", SCHEMA) as handle:
        while scene.ledger.done[name] < scene.writes:
            number = scene.number(name)
            try:
                if scene.rolled(0.3):
                    await cancelled(scene, handle, number)
                elif scene.rolled(0.2):
                    await together(scene, handle, [number, scene.number(name), scene.number(name)])
                else:
                    scene.ledger.told[number] = await append(scene, handle, number)
            except ap.LeaseExpired:
                return
            await scene.pause()


async def together(scene: Scene, handle: Any, numbers: list[int]) -> None:
    """Writes that wait for one commit."""
    calls = [handle.write([(*scene.row(number), 1)]) for number in numbers]
    times = await asyncio.gather(*calls, return_exceptions=True)
    for number, time in zip(numbers, times, strict=True):
        if isinstance(time, BaseException):
            raise time
        scene.ledger.told[number] = int(time)


async def append(scene: Scene, handle: Any, number: int) -> int:
    if scene.rolled(0.5):
        return int(await handle.write([(*scene.row(number), 1)]))
    told = scene.ledger.told.values()
    while True:
        if told and scene.rolled(0.3):
            time: Any = max(told) + 1  # as another program says, before this one has looked
        else:
            time = (await handle.fetch_recent_upper()).time
        try:
            await handle.compare_and_append([(*scene.row(number), time, 1)], time, time + 1)
        except ap.UpperMismatch as error:
            scene.counts["mismatches"] += 1
            scene.promise(error.current.time > time, f"refused by an old state: {error}")
        else:
            return int(time)


async def cancelled(scene: Scene, handle: Any, number: int) -> None:
    """What `settle` says is true, at once and for ever."""
    time = (await handle.fetch_recent_upper()).time
    rows, began = [(*scene.row(number), time, 1)], asyncio.Event()

    async def called() -> None:
        began.set()
        await handle.compare_and_append(rows, time, time + 1)

    call = asyncio.create_task(called())
    await began.wait()  # before its first step there is nothing to settle
    await scene.world.sleep(scene.dice.choice([0.0, 0.002, 0.005, 0.01]))
    call.cancel()
    try:
        await call
    except asyncio.CancelledError:
        if scene.rolled(0.5):
            await scene.slowly()  # its version may be truncated meanwhile
        outcome = await handle.settle()
        scene.counts[f"settled: {type(outcome).__name__}"] += 1
        if isinstance(outcome, ap.Committed):
            assert outcome.upper.time == time + 1, (outcome, time)
            scene.ledger.told[number] = time
        elif outcome is not None:
            scene.ledger.refused.add(number)
    except ap.UpperMismatch:
        scene.ledger.refused.add(number)
    else:
        scene.ledger.told[number] = time


async def repeater(scene: Scene, name: str, client: ap.Client) -> None:
    """Each number is sent until it is acknowledged, by `txn=` or `once=`: it is there once."""
    async with client.writer("events", SCHEMA) as handle:
        while len(scene.ledger.written.get(name, ())) < scene.writes:
            at = scene.ledger.done[name]
            number = 10_000 * int(name.removeprefix("repeater")) + 10_000 + at
            scene.ledger.sent.add(number)
            marks: Any = {"txn": (name, at)} if at % 2 else {"once": f"{name}-{at}"}
            try:
                await handle.write([(*scene.row(number), 1)], **marks)
            except ap.LeaseExpired:
                return
            scene.ledger.write(name, number, None)
            scene.ledger.done[name] += 1
            await scene.pause()


async def replica(scene: Scene, name: str, client: ap.Client) -> None:
    """All replicas append the same definite data, and need not know of each other."""
    async with client.writer("ticks", SCHEMA) as handle:
        while scene.ledger.done[name] < scene.writes:
            lower = scene.ledger.done[name]
            upper = lower + scene.dice.choice([1, 1, 2, 5])
            rows = [("tick", time, time, 1) for time in range(lower, upper)]
            try:
                if scene.rolled(0.3):
                    await handle.append_batch(await handle.batch(rows, lower, upper), lower, upper)
                else:
                    await handle.append(rows, lower, upper)
            except (ap.LeaseExpired, ap.BatchExpired):
                return
            scene.ledger.done[name] = upper
            scene.ledger.write("ticks", upper, None)
            await scene.pause()


async def stager(scene: Scene, name: str, client: ap.Client) -> None:
    """Builds batches and hands them over; whoever takes one first appends it."""
    async with client.writer("events", SCHEMA) as handle:
        while scene.ledger.done[name] < scene.writes:
            number = scene.number(name)
            try:
                async with handle.builder(0) as builder:
                    await builder.add(*scene.row(number), 0, 1)
                    batch = await builder.finish(1)
                if scene.rolled(0.2):
                    await batch.delete()
                    scene.ledger.refused.add(number)
                    continue
                scene.ledger.batches[number] = batch.to_transmittable()
                await scene.pause()
                await take_over(scene, handle)
            except (ap.LeaseExpired, ap.BatchExpired):
                return
        while scene.ledger.batches:
            try:
                await take_over(scene, handle)
            except ap.BatchExpired:
                return
            await scene.pause()


async def take_over(scene: Scene, handle: Any) -> None:
    if not scene.ledger.batches:
        return
    number, data = scene.dice.choice(list(scene.ledger.batches.items()))
    try:
        batch = await handle.batch_from_transmittable(data)
    except ap.BatchExpired:
        scene.ledger.batches.pop(number, None)
        scene.counts["batches expired"] += 1
        return
    while True:
        time = (await handle.fetch_recent_upper()).time
        batch.rewrite_ts(time, time + 1)
        try:
            await handle.compare_and_append_batch([batch], time, time + 1)
        except ap.UpperMismatch:
            continue
        except ap.AlreadyAppended:
            scene.counts["appended by another"] += 1
        else:
            scene.ledger.told[number] = time
            scene.counts["handed over"] += 1
        scene.ledger.batches.pop(number, None)
        scene.ledger.write("handed over", number, None)
        return


async def joint(scene: Scene, name: str, client: ap.Client) -> None:
    """Appends to two shards at one moment: both have it, or neither."""
    async with client.writer("events", SCHEMA) as one, client.writer("twin", SCHEMA) as other:
        while scene.ledger.done[name] < scene.writes:
            number = scene.number(name)
            scene.ledger.write("twin sent", number, None)
            while True:
                times = [(await handle.fetch_recent_upper()).time for handle in (one, other)]
                pairs = zip((one, other), times, strict=True)
                row = scene.row(number)
                appends = [ap.Append(handle, [(*row, time, 1)], time, time + 1) for handle, time in pairs]
                try:
                    await client.compare_and_append_many(appends)
                except ap.UpperMismatch:
                    continue
                except ap.LeaseExpired:
                    return
                scene.ledger.told[number] = times[0]
                scene.ledger.write("twin", number, times[1])
                break
            await scene.pause()
