"""Goal: when a shard's schema gets a field, reads that were planned before keep their columns; later plans
have the new column, null in older rows, and in rows that are written without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.spark import register
from tests.spark.faults import FORMAT
from tests.spark.plain_client import at, rows_of


class Before(BaseModel):
    n: int | None


class After(BaseModel):
    n: int | None
    note: str | None = None


OLD, NEW = [("a", 1), ("b", 2)], [("a", 1, None), ("b", 2, None), ("c", 3, "new")]


@pytest.fixture
def evolve(place: str, name: str) -> Callable[[], None]:
    """A shard with rows of the old schema; called, it evolves, and gets a row of the new one."""

    async def begin(client: ap.Client) -> None:
        async with client.writer(name, ap.Schema(str, Before)) as writer:
            await writer.compare_and_append([(key, Before(n=n), 0, 1) for key, n in OLD], 0, 1)

    async def go_on(client: ap.Client) -> None:
        number, _ = await client.schema(name)
        await client.compare_and_evolve_schema(name, number, ap.Schema(str, After))
        async with client.writer(name, ap.Schema(str, After)) as writer:
            await writer.compare_and_append([("c", After(n=3, note="new"), 1, 1)], 1, 2)

    at(place, begin)
    return lambda: at(place, go_on)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_batches(spark: Any, sc: Any, place: str, name: str, evolve: Callable[[], None]) -> None:
    options = {"location": place}
    planned = sc.snapshot_df(name)
    evolve()
    assert rows_of(planned) == OLD
    for df in (sc.snapshot_df(name), spark.read.format(FORMAT).options(**options).load(name)):
        assert df.columns == ["key", "n", "note"]
        assert rows_of(df) == NEW
    assert rows_of(sc.snapshot_df(name, 0)) == NEW[:2]
    assert rows_of(sc.snapshot_df(name, columns=["key", "n"])) == [row[:2] for row in NEW]
    assert rows_of(sc.changes_df(name, 0)) == [(*row, row[1] // 3, 1) for row in NEW]
    old = spark.createDataFrame([("d", 4)], "key string, n long")
    assert sc.write_df(old, name) == 2
    assert sc.write_df(old.selectExpr("key", "n + 1 as n", "'x' as note"), name, mode="upsert") == 3
    assert sc.compact(name)
    assert rows_of(sc.snapshot_df(name)) == [*NEW, ("d", 5, "x")]
    assert rows_of(sc.snapshot_df(name, 2)) == [*NEW, ("d", 4, None)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_streams(spark: Any, place: str, name: str, evolve: Callable[[], None], tmp_path: Path) -> None:
    """Goal: a query has the columns of when it was made: it fails when they change, and goes on where it was
    when it is made anew, or when it has named its columns."""
    from pyspark.errors import StreamingQueryException

    register(spark)

    def stream(**options: Any) -> Any:
        return spark.readStream.format(FORMAT).options(location=place, startingTime=0, **options).load(name)

    def drained(df: Any, checkpoint: str) -> list[Any]:
        found: list[Any] = []
        sink = df.writeStream.foreachBatch(lambda batch, _: found.extend(map(tuple, batch.collect())))
        query = sink.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True)
        running = query.start()
        try:
            assert running.awaitTermination(100)
        finally:
            running.stop()
        return sorted(found)

    every, named = stream(), stream(columns="key,n")
    for df, checkpoint in ((every, "every"), (named, "named")):
        assert drained(df, checkpoint) == [(*row, 0, 1) for row in OLD]
    evolve()
    assert drained(named, "named") == [("c", 3, 1, 1)]
    with pytest.raises(StreamingQueryException, match="the schema of the shard is"):
        drained(every, "every")
    assert drained(stream(), "every") == [("c", 3, "new", 1, 1)]
