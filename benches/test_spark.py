"""5M rows in and out of Spark, beside Spark's own Parquet and beside key-range tasks by hand."""

import asyncio
import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import aiopersist as ap
from aiopersist.parts.fetch import Fetch
from benches import byhand, byhand_spark
from benches.conftest import report

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        importlib.util.find_spec("pyspark") is None or shutil.which("java") is None,
        reason="no pyspark, or no Java",
    ),
]
SCHEMA = ap.Schema(key=bytes, val=bytes)
RUNS = 8
TASKS = 4  # of two cores
ROWS = 5_000_000
FEW_ROWS = 20_000  # where nothing is measured


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark import cloudpickle
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(byhand_spark)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = (
        builder.config("spark.driver.memory", "4g")
        .config("spark.log.level", "ERROR")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    yield session
    session.stop()


class Data(NamedTuple):
    """The same rows as a shard of `RUNS` appends, and as so many sorted files."""

    place: str
    paths: list[str]
    rows: int


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Data:
    measures = request.config.getoption("benchmark_enable")
    rows = ROWS if measures else FEW_ROWS
    folder = tmp_path_factory.mktemp("spark")
    (folder / "files").mkdir()
    table = byhand.large_table(rows * 96)
    each = rows // RUNS
    paths = []
    pieces = []
    for run in range(RUNS):
        piece = table.slice(run * each, each)
        piece = piece.set_column(2, byhand.SCHEMA.field(2), pa.repeat(run, each))
        pieces.append(piece)
        frame = pl.from_arrow(piece)
        assert isinstance(frame, pl.DataFrame)
        sorted_ = frame.sort("key", "val").to_arrow().cast(byhand.SCHEMA)
        path = str(folder / "files" / f"{run}.parquet")
        pq.write_table(sorted_, path, row_group_size=byhand_spark.ROW_GROUP, compression="zstd")
        paths.append(path)

    async def append() -> None:
        async with ap.open(folder / "shards", maintenance=False) as client:
            async with client.writer("rows", SCHEMA) as writer:
                for run, piece in enumerate(pieces):
                    await writer.compare_and_append(piece, run, run + 1)

    asyncio.run(append())
    return Data(str(folder / "shards"), paths, each * RUNS)


@pytest.fixture
def engine(spark: Any, data: Data) -> Iterator[Any]:
    from aiopersist.spark import connect

    with connect(spark, data.place, maintenance=False) as client:
        yield client


def noop(df: Any) -> None:
    """Run it, all columns, to nowhere."""
    df.write.format("noop").mode("overwrite").save()


def by_hand(spark: Any, planned: Any, schema: str) -> Any:
    tasks, work = planned
    return spark.range(tasks, numPartitions=tasks).mapInArrow(work, schema)


def test_snapshot(spark: Any, engine: Any, data: Data, rounds: Any) -> None:
    """All rows as of the last time, summed over eight sorted runs; beside a shuffle, and beside a read of the
    files that sums nothing."""

    async def hand() -> None:
        noop(by_hand(spark, byhand_spark.snapshot(data.paths, TASKS), "key binary, val binary"))

    async def ours() -> None:
        noop(engine.snapshot_df("rows", parallelism=TASKS))
        engine.release()

    async def by_format() -> None:
        read = spark.read.format("aiopersist").option("location", data.place).option("parallelism", TASKS)
        noop(read.load("rows"))

    async def parquet() -> None:
        noop(spark.read.parquet(*data.paths))

    async def shuffled() -> None:
        noop(spark.read.parquet(*data.paths).groupBy("key", "val").sum("diff").where("`sum(diff)` != 0"))

    assert engine.snapshot_df("rows", parallelism=TASKS).count() == data.rows
    work = {"by hand": hand, "engine": ours, "format": by_format, "parquet": parquet, "groupBy": shuffled}
    rounds(work, 5, 1)


async def row_groups(data: Data, where: Any) -> int:
    """The number of row groups that tasks decode."""
    decoded = 0
    matching = Fetch.matching

    async def counted(fetch: Fetch, index: Any, selection: Any) -> list[int]:
        nonlocal decoded
        numbers = await matching(fetch, index, selection)
        decoded += len(numbers)
        return numbers

    async with ap.open(data.place, maintenance=False) as client:
        async with client.workers.shared_read("rows") as shared:
            pieces = await shared.pieces(TASKS, where)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Fetch, "matching", counted)
                for piece in pieces:
                    async for _ in client.workers.read_piece(piece, where):
                        pass
    return decoded


