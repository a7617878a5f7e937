"""Goal: what is dumped can be loaded, whatever its type and however deep it lies; a text that stands for no
value is refused with its row, and nothing is cut off."""

import asyncio
import re
from collections.abc import Iterator
from datetime import time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.cli.texts import from_texts
from tests.cli.test_exact import run

ROWS = 4
WAIT = pa.field("", pa.duration("us"), nullable=False)
OF_DAY = pa.field("", pa.time64("us"), nullable=False)
KEY = pa.field("key", pa.int64(), nullable=False)


def _stored(of: pa.DataType, values: list[int]) -> pa.Array:
    """Values as Arrow stores them."""
    return pa.array(values, pa.int32() if of.bit_width == 32 else pa.int64()).cast(of)


def _columns() -> Iterator[pa.Array]:
    for signed in (pa.int8(), pa.int16(), pa.int32(), pa.int64()):
        yield pa.array([-(2 ** (signed.bit_width - 1)), -1, 0, 2 ** (signed.bit_width - 1) - 1], signed)
    for unsigned in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        yield pa.array([0, 1, 2, 2**unsigned.bit_width - 1], unsigned)
    yield pa.array([0.1, 1e38, -1.5, 1e-45], pa.float32())
    yield pa.array([0.1, 1e308, -1.5, 5e-324], pa.float64())
    yield pa.array([True, False, True, True])
    for texts in (pa.string(), pa.large_string()):
        yield pa.array(["", 'a\n"b,', "null", " é"], texts)
    for some in (pa.binary(), pa.large_binary(), pa.binary(4)):
        yield pa.array([b"abcd", b"\0\0\0\0", b"\xff\xff\xff\xff", b"1234"], some)
    yield pa.array([Decimal("1.50"), Decimal("-99999999.99"), Decimal("0.01"), Decimal(0)]).cast(
        pa.decimal128(10, 2)
    )
    yield _stored(pa.date32(), [0, 1, -719_162, 2_932_896])
    yield _stored(pa.time32("s"), [0, 1, 86_399, 3_600])
    yield _stored(pa.time32("ms"), [0, 1, 86_399_999, 3_600_000])
    yield _stored(pa.time64("us"), [0, 1, 86_399_999_999, 3_600_000_000])
    for unit in ("s", "ms", "us"):
        yield _stored(pa.duration(unit), [0, 1, -1, 90_061])
        for zone in (None, "UTC", "Europe/Berlin", "+02:00"):
            yield _stored(pa.timestamp(unit, zone), [0, 1, -1, 1_700_000_000])


def _flat() -> dict[pa.Field, pa.Array]:
    """Each type, and beside each one with a null."""
    found = {}
    for column in _columns():
        found[pa.field(str(column.type), column.type, nullable=False)] = column
        found[pa.field(f"{column.type}?", column.type)] = _with_null(column)
    return found


def _nested() -> dict[pa.Field, pa.Array]:
    """Each type in a struct that may be absent, in a list, and in structs of a list."""
    found: dict[pa.Field, pa.Array] = {}
    for column in _columns():
        inner = pa.field("x", column.type, nullable=False)
        absent, offsets = pa.array([False, True, False, False]), pa.array([0, 1, 1, 3, 4], pa.int32())
        struct = pa.StructArray.from_arrays([column], fields=[inner], mask=absent)
        found[pa.field(f"struct {column.type}", struct.type)] = struct
        some = pa.ListArray.from_arrays(offsets, _with_null(column))
        found[pa.field(f"list {column.type}", some.type, nullable=False)] = some
        whole = pa.StructArray.from_arrays([column], fields=[inner])
        structs = pa.ListArray.from_arrays(
            offsets, whole, type=pa.list_(pa.field("item", whole.type, nullable=False)), mask=absent
        )
        found[pa.field(f"structs {column.type}", structs.type)] = structs
    return found


def _with_null(column: pa.Array) -> pa.Array:
    return pa.concat_arrays([column[: ROWS - 1], pa.nulls(1, column.type)])


VALS = {"flat": _flat(), "nested": _nested()}


def _type(name: str) -> pa.Field:
    return pa.field("val", pa.struct(list(VALS[name])), nullable=False)


