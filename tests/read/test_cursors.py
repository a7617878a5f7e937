"""Goal: a cursor resumes exactly where it was taken, in any process, or says why it cannot; it never
skips and never repeats."""

import asyncio
import random
import sqlite3
import string
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.model import Model, gathered
from tests.support.schemas import PRODUCT, SCHEMA

HEADER_SAFE = set(string.ascii_letters + string.digits + "-_.~")


@pytest.fixture
async def mem() -> AsyncIterator[ap.Client]:
    async with ap.open(f"mem://{uuid.uuid4().hex}") as client:
        yield client


async def filled(client: ap.Client, upper: int = 5, name: str = "s") -> ap.WriteHandle[str, int]:
    writer: ap.WriteHandle[str, int] = await client.writer(name, SCHEMA)
    for t in range(upper):
        await writer.compare_and_append([("k", t, t, 1)], t, t + 1)
    return writer


async def until(listen: ap.Listen, upper: Any) -> list[Any]:
    seen: list[Any] = []
    async with asyncio.timeout(50):
        async for step in listen.steps():
            seen += step.updates.rows()
            if step.upper == ap.Antichain(upper):
                break
    return seen


async def test_it_resumes_exactly_in_another_process(location: Any) -> None:
    """After every progress, told by it and by the listen; also when updates of an interval were handed
    over that is not closed."""
    place = {"blob": location.blob, "consensus": location.consensus}
    async with ap.open(**place) as client:
        writer = await filled(client, 3)
        cursor = (await (await client.reader("s", SCHEMA)).subscribe()).cursor
        seen: list[Any] = []
        for t in range(3, 9):
            await writer.compare_and_append([("k", t, t, 1), ("x", 1, t, 2)], t, t + 1)
            async with ap.open(**place) as other, other.reader("s", SCHEMA) as reader:
                assert set(cursor) <= HEADER_SAFE
                assert len(cursor) < 400
                async with reader.listen(cursor=cursor) as abandoned:
                    assert isinstance(await anext(abandoned), ap.Updates)
                    half = abandoned.cursor
                how = reader.subscribe if t % 2 else reader.listen
                async with how(cursor=half) as listen:
                    pending: list[Any] = []
                    async for item in listen:
                        if isinstance(item, ap.Progress):
                            assert item.cursor == listen.cursor
                            seen, pending, cursor = seen + pending, [], item.cursor
                            if item.upper == ap.Antichain(t + 1):
                                break
                        else:
                            pending += item.rows()
        at_2 = {("k", v, 2): 1 for v in range(3)}
        rest = {(k, v, t): d for t in range(3, 9) for k, v, d in [("k", t, 1), ("x", 1, 2)]}
        assert gathered(seen) == at_2 | rest
        assert len(seen) == 3 + 12


async def test_a_cursor_of_product_times_keeps_as_of(mem: ap.Client) -> None:
    writer, model = await mem.writer("p", PRODUCT), Model([(0, 0)])
    reader = await mem.reader("p", PRODUCT)
    as_of = (1, 1)
    history = [
        ([("a", 1, (0, 0), 1), ("b", 1, (0, 3), 1), ("c", 1, (2, 1), 1)], (0, 0), [(0, 4), (3, 0)]),
        ([("a", 1, (0, 4), -1), ("d", 1, (3, 0), 2), ("e", 1, (2, 5), 1)], [(0, 4), (3, 0)], [(6, 6)]),
    ]
    cursor = (await reader.subscribe(as_of)).cursor
    seen: list[Any] = []
    for rows, _, upper in history:
        lower, end = ap.Antichain(*model.upper), ap.Antichain(*upper)
        await writer.compare_and_append(rows, lower, end)
        model.append(rows, lower.elements, end.elements)
        async with reader.listen(cursor=cursor) as listen:
            assert listen.as_of == as_of
            async for step in listen.steps():
                seen, cursor = seen + step.updates.rows(), step.cursor
                break
    expected = model.changes(as_of, upper=model.upper)
    expected.update({(k, v, as_of): d for k, v, d in model.contents(as_of)})
    assert gathered(seen) == expected


async def test_before_and_after_the_snapshot_was_handed_over(mem: ap.Client) -> None:
    writer = await filled(mem)
    reader = await mem.reader("s", SCHEMA)
    listen = await reader.subscribe(3)
    before = listen.cursor
    first = await anext(listen)
    assert isinstance(first, ap.Updates)
    assert listen.frontier == ap.Antichain(3)
    middle = listen.cursor
    while not isinstance(item := await anext(listen), ap.Progress):
        pass
    assert item.upper == ap.Antichain(4) == listen.frontier
    await writer.compare_and_append([("z", 1, 5, 1)], 5, 6)
    whole = {("k", v, 3): 1 for v in range(4)} | {("k", 4, 4): 1, ("z", 1, 5): 1}
    for cursor in (before, middle):
        again = await reader.listen(cursor=cursor)
        assert (again.frontier, again.as_of) == (ap.Antichain(3), 3)
        assert gathered(await until(again, 6)) == whole
    later = await reader.subscribe(cursor=item.cursor)
    assert later.frontier == ap.Antichain(4)
    assert gathered(await until(later, 6)) == {("k", 4, 4): 1, ("z", 1, 5): 1}


