"""SQL; see `test_format.py`."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.format_kit import (
    contents,
    fill,
    filled,  # noqa: F401  # a fixture
    reading,
    writing,
)
from tests.spark.plain_client import at, counted, upper

TABLES: dict[str, Callable[[Any, Any, str], Any]] = {
    "saveAsTable": lambda spark, df, place: writing(df, place).saveAsTable("t_aiop"),
    "writeTo": lambda spark, df, place: (
        df.writeTo("t_aiop").using("aiopersist").option("keys", "key").create()
    ),
    "create table": lambda spark, df, place: spark.sql("create table t_aiop using aiopersist"),
    "create table as": lambda spark, df, place: spark.sql(
        "create table t_aiop using aiopersist as select 'a' key, 1L val"
    ),
}


WITH_PATH: dict[str, Callable[[Any, Any, str], Any]] = {
    "saveAsTable": lambda spark, df, place: writing(df, place, path="s").saveAsTable("t_aiop"),
    "saveAsTable overwrite": lambda spark, df, place: (
        writing(df, place, path="s").mode("overwrite").saveAsTable("t_aiop")
    ),
    "writeTo": lambda spark, df, place: (
        df.writeTo("t_aiop").using("aiopersist").options(path="s", location=place).createOrReplace()
    ),
    "saveAsTable, a new shard": lambda spark, df, place: writing(
        df, place, path="new", keys="key"
    ).saveAsTable("t_aiop"),
    "create table": lambda spark, df, place: spark.sql(
        "create table t_aiop using aiopersist "
        f"options (path 's', blob 'file://{place}/blob', consensus 'sqlite://{place}/state.db')"
    ),
    "create table, no store": lambda spark, df, place: spark.sql(
        "create table t_aiop using aiopersist options (path 's_aiop')"
    ),
}


@pytest.mark.long
def test_views(spark: Any, filled: tuple[str, str], name: str) -> None:
    """Goal: SELECT and INSERT on a view are reads and writes, at the newest time each."""
    place, _ = filled
    fill(place, name)
    view = f"v_{name.replace('-', '_')}"
    made = f"create or replace temporary view {view} using aiopersist "
    made += f"options (path '{name}', location '{place}')"
    spark.sql(made)
    assert counted(spark.table(view)) == contents(3)
    spark.sql(f"insert into {view} values ('x', 7), ('y', null)")
    wanted = contents(3) + Counter([("x", 7), ("y", None)])
    assert counted(reading(spark, place).load(name)) == wanted
    spark.sql(made)  # a view shows what was there when it was first read
    spark.sql(f"insert overwrite {view} select key, max(val) from {view} group by key")
    best = {key: max(v or -1 for k, v in wanted if k == key) for key, _ in wanted}
    assert counted(reading(spark, place).load(name)) == Counter(
        (key, None if val == -1 else val) for key, val in best.items()
    )
    assert upper(place, name) == ap.Antichain(6)


def test_a_view_shows_the_time_of_its_first_use(spark: Any, filled: tuple[str, str], name: str) -> None:
    """Goal: Spark plans a view once; made anew it shows what was written since."""
    place, _ = filled
    fill(place, name)
    view = f"v_{name.replace('-', '_')}"
    made = f"temporary view {view} using aiopersist options (path '{name}', location '{place}')"
    spark.sql(f"create {made}")
    assert spark.table(view).count() == contents(3).total()
    spark.sql(f"insert into {view} values ('x', 7)")
    assert spark.table(view).count() == contents(3).total()
    spark.sql(f"create or replace {made}")
    assert spark.table(view).count() == contents(3).total() + 1


@pytest.mark.long
@pytest.mark.parametrize("act", TABLES.values(), ids=TABLES)
def test_tables_of_the_catalog_are_refused(spark: Any, filled: tuple[str, str], act: Any) -> None:
    """Goal: they would lose their options: the error says what works instead."""
    from pyspark.errors import PySparkException

    df = spark.createDataFrame([("q", 1)], "key string, val long")
    try:
        with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
            act(spark, df, filled[0])
    finally:
        spark.sql("drop table if exists t_aiop")
    assert upper(filled[0], "s") == ap.Antichain(4)


@pytest.mark.slow
@pytest.mark.parametrize("act", WITH_PATH.values(), ids=WITH_PATH)
def test_tables_with_a_path_are_refused(spark: Any, filled: tuple[str, str], act: Any) -> None:
    """Goal: the error says what works instead. Nothing is appended, made, or left in the catalog."""
    from pyspark.errors import PySparkException

    place, df = filled[0], spark.createDataFrame([("q", 1)], "key string, val long")
    there = set(Path.cwd().iterdir())
    with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
        act(spark, df, place)
    assert not spark.catalog.tableExists("t_aiop")
    assert set(Path.cwd().iterdir()) == there
    assert upper(place, "s") == ap.Antichain(4)
    assert "new" not in at(place, lambda client: client.list_shards())


@pytest.mark.long
def test_a_table_with_columns_cannot_be_used(spark: Any, filled: tuple[str, str]) -> None:
    """Goal: Spark asks no source about `CREATE TABLE` with columns; each use of it is refused."""
    from pyspark.errors import PySparkException

    place = filled[0]
    spark.sql(
        "create table t_aiop (key string, val long) using aiopersist "
        f"options (path 's', blob 'file://{place}/blob', consensus 'sqlite://{place}/state.db')"
    )
    try:
        for use in ("select * from t_aiop", "insert into t_aiop values ('q', 1)"):
            with pytest.raises(PySparkException, match="CREATE TEMPORARY VIEW"):
                spark.sql(use).collect()
    finally:
        spark.sql("drop table if exists t_aiop")
    assert upper(place, "s") == ap.Antichain(4)


@pytest.mark.long
def test_a_save_within_a_batch_of_a_stream_is_none_of_a_table(
    spark: Any, filled: tuple[str, str], name: str, tmp_path: Path
) -> None:
    """Goal: it is an execution within another, as that of a table is, and is no such."""
    place = filled[0]

    def save(batch: Any, number: int) -> None:
        rows = batch.selectExpr("'a' key", "1L val")
        writing(rows, place, keys="key").mode("append").save(name)

    rates = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 2).load()
    query = rates.writeStream.foreachBatch(save).option("checkpointLocation", str(tmp_path / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    assert upper(place, name).elements[0] >= 1
