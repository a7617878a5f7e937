"""Goal: a new shard has the columns that the job asks for; a job that failed leaves no shard; and the
error for a value that a column cannot hold says what to do."""

import asyncio
import uuid
from collections import Counter
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.spark.plan import WriteSpec, abandon, grant_writer, plan_write, remove_new_shard
from aiopersist.spark.sessions import arrow_schema
from tests.spark.conftest import need_spark
from tests.spark.plain_client import at, counted, upper
from tests.spark.schemas import shards

WIDE = ap.Schema(key=str, val=int | None)
NOT_NULL = "key string not null, val long not null"
NARROW = ap.Schema(key=str, val=int)


def anywhere() -> str:
    """An empty location in memory."""
    return f"mem://{uuid.uuid4().hex}"


def frame(**types: str) -> Any:
    """The Arrow schema of columns with these types, none of them nullable."""
    need_spark()
    from pyspark.sql.types import LongType, StringType, StructField, StructType

    found = {"long": LongType(), "string": StringType(), "lower": StringType("UTF8_LCASE")}
    return arrow_schema(StructType([StructField(name, found[t], False) for name, t in types.items()]))


# --- whatever runs it --------------------------------------------------------------------------------


SPEC = WriteSpec("s", keys=("key",))


async def test_a_job_that_fails_leaves_no_shard() -> None:
    """Goal: its name is free again, for another schema too."""
    columns = frame(key="string", val="long")
    async with ap.open(anywhere(), maintenance=False) as client:
        for _ in range(2):
            plan = await plan_write(client, columns, SPEC)
            assert set(await client.list_shards()) == {"s"}
            await abandon(client, await grant_writer(client, plan, 60.0))
            await remove_new_shard(client, plan)  # once more: nothing to do
            assert await client.list_shards() == {}
        async with client.writer("s", ap.Schema(int, int)) as writer:
            assert writer.upper == ap.Antichain(0)


async def test_a_shard_that_others_use_stays() -> None:
    """Goal: a client that has opened it, or has appended to it, keeps it; the job that made it is the
    first."""
    columns = frame(key="string", val="long")
    async with ap.open(anywhere(), maintenance=False) as client:
        plan = await plan_write(client, columns, SPEC)
        schema = plan.schema
        async with client.reader("s"):
            await remove_new_shard(client, plan)
        async with client.writer("s", schema) as writer:
            await remove_new_shard(client, plan)
            await writer.compare_and_append([], 0, 0, txn=("job", 1))
        await remove_new_shard(client, plan)
        assert set(await client.list_shards()) == {"s"}
        assert (await plan_write(client, columns, SPEC)).is_new is False


async def test_a_job_that_cannot_be_planned_makes_nothing() -> None:
    """Goal: what can be checked is checked before the shard is made."""
    async with ap.open(anywhere(), maintenance=False) as client:
        for columns, spec in (
            (frame(key="string", val="long", more="long"), SPEC._replace(schema=WIDE)),
            (frame(key="string", val="long"), SPEC._replace(keys=("val",), schema=WIDE)),
            (frame(key="string", val="string"), SPEC._replace(schema=WIDE)),
        ):
            with pytest.raises(ap.InvalidUsage) as caught:
                await plan_write(client, columns, spec)
            assert caught.value.kind is ap.UsageKind.INVALID_COLUMN
        assert await client.list_shards() == {}


def test_collated_text_is_refused() -> None:
    """Goal: shards order and compare by bytes; the error names the column, at any depth."""
    need_spark()
    from pyspark.sql.types import ArrayType, LongType, MapType, StringType, StructField, StructType

    lower = StringType("UTF8_LCASE")
    inner = StructType([StructField("c", lower)])
    for t in (lower, ArrayType(lower), MapType(lower, LongType()), MapType(LongType(), lower), inner):
        with pytest.raises(ap.InvalidUsage, match="'b' is string collate UTF8_LCASE") as caught:
            arrow_schema(StructType([StructField("a", StringType()), StructField("b", t)]))
        assert caught.value.column == "b"