def test_condition(spark: Any, data: Data, rounds: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A thousandth of the rows, by their keys: in the option `where`, or by a filter of Spark."""
    by_spark = "key < X'303031'"
    decoded = [asyncio.run(row_groups(data, where)) for where in (pc.field("key") < b"001", None)]
    report(capsys, "row groups decoded", where=decoded[0], all=decoded[1])

    def read(**options: Any) -> Any:
        given = spark.read.format("aiopersist").options(location=data.place, parallelism=TASKS, **options)
        return given.load("rows")

    async def told() -> None:
        noop(read(where="key < '001'"))

    async def filtered() -> None:
        noop(read().where(by_spark))

    async def parquet() -> None:
        noop(spark.read.parquet(*data.paths).where(by_spark))

    count = read(where="key < '001'").count()
    assert data.rows / 2000 < count == spark.read.parquet(*data.paths).where(by_spark).count()
    rounds({"where": told, "df.where": filtered, "parquet": parquet}, 5, 1)


def test_changes(spark: Any, engine: Any, data: Data, rounds: Any) -> None:
    """Two of the eight appends."""

    async def parquet() -> None:
        noop(spark.read.parquet(*data.paths[3:5]))

    async def ours() -> None:
        noop(engine.changes_df("rows", 3, 5, parallelism=TASKS))
        engine.release()

    assert engine.changes_df("rows", 3, 5).count() == data.rows // RUNS * 2
    rounds({"parquet": parquet, "engine": ours}, 5, 1)


def test_write(spark: Any, engine: Any, data: Data, rounds: Any, tmp_path: Path) -> None:
    """From Parquet files to sorted parts, or to Parquet files as they come."""
    source = spark.read.parquet(*data.paths).select("key", "val")
    numbers = itertools.count()

    async def hand() -> None:
        folder = tmp_path / f"{next(numbers)}"
        folder.mkdir()
        source.mapInArrow(byhand_spark.write(str(folder)), "result binary").collect()

    async def ours() -> None:
        engine.write_df(source, f"copy {next(numbers)}", keys=["key"])

    async def by_format() -> None:
        write = source.write.format("aiopersist").option("location", data.place).option("keys", "key")
        write.mode("append").save(f"copy {next(numbers)}")

    async def parquet() -> None:
        source.write.parquet(str(tmp_path / f"{next(numbers)}"))

    rounds({"by hand": hand, "engine": ours, "format": by_format, "df.write.parquet": parquet}, 3, 1)


def test_compaction(spark: Any, data: Data, rounds: Any, tmp_path: Path) -> None:
    """Eight sorted runs become one; in one process beside it."""
    from aiopersist.spark import connect

    numbers = itertools.count()

    async def hand() -> None:
        folder = tmp_path / f"by hand {next(numbers)}"
        folder.mkdir()
        by_hand(spark, byhand_spark.compaction(data.paths, str(folder), TASKS), "result binary").collect()

    def copied() -> str:
        place = str(tmp_path / f"copy {next(numbers)}")
        shutil.copytree(data.place, place)
        return place

    places = iter([copied() for _ in range(8)])

    async def ours() -> None:
        with connect(spark, next(places), maintenance=False) as client:
            assert client.compact("rows", parallelism=TASKS)

    async def one_process() -> None:
        async with ap.open(next(places), maintenance=False) as client:
            await client.admin.force_compaction("rows")

    rounds({"by hand": hand, "engine": ours, "force_compaction": one_process}, 3, 1)
