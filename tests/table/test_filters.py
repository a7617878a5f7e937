"""Ranges, prefixes and conditions select what a plain loop over the entries selects."""

import asyncio
import random
from typing import Any, NamedTuple

import pyarrow.compute as pc
import pytest

import aiopersist as ap
from tests.support.schemas import NAN
from tests.support.shards import refused
from tests.table.kit import entries

WORDS = ["", "a", "a%", "aa", "ab", "a_b", "b", "é", "éa", "😀", "z" * 300, "z" * 300 + "b"]


class Pair(NamedTuple):
    name: str
    number: int | None


@pytest.mark.parametrize("inline", [16384, 0], ids=["inline", "blob"])
async def test_random_ranges(inline: int) -> None:
    """Any start, stop, prefix and where, in all calls; over inline parts and blobs, compacted or not."""
    rng = random.Random(1)
    limits: dict[str, Any] = {"inline_writes_single_max_bytes": inline, "row_group_bytes": 200}
    async with ap.open("mem://", settings=ap.Settings(**limits), maintenance=False) as client:
        table = client.table("t", str, int)
        model = {word: number for number, word in enumerate(WORDS)}
        for word, number in model.items():
            await table.put(word, number)
        for turn in range(60):
            if turn == 30:
                await client.admin.force_compaction("t")
            start, stop, prefix = (rng.choice([None, *WORDS, "zz", "a\x00"]) for _ in range(3))
            least = rng.choice([None, 3])
            where = None if least is None else pc.field("val") >= least
            expected = [
                (key, val)
                for key, val in sorted(model.items())
                if (start is None or key >= start)
                and (stop is None or key < stop)
                and (prefix is None or key.startswith(prefix))
                and (least is None or val >= least)
            ]
            chosen = {"start": start, "stop": stop, "prefix": prefix, "where": where}
            assert await entries(table, **chosen) == expected, chosen
            assert await table.count(**chosen) == len(expected)
            frame = await table.to_arrow(**chosen)
            assert list(zip(*frame.to_pydict().values(), strict=True)) == expected


async def test_composite_keys(quiet: ap.Client) -> None:
    """Ranges of tuples with optional fields: absent comes first."""
    keys = [Pair(name, number) for name in ("", "a", "b") for number in (None, -1, 0, 5)]
    table = quiet.table("t", Pair, int)
    await table.put_many((key, number) for number, key in enumerate(keys))
    for i, start in enumerate(keys):
        for j, stop in enumerate(keys):
            assert [key async for key, _ in table.items(start=start, stop=stop)] == keys[i:j]
    assert await table.count(start=Pair("a", 3), stop=Pair("b", None)) == 1


async def test_floats(quiet: ap.Client) -> None:
    """NaN is the greatest key; the parts' statistics do not hide it."""
    keys = [-1.0, 0.0, 2.0, float("inf"), NAN]
    table = quiet.table("t", float, int)
    for number, key in enumerate(keys):
        await table.put(key, number)
    for compacted in (False, True):
        if compacted:
            await quiet.force_compaction("t")
        for number, key in enumerate(keys):
            assert [val async for _, val in table.items(start=key)] == list(range(number, 5))
            assert [val async for _, val in table.items(stop=key)] == list(range(number))


async def test_bytes_have_prefixes(quiet: ap.Client) -> None:
    """Of their own type alone; other types have none."""
    table = quiet.table("t", bytes, int)
    await table.put_many({b"": 0, b"\x00": 1, b"\x00\xff": 2, b"\xff": 3})
    assert [val async for _, val in table.items(prefix=b"\x00")] == [1, 2]
    assert await table.count(prefix=b"") == 4
    numbers = quiet.table("n", int, int)
    for wrong in ("\x00", 5, bytearray(b"\x00")):
        assert await refused(table.count(prefix=wrong)) is ap.UsageKind.INVALID_TYPE
    for wrong in ("1", 1, b"1"):
        assert await refused(numbers.count(prefix=wrong)) is ap.UsageKind.INVALID_TYPE


async def test_bad_conditions(quiet: ap.Client) -> None:
    """`where` is an expression over key and val, also of a table that is empty."""
    table = quiet.table("t", str, int)
    for _ in range(2):
        for where in ("val > 3", pc.field("no") > 3, 5, True):
            assert await refused(table.count(where=where)) is ap.UsageKind.INVALID_COLUMN
            assert await refused(table.count(start="a", where=where)) is ap.UsageKind.INVALID_COLUMN
        await table.put("a", 1)


async def test_items_are_of_one_moment(client: ap.Client) -> None:
    """What is put while they come is not among them; an iteration may end early."""
    table = client.table("t", int, int)
    await table.put_many((i, 0) for i in range(3000))
    found = []
    async for key, val in table.items():
        if not found:
            await table.put_many((i, 1) for i in range(4000))
        found.append((key, val))
    assert found == [(i, 0) for i in range(3000)]
    async for _ in table.items():
        break
    await asyncio.gather(*(table.count() for _ in range(3)))
