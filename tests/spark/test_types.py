"""Goal: every codec goes to Spark and back as the same value, in any time zone of the session; every type
of Spark comes back unchanged; and a type without a counterpart is refused before anything runs."""

import asyncio
import datetime as dt
import math
from collections.abc import Awaitable, Callable, Iterator
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from aiopersist.spark import SparkClient, connect
from tests.spark.schemas import shards

T = TypeVar("T")


class Color(Enum):
    RED = 1
    BLUE = 2


class Point(BaseModel):
    model_config = ConfigDict(frozen=True)
    x: int
    y: float | None = None


class Key(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: UUID
    name: str


class Deep(BaseModel):
    id: int
    points: list[Point]
    near: Point | None = None
    tags: list[list[str]] | None = None


class Reversed(ap.Codec):
    name = "reversed"
    arrow_type = pa.string()

    def encode(self, values: Any) -> pa.Array:
        return pa.array([value[::-1] for value in values], pa.string())

    def decode(self, array: pa.Array) -> Any:
        return [value[::-1] for value in array.to_pylist()]


AT = dt.datetime(2026, 3, 29, 0, 59, 59, 999999, dt.UTC)  # a second before Berlin's clocks go forward
EARLY = dt.datetime(1900, 1, 1, tzinfo=dt.UTC)  # no whole hour there
DAY = dt.date(2026, 3, 29)
LONG = Decimal("12345678901234567890123456789.123456789")
U, V = UUID(int=1), UUID(int=2**128 - 1)


def local(time: dt.datetime) -> dt.datetime:
    """As `collect()` shows a timestamp: a naive time of the process's zone."""
    return time.astimezone().replace(tzinfo=None)


def same(value: Any) -> Any:
    return value


CODECS: dict[str, tuple[Any, list[Any], Callable[[Any], Any]]] = {
    "bytes": (bytes, [b"", b"\x00\xff", b"a"], same),
    "str": (str, ["", "ä\U0001f600", "a\x00b"], same),
    "int": (int, [-(2**63), 0, 2**63 - 1], same),
    "float": (float, [math.nan, 0.0, math.inf, -math.inf, 5e-324], same),
    "bool": (bool, [True, False], same),
    "datetime": (dt.datetime, [AT, EARLY], local),
    "date": (dt.date, [DAY, dt.date(1, 1, 1), dt.date(9999, 12, 31)], same),
    "Decimal": (Decimal, [LONG, Decimal(0), LONG.copy_negate()], same),
    "UUID": (UUID, [U, V], lambda value: value.bytes),
    "Enum": (Color, [Color.RED, Color.BLUE], lambda value: value.name),
    "list": (list[int], [[], [1], [1, 2]], same),
    "list of optionals": (list[str | None], [[None], ["a", None]], same),
    "list of lists": (list[list[float]], [[[]], [[1.0], []]], same),
    "optional": (int | None, [None, 7], same),
    "optional datetime": (dt.datetime | None, [None, AT], lambda value: value and local(value)),
    "optional model": (Point | None, [None, Point(x=1)], lambda v: v and (v.x, v.y)),
    "own": (Annotated[str, Reversed()], ["abc"], lambda value: value[::-1]),
}


def at(place: str, work: Callable[[ap.Client], Awaitable[T]]) -> T:
    async def run() -> T:
        async with ap.open(place, maintenance=False) as client:
            return await work(client)

    return asyncio.run(run())


def stored(place: str, name: str, schema: Any) -> list[Any]:
    """The contents, in the types of the schema."""

    async def work(client: ap.Client) -> list[Any]:
        async with client.reader(name, schema) as reader, reader.snapshot() as snapshot:
            return await snapshot.rows()

    return at(place, work)


@pytest.fixture(scope="module")
def there(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, SparkClient]]:
    """Shards `k <codec>` and `v <codec>`, with values of it as keys, and as vals."""
    place = str(tmp_path_factory.mktemp("types") / "shards")

    async def fill(client: ap.Client) -> None:
        for name, (t, values, _) in CODECS.items():
            for half, schema in (("k", ap.Schema(t, int)), ("v", ap.Schema(int, t))):
                rows = [(v, n) if half == "k" else (n, v) for n, v in enumerate(values)]
                async with client.writer(f"{half} {name}", schema) as writer:
                    await writer.write(rows)

    at(place, fill)
    with connect(spark, place) as sc:
        yield place, sc