async def _fill(folder: Path, name: str) -> None:
    fields = VALS[name]
    vals = pa.StructArray.from_arrays(list(fields.values()), fields=list(fields))
    rows = pa.table([pa.array(range(ROWS)), vals], pa.schema([KEY, _type(name)]))
    async with ap.open(folder, maintenance=False) as client:
        await client.table(name, KEY, _type(name)).put_many(rows)
        empty = client.table(f"{name} again", KEY, _type(name))
        await empty.put_many(rows[:1])
        await empty.delete(0)


async def _vals(folder: Path, name: str, of: str) -> Any:
    schema = ap.Schema(KEY, _type(of))
    async with ap.open(folder, maintenance=False) as client, client.reader(name, schema) as reader:
        async with reader.snapshot() as snapshot:
            batches = [batch async for batch in snapshot.batches()]
    return pa.Table.from_batches(batches).sort_by("key").column("val").combine_chunks()


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, form) for name in VALS for form in ("csv", "ndjson", "parquet", "arrow")],
)
def test_all_types_come_back(name: str, form: str, tmp_path: Path) -> None:
    location, file = tmp_path / "there", tmp_path / f"all.{form}"
    asyncio.run(_fill(location, name))
    dumped = run(location, "dump", name, "--to", file)
    if (name, form) == ("nested", "csv"):
        assert dumped.status == 2
        assert "csv cannot hold" in dumped.err
        return
    assert dumped.status == 0, dumped.err
    loaded = run(location, "load", f"{name} again", file, "--key", "key")
    assert loaded.status == 0, loaded.err
    before, after = (asyncio.run(_vals(location, shard, name)) for shard in (name, f"{name} again"))
    for field in VALS[name]:
        assert after.field(field.name).equals(before.field(field.name)), field


REFUSED = [
    (pa.time32("ms"), "00:00:00.0001", "would lose data"),
    (pa.time64("us"), "25:00", "'25:00' as a time of day"),
    (pa.time64("us"), "12:00Z", "expected no zone offset"),
    (pa.duration("s"), "PT0.5S", "would lose data"),
    (pa.duration("us"), "PT0.0000001S", "finer than a microsecond"),
    (pa.duration("us"), "5", "'5' is no duration like PT1H30M"),
    (pa.timestamp("ms"), "2026-01-01T00:00:00.0001", "would lose data"),
    (pa.timestamp("us", "UTC"), "2026-01-01T00:00", "expected a zone offset"),
    (pa.date32(), "2026-13-01", "'2026-13-01'"),
    (pa.binary(), "YW!Jj", "'YW!Jj' is no URL-safe base64"),
]


