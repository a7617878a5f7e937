"""Goal: Spark reads a table as any shard, and what it writes keeps the rule of a table: one val per key."""

from typing import Any

import pytest

import aiopersist as ap
from tests.spark.engine_kit import USAGE
from tests.spark.plain_client import at, rows_of

pytestmark = pytest.mark.slow


def filled(place: str) -> None:
    async def work(client: ap.Client) -> None:
        await client.table("t", str, int).put_many({"a": 1, "b": 2, "c": 3})

    at(place, work)


def contents(place: str) -> dict[str, int]:
    """By the table; each key comes once in the shard."""

    async def work(client: ap.Client) -> dict[str, int]:
        table = client.table("t", str, int)
        async with client.reader("t") as reader, reader.snapshot() as snapshot:
            rows = await snapshot.rows()
        found = dict([entry async for entry in table.items()])
        assert rows == [(key, val, 1) for key, val in sorted(found.items())]
        assert await table.get_many(found) == found
        return found

    return at(place, work)


def frame(spark: Any, *rows: tuple[str, int]) -> Any:
    return spark.createDataFrame(list(rows), "key string, val long")


def test_a_table_is_read(sc: Any, place: str) -> None:
    filled(place)
    assert rows_of(sc.snapshot_df("t")) == [("a", 1), ("b", 2), ("c", 3)]


def test_an_upsert_keeps_one_val_per_key(sc: Any, spark: Any, place: str) -> None:
    filled(place)
    sc.write_df(frame(spark, ("b", 20), ("d", 40)), "t", mode="upsert")
    assert contents(place) == {"a": 1, "b": 20, "c": 3, "d": 40}


def test_an_overwrite_leaves_its_rows(sc: Any, spark: Any, place: str) -> None:
    filled(place)
    sc.write_df(frame(spark, ("b", 20)), "t", mode="overwrite")
    assert contents(place) == {"b": 20}


def test_a_new_table_is_filled(sc: Any, spark: Any, place: str) -> None:
    """Goal: as one that has contents; a key twice is found there, too."""

    async def create(client: ap.Client) -> None:
        await client.table("t", str, int)

    at(place, create)
    with pytest.raises(ap.InvalidUpdate, match="more than once"):
        sc.write_df(frame(spark, ("b", 20), ("b", 21)), "t", mode="overwrite")
    sc.write_df(frame(spark, ("b", 20), ("a", 1)), "t", mode="overwrite")
    assert contents(place) == {"a": 1, "b": 20}


@pytest.mark.parametrize("mode", ["upsert", "overwrite"])
def test_a_key_twice_is_refused(sc: Any, spark: Any, place: str, mode: str) -> None:
    """Goal: nothing is written."""
    filled(place)
    with pytest.raises(ap.InvalidUpdate, match="more than once"):
        sc.write_df(frame(spark, ("b", 20), ("b", 21)), "t", mode=mode)
    assert contents(place) == {"a": 1, "b": 2, "c": 3}


def test_the_format_upserts_and_refuses_to_append(sc: Any, spark: Any, place: str) -> None:
    """Goal: as the engine."""
    filled(place)
    there = {"location": place}
    write = frame(spark, ("b", 20)).write.format("aiopersist").options(**there)
    write.option("apply", "upsert").mode("append").save("t")
    assert contents(place) == {"a": 1, "b": 20, "c": 3}
    write = frame(spark, ("b", 30)).write.format("aiopersist").options(**there)
    with pytest.raises(Exception, match="NOT_A_TABLE"):
        write.mode("append").save("t")
    write.mode("overwrite").save("t")
    assert contents(place) == {"b": 30}


def test_an_append_is_refused(sc: Any, spark: Any, place: str) -> None:
    """Goal: it would give a key two vals."""
    filled(place)
    with pytest.raises(ap.InvalidUsage) as caught:
        sc.write_df(frame(spark, ("b", 20)), "t")
    assert caught.value.kind is USAGE.NOT_A_TABLE
    assert contents(place) == {"a": 1, "b": 2, "c": 3}
