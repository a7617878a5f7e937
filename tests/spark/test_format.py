"""Goal: `format("aiopersist")` and SQL read and write what the engine does, exactly what options say; what
an option cannot mean is refused, in words; and no secret is ever seen."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.servers import PostgresServer
from tests.spark.beside import Row, at, counted, upper
from tests.spark.schemas import PLAIN

TIMES: list[list[Row]] = [
    [("a", 1, 1), ("b", 2, 2)],
    [("a", 1, -1), ("a", 5, 1)],
    [("c", 3, 1)],
    [("b", 2, -1), ("d", None, 1)],
]
"""What happens at times 0, 1, ..."""


def contents(as_of: int) -> Counter[Row]:
    sums: Counter[Row] = Counter()
    for rows in TIMES[: as_of + 1]:
        for key, val, diff in rows:
            sums[key, val] += diff
    return Counter({row: n for row, n in sums.items() if n})


def changes(start: int, end: int) -> Counter[Row]:
    return Counter((*row[:2], t, row[2]) for t in range(start, end) for row in TIMES[t])


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


# --- reading ---------------------------------------------------------------------------------------

READS: dict[str, tuple[dict[str, Any], Counter[Row]]] = {
    "newest": ({}, contents(3)),
    "as_of": ({"as_of": 1}, contents(1)),
    "asOf, few tasks": ({"asOf": 0, "parallelism": 1}, contents(0)),
    "diffs": ({"expand": False, "as_of": 0}, Counter([("a", 1, 1), ("b", 2, 2)])),
    "columns": ({"columns": "val", "asOf": 2}, Counter([(5,), (2,), (2,), (3,)])),
    "columns, turned": ({"columns": " VAL, key ", "asOf": 0}, Counter([(1, "a"), (2, "b"), (2, "b")])),
    "changes": ({"startingTime": 1, "endingTime": 3}, changes(1, 3)),
    "all changes": ({"starting_time": 0}, changes(0, 4)),
    "no changes": ({"startingTime": 2, "endingTime": 2}, Counter()),
    "range": ({"key_range": '["b", "d"]'}, Counter([("b", 2), ("c", 3)])),
    "open range": ({"keyRange": '["c", null]'}, Counter([("c", 3), ("d", None)])),
    "range of changes": (
        {"startingTime": 1, "key_range": '[null, "b"]'},
        Counter(x for x in changes(1, 4) if x[0] == "a"),
    ),
}


def cases(table: dict[str, Any], seldom: set[str]) -> list[Any]:
    """A table as parameters: those that are `seldom` of interest are long."""
    return [
        pytest.param(*case, id=what, marks=[pytest.mark.long] * (what in seldom))
        for what, case in table.items()
    ]


@pytest.mark.parametrize(
    ("options", "wanted"), cases(READS, {"asOf, few tasks", "columns", "no changes", "open range"})
)
def test_reads(spark: Any, filled: tuple[str, str], options: dict[str, Any], wanted: Counter[Row]) -> None:
    place, name = filled
    assert counted(reading(spark, place, **options).load(name)) == wanted


def test_other_shards(spark: Any, filled: tuple[str, str]) -> None:
    """Goal: finished and compacted ones; `as_of` is pinned when the DataFrame is made; Spark's own filters
    and unions over one `load` are right."""
    place, _ = filled
    assert counted(reading(spark, place).load("end")) == Counter([("a", 1)])
    assert counted(reading(spark, place, startingTime=3).load("old")) == changes(3, 4)
    fill(place, "moving")
    df = reading(spark, place).load("moving")
    a, rest = df.filter("key = 'a'"), df.filter("key <> 'a'")

    async def more(client: ap.Client) -> None:
        async with client.writer("moving", PLAIN) as writer:
            await writer.write([("z", 9)])
        await client.force_compaction("moving")
        await client.force_gc("moving")

    assert counted(a.unionAll(rest)) == contents(3)
    at(place, more)
    assert counted(df) == contents(3)
    assert counted(reading(spark, place).load("moving")) == contents(3) + Counter([("z", 9)])


BAD_READS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown option": ("s", {"as_off": 1}, "unknown option 'asoff'"),
    "an option of writes": ("s", {"keys": "key"}, "unknown option 'keys'"),
    "unknown shard": ("nope", {}, "UnknownShard|no shard named 'nope'"),
    "no integer": ("s", {"as_of": "now"}, "as_of='now' is not an integer"),
    "not complete": ("s", {"as_of": 9}, "NotReadable"),
    "nothing complete": ("void", {}, "NotReadable"),
    "before since": ("old", {"as_of": 1}, "SinceViolation"),
    "changes at since": ("old", {"startingTime": 2}, "SinceViolation"),
    "both": ("s", {"as_of": 1, "startingTime": 1}, "not both"),
    "an end alone": ("s", {"endingTime": 1}, "needs startingTime"),
    "end before start": ("s", {"startingTime": 3, "endingTime": 1}, "INVALID_BOUNDS"),
    "no column": ("s", {"columns": "q"}, "no column 'q'"),
    "expand": ("s", {"expand": "maybe"}, "neither true nor false"),
    "no range": ("s", {"key_range": "a-b"}, "not a JSON list of two"),
    "range of another type": ("s", {"key_range": "[1, 2]"}, "key_range"),
    "lease": ("s", {"lease_s": "-1"}, "not a positive number"),
    "parallelism": ("s", {"parallelism": 0}, "at least 1"),
    "product times": ("pairs", {}, "product times|INVALID_TIME"),
    "no name": ("", {}, "no shard: name it by"),
}


SELDOM = {
    "an option of writes",
    "no integer",
    "nothing complete",
    "both",
    "an end alone",
    "no column",
    "lease",
}
SELDOM |= {"parallelism", "end before start", "no range", "unknown shard"}


@pytest.mark.parametrize(("name", "options", "said"), cases(BAD_READS, SELDOM))
def test_what_cannot_be_read_is_refused(
    spark: Any, filled: tuple[str, str], name: str, options: dict[str, Any], said: str
) -> None:
    """Goal: when the DataFrame is used at the latest, in words, and not by retries."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException, match=said):
        reading(spark, filled[0], **options).load(name or None).collect()


