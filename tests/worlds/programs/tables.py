"""Programs on tables: each breaks a rule if a transaction is not what it says."""

import asyncio

import aiopersist as ap
from tests.worlds.scene import ACCOUNTS, EACH, Scene


async def counter(scene: Scene, name: str, client: ap.Client) -> None:
    """Each request counts once, however often it is repeated."""
    counts = client.table("counts", str, int)
    done, begun = scene.ledger.done, scene.ledger.begun
    while (number := done[name]) < max(scene.writes, begun[name]):
        numbers = range(number, number + scene.dice.choice([1, 2, 3]))
        begun[name] = max(begun[name], numbers.stop)
        ids = [f"{name}-{one}" for one in numbers]
        await asyncio.gather(*(counts.update("all", lambda n: (n or 0) + 1, once=one) for one in ids))
        done[name] = numbers.stop
        await scene.pause()


async def teller(scene: Scene, name: str, client: ap.Client) -> None:
    """A get sees all that was acknowledged before it began."""
    counts, rows = client.table("counts", str, int), client.table("rows", str, int)
    while not scene.is_over:
        acknowledged = sum(n for who, n in scene.ledger.done.items() if who.startswith("counter"))
        written = dict(scene.ledger.written.get("rows", {}))
        found = await counts.get("all") or 0
        seen = await counts.update("all", lambda count: count)  # writes nothing, and looks
        assert isinstance(seen, int | None)
        least = min(found, seen or 0)
        assert least >= acknowledged, f"{least} were counted, and {acknowledged} were told so"
        for key, val in written.items():
            there = await rows.get(key)
            assert there is not None and there >= val, (key, there, val)
        scene.counts["told"] += 1
        await scene.pause()


async def putter(scene: Scene, name: str, client: ap.Client) -> None:
    """Puts many keys at a time, deletes some again, and inserts what must not be there."""
    rows = client.table("rows", str, int)
    while (number := scene.ledger.done[name]) < scene.writes:
        key = f"{name}-{number}"
        await rows.put_many({key: number, f"{key}-b": number})
        try:
            await rows.insert(key, -1)
        except ap.KeyExists:
            pass
        else:
            raise AssertionError(f"{key} was inserted, and was there")
        await rows.delete(f"{key}-b")
        assert await rows.get_many([key, f"{key}-b"]) == {key: number}
        scene.ledger.write("rows", key, number)
        scene.ledger.done[name] = number + 1
        await scene.pause()


async def mover(scene: Scene, name: str, client: ap.Client) -> None:
    """What there is in all accounts stays the same, at any time."""
    money, moves = client.table("money", str, int), client.table("moves", str, int)

    async def move(tx: ap.Transaction) -> None:
        have, has = await tx.get(money, one) or 0, await tx.get(money, other) or 0
        tx.put(money, one, have - 1)
        tx.put(money, other, has + 1)
        tx.put(moves, f"{name}-{number}", 1)

    while (number := scene.ledger.done[name]) < scene.writes:
        one, other = scene.dice.sample(ACCOUNTS, 2)
        await client.transact(move, once=f"{name}-{number}")
        scene.ledger.done[name] = number + 1
        found = await money.get_many(ACCOUNTS)
        assert sum(found.values()) == EACH * len(ACCOUNTS), found
        await scene.pause()


async def guard(scene: Scene, name: str, client: ap.Client) -> None:
    """Two are on duty; one of them may leave while the other stays, whoever decides it."""
    duty, queue = client.table("duty", str, int), client.table("queue", str, int)

    async def leave(tx: ap.Transaction) -> bool:
        both = await tx.get_many(duty, ("ann", "bob"))
        free = sum(both.values()) == 2
        if free:
            tx.put(duty, mine, 0)
        waiting = [key async for key, _ in tx.items(queue, prefix="w")]
        if len(waiting) < 3:
            tx.put(queue, f"w{name}-{number}", 1)
        else:
            tx.delete(queue, *waiting)
        return free

    while (number := scene.ledger.done[name]) < scene.writes:
        mine = scene.dice.choice(["ann", "bob"])
        left = await client.transact(leave)
        scene.ledger.done[name] = number + 1
        there = await duty.get_many(("ann", "bob"))
        assert sum(there.values()) >= 1, f"nobody is on duty: {there}"
        waiting = await queue.count(prefix="w")
        assert waiting <= 3, f"{waiting} wait, and there is room for 3"
        if left:
            await duty.put(mine, 1)
        await scene.pause()
