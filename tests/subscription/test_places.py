"""Goal: a place within the contents stays one where other keys are chosen, and under another schema: nothing
is left out, and nothing comes twice; where it cannot be one, it is refused."""

from typing import Any

import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.subscription.kit import SMALL
from tests.support.processes import Place
from tests.support.shards import refused
from tests.table.kit import changes_of, in_time, steps_until
from tests.table.test_feed import contents_of


class V1(BaseModel):
    a: int
    text: str = "x" * 200


class V2(BaseModel):
    a: int
    text: str = "x" * 200
    b: int | None = None


OLD, NEW = ap.Schema(int, V1), ap.Schema(int, V2)


async def rest(table: ap.Table[Any, Any], **where: Any) -> list[Any]:
    """The keys of the contents that a feed still gives."""
    async with table.changes(**where) as feed:
        last = (await table.view()).upper
        steps = await steps_until(feed, lambda found: bool(found) and found[-1].upper >= last)
    return [change.key for change in changes_of(step for step in steps if step.contents)]


KEYS: dict[str, list[Any]] = {
    "ints": list(range(60)),
    "texts": [f"k{number:03}" for number in range(60)],
    "long": ["x" * 2000 + f"{number:03}" for number in range(20)],
}


@pytest.mark.parametrize("kind", KEYS)
async def test_a_cursor_goes_on_with_other_keys(place: Place, kind: str) -> None:
    """Goal: with those of the last step or without, chosen before or behind it, by either kind of feed. For
    keys that are no places, others are refused."""
    keys = KEYS[kind]
    client = await place.client(**SMALL)
    table = client.table("t", type(keys[0]), str)
    await table.put_many(dict.fromkeys(keys, "v" * 20))
    async with table.changes() as feed:
        whole = await contents_of(feed)
    async with table.changes(keys=keys[::2]) as feed:
        halved = await contents_of(feed)
    assert min(len(whole), len(halved)) > 2
    for step in (*whole[:-1], *halved[:-1]):
        last = step.changes[-1].key
        behind = [key for key in keys if key > last]
        for chosen in (behind[1:4], [last, *behind[::2]], keys[::2], keys[1::2], [], None):
            expected = [key for key in behind if chosen is None or key in chosen]
            is_its_own = chosen == keys[::2] if step in halved else chosen is None
            if kind == "long" and not is_its_own:
                cursor = rest(table, cursor=step.cursor, keys=chosen)
                assert await refused(cursor) is ap.UsageKind.INVALID_CURSOR
            else:
                assert await rest(table, cursor=step.cursor, keys=chosen) == expected


async def evolved(client: ap.Client, rows: list[tuple[int, V2]]) -> None:
    async with client.writer("s", OLD):
        pass
    await client.compare_and_evolve_schema("s", 0, NEW)
    async with client.writer("s", NEW) as writer:
        await writer.write(rows)


COUNT = 24


@pytest.mark.parametrize("first", [OLD, NEW])
async def test_consumers_with_another_schema_go_on(place: Place, first: ap.Schema[Any, Any, Any]) -> None:
    """Goal: turn by turn; each sees as many rows of a key as its schema has, of each key once."""
    client = await place.client(**SMALL)
    await evolved(client, [(key, V2(a=n // 3, b=n)) for key in range(COUNT) for n in range(6)])
    found: list[Any] = []
    turn = 0
    while len({key for key, _ in found}) < COUNT:
        schema = first if turn % 2 else (OLD if first is NEW else NEW)
        async with client.subscription("s", schema, name="sub") as sub:
            step = await in_time(anext(sub))
            await sub.ack(step)
            by_key: dict[int, list[Any]] = {}
            for update in step.updates:
                by_key.setdefault(update.key, []).append(update)
            found += [(key, turn) for key in by_key]
            for updates in by_key.values():
                assert sum(update.diff for update in updates) == 6
                assert len(updates) == (6 if schema is NEW else 2)
        turn += 1
    assert turn > 1
    assert [key for key, _ in found] == list(range(COUNT))


async def test_a_place_within_one_key_is_of_its_schema(place: Place) -> None:
    """Goal: rows of one key that were counted under one schema are not skipped under another."""
    client = await place.client(**SMALL)
    await evolved(client, [(1, V2(a=n // 3, b=n)) for n in range(60)])
    found: list[Any] = []
    for _ in range(3):
        async with client.subscription("s", NEW, name="sub") as sub:
            step = await in_time(anext(sub))
            assert step.contents
            await sub.ack(step)
            found += [update.val.b for update in step.updates]
    opening = client.subscription("s", OLD, name="sub")
    assert await refused(opening) is ap.UsageKind.INVALID_CURSOR
    while len(found) < 60:
        async with client.subscription("s", NEW, name="sub") as sub:
            step = await in_time(anext(sub))
            await sub.ack(step)
            found += [update.val.b for update in step.updates]
    assert found == list(range(60))


class K1(BaseModel, frozen=True):
    a: int


class K2(BaseModel, frozen=True):
    a: int
    b: int | None = None


@pytest.mark.parametrize("newest_first", [False, True])
async def test_keys_with_other_fields_are_other_keys(place: Place, newest_first: bool) -> None:
    """Goal: several keys of one type are one of the other, so a place behind one says nothing there."""
    client = await place.client(**SMALL)
    old, new = ap.Schema(K1, str), ap.Schema(K2, str)
    async with client.writer("s", old):
        pass
    await client.compare_and_evolve_schema("s", 0, new)
    async with client.writer("s", new) as writer:
        await writer.write([(K2(a=n // 4, b=n), "x" * 200) for n in range(400)])
    first, other = (new, old) if newest_first else (old, new)
    async with client.subscription("s", first, name="sub") as sub:
        step = await in_time(anext(sub))
        assert step.contents
        await sub.ack(step)
    assert await refused(client.subscription("s", other, name="sub")) is ap.UsageKind.INVALID_CURSOR
    async with client.subscription("s", first, name="sub") as sub:
        following = await in_time(anext(sub))
    assert max(update.key.a for update in step.updates) <= min(update.key.a for update in following.updates)