@pytest.mark.parametrize(
    "options",
    [
        {"blob": "file:///x", "consensus": "postgres://me:hunter2@127.0.0.1:1/db"},
        {"blob": "s3://key:hunter2@b/p", "consensus": "sqlite:///x.db"},
        {"blob": "s3://b/p?secret_key=hunter2", "consensus": "sqlite:///x.db"},
        {"blob": "s3://b/p?endpoint=http://key:hunter2@h:9000", "consensus": "sqlite:///x.db"},
        {"blob": "file:///x", "consensus": "postgres://h/db?password=hunter2"},
    ],
)
def test_secrets_in_options_are_refused(spark: Any, options: dict[str, str]) -> None:
    from pyspark.errors import PySparkException

    df = spark.range(1)
    for act in (
        lambda: spark.read.format("aiopersist").options(**options).load("s"),
        lambda: df.write.format("aiopersist").mode("append").options(**options).save("s"),
    ):
        with pytest.raises(PySparkException, match="InvalidLocation") as found:
            act()
        assert "hunter2" not in str(found.value)


def test_product_times(spark: Any, place: str, name: str) -> None:
    """Goal: contents at a product time, which is a JSON list."""
    from pyspark.errors import PySparkException

    async def work(client: ap.Client) -> None:
        async with client.writer(name, ap.Schema(str, int, time=2)) as writer:
            rows = [("a", 1, (0, 1), 1), ("b", 2, (1, 0), 1), ("c", 3, (1, 1), 1)]
            await writer.compare_and_append(rows, ap.Antichain((0, 0)), ap.Antichain((2, 2)))

    at(place, work)
    for as_of, wanted in (("[1, 0]", [("b", 2)]), ("[1,1]", [("a", 1), ("b", 2), ("c", 3)])):
        assert counted(reading(spark, place, as_of=as_of).load(name)) == Counter(wanted)
    with pytest.raises(PySparkException, match="not a JSON list"):
        reading(spark, place, as_of="[1, x]").load(name).collect()


# --- writing ---------------------------------------------------------------------------------------


def test_writes(spark: Any, filled: tuple[str, str], name: str) -> None:
    """Goal: append, diffs, times, upsert, overwrite, txn: the changes of the shard are what was asked for."""
    place, _ = filled
    rows = [("a", 1), ("b", 2)]
    df = spark.createDataFrame(rows, "key string, val long")
    writing(df.repartition(2), place, keys="key").save(name)
    diffs = spark.createDataFrame([("b", 2, -1), ("c", 3, 2)], "key string, val long, d int")
    writing(diffs, place, diff="d").save(name)
    for _ in range(2):
        writing(df, place, txnAppId="job", txnVersion=7).save(name)
    writing(spark.createDataFrame([("a", 9)], df.schema), place, apply="upsert").save(name)
    writing(spark.createDataFrame([("z", 0)], df.schema), place, "overwrite").save(name)
    times = spark.createDataFrame([("t", 1, 7), ("t", 2, 9)], "key string, val long, at long")
    writing(times, place, time="at").save(name)
    writing(df, place, time="20").save(name)
    want = Counter((*row, 0, 1) for row in rows)
    want += Counter([("b", 2, 1, -1), ("c", 3, 1, 2)])
    want += Counter((*row, 2, 1) for row in rows)
    want += Counter([("a", 1, 3, -2), ("a", 9, 3, 1)])
    want += Counter([("a", 9, 4, -1), ("b", 2, 4, -1), ("c", 3, 4, -2), ("z", 0, 4, 1)])
    want += Counter([("t", 1, 7, 1), ("t", 2, 9, 1)])
    want += Counter((*row, 20, 1) for row in rows)
    assert counted(reading(spark, place, startingTime=0).load(name)) == want
    assert upper(place, name) == ap.Antichain(21)


