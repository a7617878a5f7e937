"""Goal: several streaming queries of one session do not disturb each other."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from tests.spark.plain_client import at
from tests.spark.schemas import PLAIN
from tests.spark.streams_kit import (
    _registered,  # noqa: F401  # a fixture
    append,
    drained,
    history,
    rows,
    stream,
    updates,
)

pytestmark = pytest.mark.timeout(300)
OF_SPARK = "Python worker failed to connect back"
"""A worker has 10 s to start, whatever the machine does besides (`docs/spark.md`)."""
SECONDS = float(os.environ.get("AIOPERSIST_TEST_STREAMS_S", "300"))


def environment(spark: Any) -> dict[str, str]:
    """The variables that all queries share of the source that is registered now."""
    sources = spark._jsparkSession.sessionState().dataSourceManager()
    return dict(sources.lookupDataSource("aiopersist").dataSourceCls().envVars())


def test_a_query_that_starts_adds_no_variable_to_what_queries_share(
    spark: Any, place: str, name: str, tmp_path: Path
) -> None:
    """Goal: the map that Spark serializes with each task of a source is not resized meanwhile, which fails
    the task with an error of the JVM."""
    append(place, name, history(2), 0)
    before = environment(spark)

    assert drained(stream(spark, place, name, startingTime=0), tmp_path / "c").all == rows(history(2))

    after = environment(spark)
    assert after != before  # the runner has set its own values
    assert after.keys() == before.keys()


def test_a_registration_leaves_the_environment_of_workers_as_it_was(spark: Any) -> None:
    from aiopersist.spark import register

    before = dict(spark.sparkContext.environment)
    register(spark)

    assert spark.sparkContext.environment == before


def ended_with(query: Any) -> str | None:
    """The error with which it ended, before it had all that is there."""
    from pyspark.errors import StreamingQueryException

    try:
        query.processAllAvailable()
    except StreamingQueryException as error:
        return str(error)
    query.stop()
    return None


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("count", [2, 4])
def test_streams_of_one_session_that_are_stopped_and_started_again(
    spark: Any, place: str, tmp_path: Path, count: int
) -> None:
    """Goal: each query, stopped at any moment and started beside the others, goes on, and makes batches
    beside a producer that hardly pauses; each copy has every change once. `AIOPERSIST_TEST_STREAMS_S` says
    for how long."""
    from aiopersist.spark import register

    source, stop, wrote = "source", threading.Event(), [2]
    append(place, source, history(2), 0)

    async def produce(client: ap.Client) -> None:
        async with client.writer(source, PLAIN) as writer:
            while not stop.is_set():
                t = wrote[0]
                await writer.compare_and_append([(f"k{t}", t, t, 1)], t, t + 1)
                wrote[0] += 1
                await SYSTEM.sleep(0.15)

    producer = threading.Thread(target=at, args=(place, produce))
    producer.start()

    def start(i: int) -> Any:
        read = stream(spark, place, source, startingTime=0, hold_name=f"copy-{i}")
        if i % 2:
            writer = read.drop("_time", "_diff").writeStream.format("parquet")
            target = str(tmp_path / f"files-{i}")
        else:
            writer = (
                read.drop("_time", "_diff")
                .writeStream.format("aiopersist")
                .options(location=place, keys="key")
            )
            target = f"copy-{i}"
        return writer.option("checkpointLocation", str(tmp_path / f"checkpoint-{i}")).start(target)

    batches = [0] * count

    def stop_one(i: int) -> None:
        batches[i] += sum(progress["numInputRows"] > 0 for progress in queries[i].recentProgress)
        queries[i].stop()

    clock, restarts, failed = SYSTEM, 0, 0
    ends = clock.monotonic() + SECONDS
    queries = [start(i) for i in range(count)]
    try:
        while clock.monotonic() < ends:
            threading.Event().wait(clock.uniform(3, 15))
            register(spark)
            for i in range(count):
                error = queries[i].exception()
                assert error is None or OF_SPARK in str(error)
                failed += error is not None
                if error is not None or clock.uniform(0, 1) < 0.6:
                    stop_one(i)
                    queries[i] = start(i)
                    restarts += 1
        for i in range(count):
            stop_one(i)
            queries[i] = start(i)
    finally:
        stop.set()
        producer.join()
    for i in range(count):
        while (error := ended_with(queries[i])) is not None:
            assert OF_SPARK in error
            queries[i] = start(i)

    print(
        f"{restarts} restarts, {failed} of them after Spark's own limit, {wrote[0]} times, batches {batches}"
    )
    assert restarts and all(batches)
    expected = sorted(
        [(row[0], row[1]) for t in history(2) for row in t] + [(f"k{t}", t) for t in range(2, wrote[0])]
    )
    for i in range(count):
        if i % 2:
            found = [tuple(row) for row in spark.read.parquet(str(tmp_path / f"files-{i}")).collect()]
        else:
            found = [(key, val) for (key, val, _), n in updates(place, f"copy-{i}").items() for _ in range(n)]
        assert sorted(found) == expected