# --- with Spark --------------------------------------------------------------------------------------


def test_schema_says_what_may_be_null(spark: Any, sc: Any, place: str) -> None:
    """Goal: a first frame without nulls does not forbid them for ever: schemas of each kind, an option."""
    from pyspark.sql.types import StructType

    first = spark.createDataFrame([("a", 1)], NOT_NULL)
    later = spark.createDataFrame([("b", None)], "key string, val long")
    wide = later.schema
    assert isinstance(wide, StructType)
    sc.write_df(first, "one", keys=["key"], schema=wide)
    sc.write_df(first, "two", schema=ap.Schema(key=str, val=int | None))
    writer = first.write.format("aiopersist").option("location", place)
    writer.option("keys", "key").option("schema", wide.json()).mode("append").save("three")
    for name in ("one", "two", "three"):
        sc.write_df(later, name)
        assert counted(sc.snapshot_df(name)) == Counter([("a", 1), ("b", None)])
    with pytest.raises(ap.CodecMismatch):
        sc.write_df(first, "one", schema=NARROW)
    with pytest.raises(ap.InvalidUsage, match="keys="):
        sc.write_df(first, "four", schema=wide)
    with pytest.raises(ap.InvalidUsage, match="StructType or a Schema, not str"):
        sc.write_df(first, "four", schema="key string")


def test_what_does_not_fit_is_told_with_how_to_widen(spark: Any, sc: Any, place: str) -> None:
    """Goal: a null that may not be, a column too many: the error says what can be done. Nothing is left."""
    sc.write_df(spark.createDataFrame([("a", 1)], NOT_NULL), "s", keys=["key"])
    null = spark.createDataFrame([("b", None)], "key string, val long")
    with pytest.raises(ap.InvalidUpdate, match=r"'val'.*null.*schema=.*compare_and_evolve_schema"):
        sc.write_df(null, "s")
    with pytest.raises(ap.InvalidUsage, match=r"'x'.*compare_and_evolve_schema"):
        sc.write_df(null.selectExpr("*", "1 x"), "s")
    assert upper(place, "s") == ap.Antichain(1)


@pytest.mark.slow
def test_a_write_that_failed_leaves_no_shard(spark: Any, sc: Any, place: str) -> None:
    """Goal: by the engine and by `format`, refused in a task, before it, or since the task died."""
    from pyspark.errors import PySparkException

    null = spark.createDataFrame([(None, 1)], "key string, val long")
    broken = null.selectExpr("'a' key", "cast(raise_error('no') as long) val")
    options = {"location": place, "keys": "key"}
    for df in (null, broken):
        with pytest.raises((ap.InvalidUpdate, PySparkException)):
            sc.write_df(df, "s", keys=["key"])
        assert shards(place) == set()
    with pytest.raises(PySparkException, match="null"):
        null.write.format("aiopersist").options(**options).mode("append").save("s")
    assert shards(place) == set()
    with pytest.raises(ap.UnknownShard):
        sc.snapshot_df("s")
    assert sc.write_df(null.selectExpr("'a' key", "'b' val"), "s", keys=["key"]) == 0


async def test_release_has_a_coroutine(spark: Any, sc: Any, place: str) -> None:
    """Goal: it waits on a thread; the loop goes on."""
    await asyncio.to_thread(sc.write_df, spark.createDataFrame([("a", 1)], NOT_NULL), "s", keys=["key"])
    df = await sc.asnapshot_df("s")
    assert await asyncio.to_thread(df.count) == 1
    await sc.arelease(df)
    assert len((await asyncio.to_thread(at, place, lambda client: client.admin.inspect("s"))).readers) == 0
    with pytest.raises(ap.InvalidUsage):
        await sc.arelease(df)
