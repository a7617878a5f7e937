"""Keys of tables: which are one, which are refused, and what becomes of their type."""

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow
import pytest

import aiopersist as ap
from tests.support.schemas import NAN
from tests.table.test_types import Key, Val, Wider

PARIS = ZoneInfo("Europe/Paris")
TWICE = datetime(2024, 10, 27, 2, 30, tzinfo=PARIS)  # the hour that the zone has twice
SKIPPED = datetime(2024, 3, 31, 2, 30, tzinfo=PARIS)  # one that it does not have


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (pyarrow.float32(), [0.5, -0.0, math.inf, NAN], [0.1, 16777217.0]),
        (
            datetime,
            [TWICE + timedelta(hours=1), TWICE.astimezone(UTC), SKIPPED - timedelta(hours=1)],
            [TWICE, TWICE.replace(fold=1), SKIPPED, SKIPPED.replace(fold=1)],
        ),
        (Key, [Key(region="x", at=TWICE.astimezone(UTC))], [Key(region="x", at=TWICE)]),
    ],
    ids=["float32", "datetime", "model"],
)
async def test_a_key_that_does_not_come_back_is_refused(
    key: Any, good: list[Any], bad: list[Any], quiet: ap.Client
) -> None:
    """Goal: keys that Python tells apart are never one, and keys that are equal never two, on all ways in."""
    table = quiet.table("t", key, int)
    ways: dict[str, Callable[[Any], Any]] = {
        "put": lambda one: table.put(one, 1),
        "insert": lambda one: table.insert(one, 1),
        "update": lambda one: table.update(one, lambda old: 1),
        "put_many": lambda one: table.put_many([(one, 1)]),
        "many": lambda one: table.put_many([(one, 1)] * 100),
        "iterator": lambda one: table.put_many(iter([(good[0], 1), (one, 1)])),
        "transact": lambda one: quiet.transact(partial(put_in, table, one)),
        "get": table.get,
        "get_many": lambda one: table.get_many([one] * 20),
        "delete": table.delete,
    }
    for way in ways.values():
        for one in bad:
            with pytest.raises(ap.InvalidUpdate, match="not equal to it"):
                await way(one)
    assert await table.count() == 0
    for number, one in enumerate(good):
        await table.put(one, number)
        assert await table.get(one) == number
    assert await table.count() == len(good)


async def put_in(table: Any, key: Any, tx: ap.Transaction) -> None:
    tx.put_many(table, [(key, 1)])


async def test_keys_of_a_table_gain_no_fields(quiet: ap.Client) -> None:
    """Goal: with a new optional field two keys would be one to readers of the old type. Vals gain fields, and
    so do keys of plain shards."""
    await quiet.table("t", Val, Val).put(Val(number=1), Val(number=2))
    await (await quiet.writer("s", ap.Schema(Val, Val))).aclose()
    for name, schema in (("t", ap.Schema(Wider, Wider)), ("t", ap.Schema(Wider, Val))):
        with pytest.raises(ap.IncompatibleSchema, match="key"):
            await quiet.compare_and_evolve_schema(name, (await quiet.schema(name))[0], schema)
    await quiet.compare_and_evolve_schema("t", (await quiet.schema("t"))[0], ap.Schema(Val, Wider))
    await quiet.compare_and_evolve_schema("s", (await quiet.schema("s"))[0], ap.Schema(Wider, Wider))