def equal(a: Any, b: Any) -> bool:
    """NaN as itself, and -0.0 as another than 0.0."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and not hasattr(a, "asDict"):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b) if isinstance(a, float) else type(a) is type(b) and bool(a == b)


RARE = {"str", "bool", "date", "Decimal", "list", "list of optionals", "optional", "optional datetime"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n in RARE)) for n in CODECS])
@pytest.mark.parametrize("half", ["k", "v"])
def test_codecs(there: tuple[str, SparkClient], half: str, name: str) -> None:
    """Goal: Spark sees the value, and what it writes is the same value again, under the same codec."""
    place, sc = there
    t, values, seen = CODECS[name]
    df = sc.snapshot_df(f"{half} {name}").cache()
    rows = {
        row["val" if half == "k" else "key"]: row["key" if half == "k" else "val"] for row in df.collect()
    }
    assert equal([rows[n] for n in range(len(values))], [tuple_free(seen(v)) for v in values])
    sc.write_df(df, f"{half} {name}")
    schema = ap.Schema(t, int) if half == "k" else ap.Schema(int, t)
    contents = stored(place, f"{half} {name}", schema)
    wanted = [(v, n, 2) if half == "k" else (n, v, 2) for n, v in enumerate(values)]
    assert equal(sorted(contents, key=lambda row: row[half == "k"]), wanted)


def tuple_free(value: Any) -> Any:
    """What Spark's Row shows of a struct."""
    from pyspark.sql import Row

    return Row(x=value[0], y=value[1]) if isinstance(value, tuple) else value