@pytest.mark.parametrize(("of", "text", "problem"), REFUSED, ids=[f"{of} {text}" for of, text, _ in REFUSED])
def test_a_text_that_stands_for_no_value(of: pa.DataType, text: str, problem: str) -> None:
    for column, wanted in (
        (pa.array([text]), of),
        (pa.array([[None, text]]), pa.list_(of)),
        (pa.array([{"x": text}]), pa.struct({"x": of})),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            from_texts(column, wanted)


def test_the_row_of_a_refused_text_is_told(tmp_path: Path) -> None:
    async def make() -> None:
        async with ap.open(tmp_path / "there", maintenance=False) as client:
            await client.table("waits", str, WAIT).put("x", timedelta(days=400, microseconds=1))
            await client.table("ints", str, list[int]).put("x", [1])
            await client.table("lists", str, list[timedelta]).put("x", [])

    asyncio.run(make())
    file = tmp_path / "rows.ndjson"
    for table, good, bad in (
        ("waits", '"PT1S"', '"PT0.0000001S"'),
        ("ints", "[2]", "[3, 4.5]"),
        ("lists", '["PT1S"]', '["PT1S", "x"]'),
    ):
        file.write_text("\n".join(f'{{"key":"{n}","val":{bad if n == 612 else good}}}' for n in range(1000)))
        done = run(tmp_path / "there", "load", table, file, "--key", "key")
        assert done.status == 1
        assert f"{file.name}, row 613: " in done.err or f"{file.name}: row 613: " in done.err
    assert run(tmp_path / "there", "get", "waits", "x").out == '"P1Y35DT0.000001S"\n'


def test_single_entries_have_the_same_texts(tmp_path: Path) -> None:
    """Goal: `put`, `get` and `rm` take what `cat` writes."""

    async def make() -> None:
        async with ap.open(tmp_path, maintenance=False) as client:
            await client.table("waits", WAIT, OF_DAY).put(timedelta(days=1, hours=1), time(12, 30))

    asyncio.run(make())
    assert run(tmp_path, "put", "waits", "PT5S", '"12:30:00.000001"').status == 0
    assert run(tmp_path, "get", "waits", "P1DT1H").out == '"12:30:00"\n'
    assert run(tmp_path, "get", "waits", "PT5S").out == '"12:30:00.000001"\n'
    assert run(tmp_path, "put", "waits", "PT5S", '"12:30:00.0000001"').status == 2
    assert run(tmp_path, "rm", "waits", "PT5S").status == 0
    assert run(tmp_path, "get", "waits", "PT5S").status == 1


TEXTS_OF_NEW = [
    pytest.param(
        "2026-01-01T00:00:00Z", "2026-01-01T00:00:00.5+02:00", pa.timestamp("us", "UTC"), id="zones"
    ),
    pytest.param("2026-01-01T00:00:00", "2026-01-01 00:00:00.5", pa.timestamp("us"), id="no zones"),
    pytest.param("2026-01-01T00:00:00Z", "2026-01-01T00:00:00", pa.string(), id="both"),
    pytest.param("2026-01-01T00:00:00.000000001Z", "2026-01-01T00:00:00Z", pa.string(), id="nanoseconds"),
    pytest.param("2026-01-01", "2026-01-02", pa.date32(), id="days"),
]


@pytest.mark.parametrize("form", ["csv", "ndjson"])
@pytest.mark.parametrize(("one", "other", "of"), TEXTS_OF_NEW)
def test_instants_of_a_new_table(one: str, other: str, of: pa.DataType, form: str, tmp_path: Path) -> None:
    """Goal: two instants never become one since their zones are left out."""
    file = tmp_path / f"new.{form}"
    if form == "csv":
        file.write_text(f"k,a\n{one},1\n{other},2\n")
    else:
        lines = [f'{{"k":"{text}","a":{{"b":["{text}",null]}}}}\n' for text in (one, other)]
        file.write_text("".join(lines))
    done = run(tmp_path / "there", "load", "new", file, "--key", "k")
    assert done.status == 0, done.err

    async def stored() -> tuple[pa.Field, pa.Field, int]:
        async with ap.open(tmp_path / "there", maintenance=False) as client:
            _, schema = await client.schema("new")
            key, val = (schema.arrow_schema.field(half) for half in ("key", "val"))
            return key, val, await client.table("new", key, val).count()

    key, val, count = asyncio.run(stored())
    assert (key.type, count) == (of, 2)
    if form == "ndjson":
        assert val.type == pa.struct({"a": pa.struct({"b": pa.list_(of)})})


def test_types_that_the_user_says(tmp_path: Path) -> None:
    location, file = tmp_path / "there", tmp_path / "places.csv"
    file.write_text("zip,price,since,wait\n1234,2.50,2026-01-01,PT5M\n0234,1.05,2026-01-02,PT0S\n")
    said = ["zip=str", "price=decimal(12,2)", "since=str", "wait=timedelta"]
    options = [part for text in said for part in ("--type", text)]
    assert run(location, "load", "places", file, "--key", "zip", *options).status == 0

    async def stored() -> tuple[pa.Field, pa.Field, dict[Any, Any]]:
        async with ap.open(location, maintenance=False) as client:
            _, schema = await client.schema("places")
            key, val = (schema.arrow_schema.field(half) for half in ("key", "val"))
            return key, val, dict([entry async for entry in client.table("places", key, val).items()])

    key, val, entries = asyncio.run(stored())
    assert key.type == pa.string()
    assert val.type.field("price").type == pa.decimal128(12, 2)
    assert entries["1234"] == {"price": Decimal("2.50"), "since": "2026-01-01", "wait": timedelta(minutes=5)}
    for text, problem in (
        ("zip=str", "'places' exists and has its types"),
        ("zip=nothing", "--type 'zip=nothing' is no COLUMN=TYPE"),
        ("zip", "is no COLUMN=TYPE"),
    ):
        done = run(location, "load", "places", file, "--key", "zip", "--type", text)
        assert (done.status, problem in " ".join(done.err.split())) == (2, True), done.err
    for text, problem in (
        ("nowhere=str", "no column 'nowhere'; there are zip, price, since, wait"),
        ("price=int", "invalid value '2.50'"),
        ("price=float16", "cannot store halffloat"),
    ):
        done = run(location, "load", f"new {text}", file, "--key", "zip", "--type", text)
        assert (done.status, problem in " ".join(done.err.split())) == (1, True), done.err
