"""Goal: `format("aiopersist")` and SQL read and write as the engine does, exactly as the options say; an
option without a meaning is refused, in words; and no secret is ever seen."""

from collections import Counter
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.format_kit import (
    TIMES,
    contents,
    fill,
    filled,  # noqa: F401  # a fixture
    reading,
    writing,
)
from tests.spark.plain_client import Row, at, counted, upper
from tests.spark.schemas import PLAIN


def changes(start: int, end: int) -> Counter[Row]:
    return Counter((*row[:2], t, row[2]) for t in range(start, end) for row in TIMES[t])


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
    "where": ({"where": "val >= 3 or val is null"}, Counter([("a", 5), ("c", 3), ("d", None)])),
    "where and a range": ({"where": "val < 5", "key_range": '["b", null]'}, Counter([("b", 2), ("c", 3)])),
    "where of changes": (
        {"starting_time": 1, "where": "key = 'a'"},
        Counter(x for x in changes(1, 4) if x[0] == "a"),
    ),
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


BAD_READS: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown option": ("s", {"as_off": 1}, "unknown option 'asoff'"),
    "an option of writes": ("s", {"keys": "key"}, "unknown option 'keys'"),
    "unknown shard": ("nope", {}, "UnknownShard|no shard named 'nope'"),
    "no integer": ("s", {"as_of": "now"}, "as_of='now' is not an integer"),
    "an instant of a logical clock": ("s", {"as_of": "2026-05-01T00:00Z"}, "logical clock"),
    "a naive instant": ("s", {"startingTime": "2026-05-01"}, "INVALID_TIME.*naive"),
    "not complete": ("s", {"as_of": 9}, "NotReadable"),
    "nothing complete": ("void", {}, "NotReadable"),
    "before since": ("old", {"as_of": 1}, "SinceViolation"),
    "changes at since": ("old", {"startingTime": 2}, "SinceViolation"),
    "both": ("s", {"as_of": 1, "startingTime": 1}, "not both"),
    "a tag and a time": ("s", {"tag": "x", "as_of": 1}, "a tag or a time, not both"),
    "no tag": ("s", {"tag": "x"}, "UnknownTag|no tag 'x'"),
    "an end alone": ("s", {"endingTime": 1}, "needs startingTime"),
    "end before start": ("s", {"startingTime": 3, "endingTime": 1}, "INVALID_BOUNDS"),
    "no column": ("s", {"columns": "q"}, "no column 'q'"),
    "expand": ("s", {"expand": "maybe"}, "neither true nor false"),
    "no range": ("s", {"key_range": "a-b"}, "not a JSON list of two"),
    "range of another type": ("s", {"key_range": "[1, 2]"}, "key_range"),
    "no condition": ("s", {"where": "val >"}, "expected a column or a value, at character 6"),
    "a condition on no column": ("s", {"where": "price > 3"}, "no column 'price'"),
    "a condition of another type": ("s", {"where": "val > 'a'"}, "cannot be compared with a column of type"),
    "lease": ("s", {"lease_s": "-1"}, "not a positive number"),
    "parallelism": ("s", {"parallelism": 0}, "at least 1"),
    "product times": ("pairs", {}, "product times|INVALID_TIME"),
    "no name": ("", {}, "no shard: name it by"),
}


SELDOM = {
    "an option of writes",
    "no integer",
    "a naive instant",
    "nothing complete",
    "both",
    "an end alone",
    "no column",
    "lease",
}


BAD_WRITES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "unknown option": ("s", "append", {"as_of": 1}, "unknown option 'asof'"),
    "no keys": ("nope", "append", {}, "in keys="),
    "unknown key": ("nope", "append", {"keys": "q"}, "'q' is no column"),
    "apply": ("s", "append", {"apply": "merge"}, "none of insert, upsert, delete"),
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


# --- reading ------------------------------------------------------------------------------------------


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
        await client.admin.force_compaction("moving")
        await client.admin.force_gc("moving")

    assert counted(a.unionAll(rest)) == contents(3)
    at(place, more)
    assert counted(df) == contents(3)
    assert counted(reading(spark, place).load("moving")) == contents(3) + Counter([("z", 9)])


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


# --- writing ------------------------------------------------------------------------------------------


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
            at(place, lambda client: client.admin.drop("s"))
            fill(place, "s")
