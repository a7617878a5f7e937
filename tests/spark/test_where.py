"""Goal: the option `where` reads exactly the rows that Spark would filter, by fewer fetches; and why it is an
option: what Spark pushes down for one query reaches another."""

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.spark.format_kit import reading
from tests.spark.plain_client import at, counted
from tests.spark.schemas import PLAIN
from tests.spark.test_hooks import _in_one_process, source  # noqa: F401  # a fixture

CLOCKS_BACK = datetime(2026, 10, 25, 1, tzinfo=UTC)  # in the zone of the session
NAN = float("nan")


class Place(BaseModel):
    city: str | None
    floor: int | None


class Val(BaseModel):
    amount: float | None
    price: Decimal | None
    at: datetime | None
    day: date | None
    name: str | None
    good: bool | None
    place: Place


AMOUNTS = [0.0, -0.0, 1.5, NAN, float("inf"), -1.5, None]
PRICES = [Decimal("1.1"), Decimal("1.100001"), Decimal(-3), Decimal(10) ** 12, None]
NAMES = ["", "a", "b", "ab", "é", "\U0010ffff", "B", None]
CASES = {
    "amount = 0": "amount = 0",
    "amount = -0.0": "amount = 0",
    "amount != 1.5": "amount != 1.5",
    "amount < 1.5": "amount < 1.5",
    "not amount < 1.5": "not amount < 1.5",
    "amount >= 1.5": "amount >= 1.5 and not isnan(amount)",  # to Spark NaN is the greatest
    "amount in (1.5, 0)": "amount in (1.5, 0)",
    "price = 1.1": "price = 1.1",
    "price > 1.1000001": "price > 1.1000001",
    "price in (1.1, -3, 7)": "price in (1.1, -3, 7)",
    "not price <= 1.1": "not price <= 1.1",
    "at = '2026-10-25T02:30:00+02:00'": "at = timestamp'2026-10-25T00:30:00Z'",
    "at < '2026-10-25T01:00:00Z'": "at < timestamp'2026-10-25T02:00:00+01:00'",
    "at >= '2026-10-25T02:30:00+01:00' or at is null": "at >= timestamp'2026-10-25T01:30:00Z' or at is null",
    "day > '2026-02-28' and day <= '2026-03-02'": "day > date'2026-02-28' and day <= date'2026-03-02'",
    "name = 'a'": "name = 'a'",
    "name > 'a' and name < 'é'": "name > 'a' and name < 'é'",
    "name is null": "name is null",
    "name is not null and not good": "name is not null and not good",
    "name in ('a', 'é', 'none')": "name in ('a', 'é', 'none')",
    "name not in ('a', 'é')": "name not in ('a', 'é')",
    "not (name = 'a' or good)": "not (name = 'a' or good)",
    "val.place.city = 'x'": "place.city = 'x'",
    "val.place.floor is null or val.place.floor > 2": "place.floor is null or place.floor > 2",
    "key >= 10 and key < 13": "key >= 10 and key < 13",
    "key > 1000": "key > 1000",
}
"""Conditions, as the option has them and as Spark's SQL has them."""


@pytest.fixture
def registered(spark: Any) -> Any:
    from aiopersist.spark import register

    register(spark)
    return spark


