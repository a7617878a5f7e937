"""Helpers that the tests of `format("aiopersist")` share."""

from collections import Counter
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.plain_client import Row, at
from tests.spark.schemas import PLAIN

TIMES: list[list[Row]] = [
    [("a", 1, 1), ("b", 2, 2)],
    [("a", 1, -1), ("a", 5, 1)],
    [("c", 3, 1)],
    [("b", 2, -1), ("d", None, 1)],
]


def contents(as_of: int) -> Counter[Row]:
    sums: Counter[Row] = Counter()
    for rows in TIMES[: as_of + 1]:
        for key, val, diff in rows:
            sums[key, val] += diff
    return Counter({row: n for row, n in sums.items() if n})


def fill(place: str, name: str, *, since: int = 0) -> None:
    async def work(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            for t, rows in enumerate(TIMES):
                updates = [(key, val, t, diff) for key, val, diff in rows]
                await writer.compare_and_append(updates, t, t + 1)
        async with client.critical_since(name, "c") as held:
            await held.compare_and_downgrade_since(0, 0, since)

    at(place, work)


@pytest.fixture(scope="module")
def filled(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A place with `TIMES` in shard `s`; `old` has since 2; `end` is finished; `void` is empty."""
    place = str(tmp_path_factory.mktemp("format") / "shards")
    fill(place, "s")
    fill(place, "old", since=2)

    async def work(client: ap.Client) -> None:
        async with client.writer("end", PLAIN) as writer:
            await writer.compare_and_append([("a", 1, 0, 1)], 0, ap.Antichain())
        await client.writer("void", PLAIN)
        await client.writer("pairs", ap.Schema(str, int, time=2))

    at(place, work)
    from aiopersist.spark import register

    register(spark)
    return place, "s"


def reading(spark: Any, place: str, **options: Any) -> Any:
    return spark.read.format("aiopersist").option("location", place).options(**options)


def writing(df: Any, place: str, mode: str = "append", **options: Any) -> Any:
    return df.write.format("aiopersist").mode(mode).option("location", place).options(**options)