def test_models_and_equal_names(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: nested models, structs in lists; a field that key and val both have is prefixed; rows are written
    back by these names, in any order and case, without those that are optional."""
    key, val = Key(id=U, name="n"), Deep(id=3, points=[Point(x=1, y=0.5), Point(x=2)], near=Point(x=9))

    async def fill(client: ap.Client) -> None:
        async with client.writer(name, ap.Schema(Key, Deep)) as writer:
            await writer.write([(key, val)])

    at(place, fill)
    df = sc.snapshot_df(name)
    assert df.columns == ["key_id", "name", "val_id", "points", "near", "tags"]
    row = df.collect()[0].asDict(recursive=True)
    assert row == {"key_id": U.bytes, "name": "n", "val_id": 3, **val.model_dump(exclude={"id"})}
    changed = df.selectExpr("points", "NEAR as NeAr", "val_id + 1 as VAL_ID", "'m' as name", "key_id")
    sc.write_df(changed, name)
    sc.write_df(df, name, mode="upsert", keys=["NAME", "key_id"])
    other = (Key(id=U, name="m"), val.model_copy(update={"id": 4}), 1)
    assert stored(place, name, ap.Schema(Key, Deep)) == [other, (key, val, 1)]
    wrong = [
        df.drop("points"),  # not optional
        df.withColumnRenamed("val_id", "id"),
        df.withColumn("more", df.val_id),
        df.withColumn("val_id", df.val_id.cast("string")),
        df.withColumn("key_id", df.name),
        df.selectExpr("*", "name as NAME"),
        df.drop("near").selectExpr("*", "named_struct('x', 1, 'z', 2) as near"),
    ]
    for frame in wrong:
        with pytest.raises((ap.InvalidUsage, ValueError, TypeError)) as found:
            sc.write_df(frame, name)
        assert isinstance(found.value, ap.InvalidUsage), found.value
        assert found.value.kind == ap.UsageKind.INVALID_COLUMN
    assert at(place, lambda client: client.admin.inspect(name)).upper == ap.Antichain(3)


SPARKS = """
    select k, cast(k as tinyint) b, cast(k as smallint) s, cast(k as int) i, cast(k as float) f,
      case k when 0 then double('nan') when 1 then -0.0d else double('-inf') end d,
      cast(1.25 as decimal(5,2)) m, cast(-12345678901234567890 as decimal(38,0)) big,
      timestamp'2026-03-29 03:00:00.000001' at, timestamp'1900-01-01 00:00:00' early,
      timestamp_ntz'2026-03-29 02:30:00' wall, date'2026-03-29' day,
      interval '1 02:03:04.5' day to second gone,
      case k when 1 then null else map('a', cast(array() as array<int>), 'b', array(1, null)) end mp,
      case k when 1 then map() else map(k, map('x', k)) end mm,
      array(named_struct('p', k, 'q', map('z', 1.5d)), null) ls,
      case k when 2 then null else named_struct('o', cast(null as string), 'l', array(array('x'), null))
        end st,
      binary('ab') bin, cast(null as string) nul, k > 1 yes
    from (select explode(array(0L, 1L, 2L)) k)
"""


def test_types_of_spark(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: a new shard takes all of them, and gives the same DataFrame back, whose types are the same."""
    df = spark.sql(SPARKS)
    sc.write_df(df, name, keys=["k", "wall"])
    found = sc.snapshot_df(name)
    order = ["k", "wall", *[c for c in df.columns if c not in ("k", "wall")]]
    assert found.columns == order
    plain = lambda schema: [(f.name, f.dataType.simpleString()) for f in schema]  # noqa: E731
    assert plain(found.schema) == plain(df.select(order).schema)
    shown = df.selectExpr(
        *[f"to_json(struct({c}))" for c in order if c != "d"], "d + 0.0d as d", "string(at)"
    )
    again = found.selectExpr(*[f"to_json(struct({c}))" for c in order if c != "d"], "d", "string(at)")
    assert sorted(map(repr, again.collect())) == sorted(
        repr(row).replace("d=-0.0", "d=0.0") for row in shown.collect()
    )
    # under another zone the instant is the same, and so is the wall clock
    spark.conf.set("spark.sql.session.timeZone", "America/Lima")
    try:
        texts = sc.snapshot_df(name).selectExpr("string(at)", "string(wall)").distinct().collect()
    finally:
        spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    assert [tuple(row) for row in texts] == [("2026-03-28 20:00:00.000001", "2026-03-29 02:30:00")]
    sc.write_df(found, name, mode="upsert")
    assert sc.snapshot_df(name, expand=False).selectExpr("sum(_diff)").collect()[0][0] == 3
    assert sc.changes_df(name, 1).count() == 0, "what is replaced by the same is no change"


UPSERTS: dict[str, str] = {
    "double": "explode(array(double('nan'), 0.0d, 1d))",
    "decimal": "explode(array(1.5bd, 2.5bd))",
    "timestamp": "explode(array(timestamp'2026-03-29 03:00:00', timestamp'2027-01-01'))",
    "binary": "explode(array(binary('a'), binary('')))",
    "boolean": "explode(array(true, false))",
    "list": "explode(array(array(1), array(1, 2), cast(array() as array<int>)))",
    "struct": "explode(array(named_struct('a', 1, 'b', 'x'), named_struct('a', 1, 'b', 'y')))",
    "list of structs": "explode(array(array(named_struct('a', 1)), array(named_struct('a', 2))))",
    "map": "explode(array(map('a', 1), map('a', 2, 'b', 3)))",
}


OFTEN: dict[str, Any] = {"struct": (), "double": (), "list": (), "list of structs": ()}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=OFTEN.get(k, pytest.mark.long)) for k in UPSERTS])
def test_keys_of_any_type_are_upserted(spark: Any, sc: Any, place: str, name: str, kind: str) -> None:
    """Goal: equal keys are equal, NaN and nested ones too."""
    df = spark.sql(f"select k as key, 1L val from (select {UPSERTS[kind]} k)")
    sc.write_df(df, name, keys=["key"])
    sc.write_df(df.selectExpr("key", "2L val"), name, mode="upsert")
    assert [(row[0], row[1]) for row in sc.snapshot_df(name).groupBy("val").count().collect()] == [
        (2, df.count())
    ]