def rows() -> dict[int, Val]:
    return {
        n: Val(
            amount=AMOUNTS[n % len(AMOUNTS)],
            price=PRICES[n % len(PRICES)],
            at=None if n % 9 == 8 else CLOCKS_BACK + timedelta(minutes=30 * (n % 7 - 3)),
            day=None if n % 7 == 6 else date(2026, 2, 25) + timedelta(days=n % 7),
            name=NAMES[n % len(NAMES)],
            good=[True, False, None][n % 3],
            place=Place(city=["x", "y", None][n // 3 % 3], floor=None if n % 5 == 4 else n % 5),
        )
        for n in range(280)
    }


def read_by_hooks(place: str, name: str, **options: str) -> list[pa.RecordBatch]:
    """The batches of all tasks, in this process."""
    asked = source(place, name, **options)
    reader = asked.reader(asked.schema())
    return [batch for partition in reader.partitions() for batch in reader.read(partition)]


def test_each_condition_chooses_the_rows_that_spark_would(registered: Any, place: str) -> None:
    """Goal: of a table, in parts with statistics, without, and inline."""

    async def fill(client: ap.Client) -> None:
        await client.table("t", key=int, val=Val).put_many(half)

    for n, settings in enumerate(({"stats_budget_bytes": 0}, {"row_group_bytes": 500}, {})):
        half = {key: val for key, val in rows().items() if key % 3 == n}
        at(place, fill, **({"inline_writes_single_max_bytes": 0, **settings} if settings else {}))
    df = reading(registered, place).load("t").selectExpr("key", *(f"({sql})" for sql in CASES.values()))
    answers = df.collect()
    for column, condition in enumerate(CASES, 1):
        expected = {row[0] for row in answers if row[column]}
        batches = read_by_hooks(place, "t", where=condition)
        assert [key for batch in batches for key in batch.column(0).to_pylist()] == sorted(expected), (
            condition
        )


@pytest.mark.parametrize("option", ["where", "key_range"])
def test_parts_that_cannot_match_are_not_fetched(place: str, option: str) -> None:
    async def fill(client: ap.Client) -> None:
        async with client.writer("s", PLAIN) as writer:
            for time, letter in enumerate("abcd"):
                updates = [(f"{letter}{n:03}", n, time, 1) for n in range(100)]
                await writer.compare_and_append(updates, time, time + 1)

    from aiopersist.spark.bridge import bridge
    from aiopersist.spark.location import SparkLocation

    def fetches(**options: str) -> int:
        client = bridge().client(SparkLocation.of(place, None, None))
        before = client.metrics["blob.get"].count + client.metrics["blob.get_range"].count
        read_by_hooks(place, "s", **options)
        return client.metrics["blob.get"].count + client.metrics["blob.get_range"].count - before

    at(place, fill, inline_writes_single_max_bytes=0)
    asked = {"where": "key >= 'c010' and key < 'c020'", "key_range": '["c010", "c020"]'}
    assert fetches(**{option: asked[option]}) == 1
    assert fetches() == 3  # the cache has the other


def test_a_batch_of_a_stream_has_only_the_rows_of_the_condition(place: str) -> None:
    async def fill(client: ap.Client) -> None:
        async with client.writer("s", PLAIN) as writer:
            await writer.compare_and_append([("a", 1, 0, 1), ("b", 2, 0, 1)], 0, 1)
            await writer.compare_and_append([("b", 2, 1, -1), ("b", 1, 1, 1), ("c", 3, 1, 1)], 1, 2)

    at(place, fill)
    asked = source(place, "s", startingTime="0", where="val > 1", key_range='[null, "c"]')
    reader = asked.streamReader(asked.schema())
    start = reader.initialOffset()
    partitions = reader.partitions(start, reader.latestOffset(start, reader.getDefaultReadLimit()))
    batches = [batch for partition in partitions for batch in reader.read(partition)]
    assert pa.Table.from_batches(batches).to_pydict() == {
        "key": ["b", "b"],
        "val": [2, 2],
        "_time": [0, 1],
        "_diff": [1, -1],
    }
    reader.stop()


def test_a_view_has_a_condition(registered: Any, place: str) -> None:
    async def fill(client: ap.Client) -> None:
        await client.table("t", key=str, val=int).put_many({"a": 1, "b": 2, "c": 3})

    at(place, fill)
    options = f"options (path 't', location '{place}', where \"val > 1 and key < 'c'\")"
    registered.sql(f"create or replace temporary view chosen using aiopersist {options}")
    assert counted(registered.table("chosen")) == {("b", 2): 1}
    assert counted(registered.sql("select key from chosen where val = 2")) == {("b",): 1}


# --- why Spark's own filters stay with Spark ----------------------------------------------------------


@pytest.fixture
def pushing(spark: Any) -> Iterator[Any]:
    """A source that is told Spark's filters; each of its rows is the number of filters."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    class Reader(DataSourceReader):
        pushed = 0

        def pushFilters(self, filters: Any) -> Any:  # noqa: N802  # Spark's name
            self.pushed = len(filters)
            return filters

        def partitions(self) -> Any:
            return [InputPartition(0)]

        def read(self, partition: Any) -> Any:
            yield (self.pushed,)

    class Source(DataSource):
        @classmethod
        def name(cls) -> str:
            return "pushing"

        def schema(self) -> str:
            return "pushed long"

        def reader(self, schema: Any) -> Any:
            return Reader()

    spark.dataSource.register(Source)
    setting = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(setting, "true")
    yield spark.read.format("pushing")
    spark.conf.unset(setting)


@pytest.mark.xfail(strict=True, reason="Spark gives the filters of one branch to the other")
def test_filters_that_spark_pushes_stay_with_their_query(pushing: Any) -> None:
    """When this passes, a reader may have `pushFilters`."""
    df = pushing.load()
    both = df.where("pushed >= 0").unionAll(df)
    assert sorted(row.pushed for row in both.collect()) == [0, 2]