async def test_until_goes_with_a_cursor(mem: ap.Client) -> None:
    await filled(mem, 9)
    reader = await mem.reader("s", SCHEMA)
    cursor = (await reader.listen(as_of=2)).cursor
    steps = [step async for step in (await reader.listen(cursor=cursor, until=6)).steps()]
    assert [u.time for step in steps for u in step.updates] == [3, 4, 5]
    assert steps[-1].upper == ap.Antichain(6)


async def test_a_cursor_at_the_end(mem: ap.Client) -> None:
    writer = await filled(mem, 2)
    await writer.compare_and_append([], 2, ap.Antichain())
    reader = await mem.reader("s", SCHEMA)
    steps = [step async for step in (await reader.listen(as_of=0)).steps()]
    async with reader.listen(cursor=steps[-1].cursor) as listen:
        assert listen.frontier == ap.Antichain()
        assert [item async for item in listen] == []


async def test_what_is_no_cursor_of_this_shard(mem: ap.Client) -> None:
    """Garbage of every kind: each prefix, each flipped character, another shard's."""
    await filled(mem)
    await filled(mem, name="other")
    reader = await mem.reader("s", SCHEMA)
    good = (await reader.listen(as_of=2)).cursor
    rng = random.Random(0)
    bad: list[Any] = ["", "!", "é", "AAAA", " " + good, good + "\n", 3, b"x", good.encode(), good + good]
    bad += [good[:n] for n in range(len(good))]
    for i in range(len(good) - 1):
        bad.append(good[:i] + rng.choice([c for c in "abcXYZ019-_" if c != good[i]]) + good[i + 1 :])
    bad.append((await (await mem.reader("other", SCHEMA)).listen(as_of=2)).cursor)
    for text in bad:
        with pytest.raises(ap.InvalidUsage) as caught:
            await rng.choice([reader.listen, reader.subscribe])(cursor=text)
        assert caught.value.kind is ap.UsageKind.INVALID_CURSOR, text


@pytest.mark.parametrize("what", ["listen", "subscribe"])
async def test_a_cursor_beside_as_of(mem: ap.Client, what: str) -> None:
    await filled(mem)
    reader = await mem.reader("s", SCHEMA)
    cursor = (await reader.listen(as_of=2)).cursor
    with pytest.raises(ap.InvalidUsage) as caught:
        await getattr(reader, what)(as_of=2, cursor=cursor)
    assert caught.value.kind is ap.UsageKind.INVALID_CURSOR


async def test_it_holds_nothing(mem: ap.Client) -> None:
    """After history was given up it is a `SinceViolation`; paired with a named hold it is good."""
    await filled(mem, 9)
    reader = await mem.reader("s", SCHEMA, hold_name="n", hold=0)
    old, kept = (await reader.listen(as_of=3)).cursor, (await reader.listen(as_of=5)).cursor
    snapshot = (await reader.subscribe(3)).cursor
    await reader.aclose()
    reader = await mem.reader("s", SCHEMA, hold_name="n")
    await reader.downgrade_since(5)
    for cursor in (old, snapshot):
        with pytest.raises(ap.SinceViolation) as caught:
            await reader.listen(cursor=cursor)
        assert (caught.value.as_of, caught.value.since) == (3, ap.Antichain(5))
    assert [u.time for u in await until(await reader.listen(cursor=kept), 9)] == [6, 7, 8]


async def test_of_a_restored_store(tmp_path: Path) -> None:
    """The version that a cursor was taken at is not there, or is another one: `Corruption`, since
    resuming would skip or repeat. A cursor from before the backup is good."""
    async with ap.open(tmp_path) as client:
        await filled(client)
        early = (await (await client.reader("s", SCHEMA)).listen(as_of=1)).cursor
    state = tmp_path / "state.db"
    with sqlite3.connect(state) as source, sqlite3.connect(tmp_path / "backup.db") as backup:
        source.backup(backup)
    source.close()
    backup.close()
    async with ap.open(tmp_path) as client:
        writer = await client.writer("s", SCHEMA)
        await writer.compare_and_append([("lost", 1, 5, 1)], 5, 6)
        late = (await (await client.reader("s", SCHEMA)).listen()).cursor
    for left in tmp_path.glob("state.db*"):
        left.unlink()
    (tmp_path / "backup.db").rename(state)
    async with ap.open(tmp_path) as client:
        for _ in range(6):  # first it is beyond the head, then the head has passed it
            reader = await client.reader("s", SCHEMA)
            with pytest.raises(ap.Corruption) as caught:
                await reader.listen(cursor=late)
            assert caught.value.shard_id == reader.shard_id
            with pytest.raises(ap.Corruption):
                await reader.subscribe(cursor=late)
            assert [u.time for u in await until(await reader.listen(cursor=early), 5)] == [2, 3, 4]
            await reader.aclose()