def test_a_key_of_nothing_is_upserted(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: a shard whose key is nothing, or null, has one row under it."""
    for schema, key in ((ap.Schema(None, int), None), (ap.Schema(str | None, int), None)):
        shard = f"{name} {schema}"

        async def fill(client: ap.Client, shard: str = shard, schema: Any = schema, key: Any = key) -> None:
            async with client.writer(shard, schema) as writer:
                await writer.write([(key, 1)])

        at(place, fill)
        df = sc.snapshot_df(shard)
        sc.write_df(df.withColumn("val", df.val + 1), shard, mode="upsert")
        assert stored(place, shard, schema) == [(None, 2, 1)]


WRONG: dict[str, str] = {
    "time": "time '12:00:00'",
    "year-month interval": "interval '1' year",
    "calendar interval": "make_interval(1, 2)",
    "map of structs": "map(named_struct('a', 1), 1)",
    "variant": "parse_json('1')",
}


@pytest.mark.parametrize("kind", WRONG)
def test_types_that_have_no_counterpart_are_refused(
    spark: Any, sc: Any, place: str, name: str, kind: str
) -> None:
    """Goal: before anything runs; no shard is made."""
    from pyspark.errors import PySparkTypeError

    df = spark.sql(f"select 1 as key, {WRONG[kind]} as q")
    with pytest.raises((ap.InvalidUsage, PySparkTypeError)):
        sc.write_df(df, name, keys=["key"])
    assert name not in shards(place)


def test_stored_types_that_spark_lacks_are_refused(spark: Any, sc: Any, place: str) -> None:
    async def fill(client: ap.Client) -> None:
        await client.writer("time", ap.Schema(str, pa.time64("us")))

    at(place, fill)
    with pytest.raises(ap.InvalidUsage) as found:
        sc.changes_df("time", 0)
    assert found.value.kind == ap.UsageKind.INVALID_COLUMN


UINTS = pa.struct([("a", pa.uint8()), ("b", pa.uint16()), ("c", pa.uint32()), ("d", pa.uint64())])


def test_unsigned(spark: Any, sc: Any, place: str, name: str) -> None:
    """Goal: each in a type that holds all of it, and back."""
    schema: Any = ap.Schema(str, UINTS)
    top = {"a": 2**8 - 1, "b": 2**16 - 1, "c": 2**32 - 1, "d": 2**64 - 1}

    async def fill(client: ap.Client) -> None:
        async with client.writer(name, schema) as writer:
            await writer.write([("k", top)])

    at(place, fill)
    df = sc.snapshot_df(name)
    assert df.collect()[0].asDict() == {"key": "k", **top}
    sc.write_df(df, name)
    assert stored(place, name, schema) == [("k", top, 2)]


NUMBERS = pa.struct([("i", pa.uint8()), ("u", pa.binary(16)), ("m", pa.decimal128(38, 9)), ("n", pa.int64())])
BAD = {
    "too large": "select 'k' key, 256S i, binary('0123456789abcdef') u, 1.5bd m, 1L n",
    "too short": "select 'k' key, 1S i, binary('0123') u, 1.5bd m, 1L n",
    "places": "select 'k' key, 1S i, binary('0123456789abcdef') u, 0.0000000001bd m, 1L n",
    "null": "select cast(null as string) key, 1S i, binary('0123456789abcdef') u, 1.5bd m, 1L n",
}


@pytest.mark.parametrize(
    "kind", [*list(BAD)[:1], *[pytest.param(k, marks=pytest.mark.long) for k in list(BAD)[1:]]]
)
def test_values_that_do_not_fit_write_nothing(spark: Any, sc: Any, place: str, name: str, kind: str) -> None:
    """Goal: in a task, since values are seen there first; and the whole write fails."""

    async def fill(client: ap.Client) -> None:
        await client.writer(name, ap.Schema(str, NUMBERS))

    at(place, fill)
    with pytest.raises((ap.InvalidUpdate, ap.InvalidUsage)):
        sc.write_df(spark.sql(BAD[kind]), name)
    assert at(place, lambda client: client.admin.inspect(name)).upper == ap.Antichain(0)