BAD_WRITES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "unknown option": ("s", "append", {"as_of": 1}, "unknown option 'asof'"),
    "no keys": ("nope", "append", {}, "say by keys="),
    "unknown key": ("nope", "append", {"keys": "q"}, "'q' is no column"),
    "apply": ("s", "append", {"apply": "merge"}, "neither insert nor upsert"),
    "upsert and overwrite": ("s", "overwrite", {"apply": "upsert"}, "use mode append"),
    "overwrite with time": ("s", "overwrite", {"time": "3"}, "neither time nor diff"),
    "old time": ("s", "append", {"time": "3"}, "UPDATE_NOT_BEYOND_LOWER"),
    "finished": ("end", "append", {}, "UpperMismatch"),
    "mode": ("s", "ignore", {}, "Ignore"),
    "default mode": ("s", "error", {}, "ErrorIfExists"),
    "product times": ("pairs", "append", {}, "product times"),
    "half a txn": ("s", "append", {"txnAppId": "a"}, "txn"),
    "the other half": ("s", "append", {"txn_version": "3"}, "txn"),
    "no name": ("", "append", {}, "no shard: name it by"),
}


@pytest.mark.parametrize(
    ("name", "mode", "options", "said"),
    cases(
        BAD_WRITES,
        {"unknown key", "apply", "overwrite with time", "finished", "upsert and overwrite"},
    ),
)
def test_what_cannot_be_written_is_refused(
    spark: Any, filled: tuple[str, str], name: str, mode: str, options: dict[str, Any], said: str
) -> None:
    from pyspark.errors import PySparkException

    place, df = filled[0], spark.createDataFrame([("q", 1)], "key string, val long")
    try:
        with pytest.raises(PySparkException, match=said):
            writing(df, place, mode, **options).save(name or None)
        assert upper(place, "s") == ap.Antichain(4)
        assert "nope" not in at(place, lambda client: client.list_shards())
    finally:
        if upper(place, "s") != ap.Antichain(4):
            at(place, lambda client: client.drop("s"))
            fill(place, "s")


# --- SQL -------------------------------------------------------------------------------------------


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


# --- secrets, and discovery ------------------------------------------------------------------------

SCRIPT = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]")
for name, value in json.loads(sys.argv[1]).items():
    builder = builder.config(name, value)
spark = builder.getOrCreate()
where = {"blob": "env:TEST_BLOB", "consensus": "env:TEST_CONSENSUS"}
df = spark.createDataFrame([("a", 1), ("b", 2)], "key string, val long")
df.write.format("aiopersist").mode("append").options(keys="key", **where).save("s")
read = spark.read.format("aiopersist").options(**where).load("s")
read.explain(True)
print(sorted(map(tuple, read.collect())))
print(read.rdd.toDebugString().decode())
try:
    spark.read.format("aiopersist").options(blob="env:TEST_BLOB", consensus="env:TEST_GONE").load("s")
except Exception as e:
    print("refused:", e)
from aiopersist.spark import connect

with connect(spark, blob="env:TEST_BLOB", consensus="env:TEST_CONSENSUS") as sc:
    print(repr(sc), sc.write_df(df, "s"), sc.snapshot_df("s").count())
    sc.snapshot_df("s").explain(True)
changes = spark.readStream.format("aiopersist").options(hold_name="copy", **where).load("s")
sink = changes.writeStream.format("aiopersist").options(keys="key", checkpointLocation="checkpoint", **where)
query = sink.trigger(availableNow=True).start("copy")
query.awaitTermination()
query.explain(True)
print("progress:", query.recentProgress)
print("copied:", spark.read.format("aiopersist").options(**where).load("copy").count())
spark.stop()
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_secrets_are_never_seen(spark: Any, tmp_path: Path, postgres_server: PostgresServer) -> None:
    """Goal: in a session that nothing was registered in, with places by name: no secret in plans, output,
    logs of all levels, the event log, or the checkpoint of a stream."""
    from tests.spark.conftest import CONFIG

    url = postgres_server.url("t_secrets")
    scheme, rest = url.split("://", 1)
    user, host = rest.split("@", 1) if "@" in rest else ("postgres", rest)
    secret = f"{scheme}://{user.split(':')[0]}:hunter2@{host}"
    events = tmp_path / "events"
    events.mkdir()
    config = {
        **CONFIG,
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": str(events),
        "spark.log.level": "INFO",
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(Path(ap.__file__).parents[1]), *sys.path]),
        "TEST_BLOB": f"file://{tmp_path}/blob",
        "TEST_CONSENSUS": secret,
    }
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(config)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[('a', 1), ('b', 2)]" in done.stdout
    assert "refused:" in done.stdout and "TEST_GONE" in done.stdout
    assert "copied: 4" in done.stdout
    logs, checkpoint = (
        "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())
        for folder in (events, tmp_path / "checkpoint")
    )
    assert "aiopersist" in logs
    assert "numOutputRows" in done.stdout and "shard" in checkpoint
    for text in (done.stdout, done.stderr, logs, checkpoint):
        assert "hunter2" not in text
