"""Goal: what is dumped can be loaded, by each format, with nothing lost; what cannot be stored is refused
with its file and row, and nothing is written."""

import asyncio
import io
import json
import os
import re
import subprocess
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from aiopersist.cli.layout import ColumnLayout
from tests.cli.test_commands import COMMAND, aiopersist

FORMATS = ["parquet", "csv", "ndjson", "arrow"]


class Place(NamedTuple):
    region: str
    number: int


class Item(BaseModel):
    count: int
    name: str | None
    at: datetime
    day: date
    price: Decimal
    data: bytes
    good: bool
    weight: float


NAMES = [None, "", 'a "b"', "x,y\nz\r", "NA", " ", "3", "null"]
ITEMS = {
    Place("eu", n): Item(
        count=n, name=name, at=datetime(2026, 1, 1, n, tzinfo=UTC), day=date(2026, 1, 1 + n),
        price=Decimal(n) / 4, data=bytes([250 - n, n]), good=n % 2 == 0, weight=n / 3,
    )
    for n, name in enumerate(NAMES)
}  # fmt: skip


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        await client.table("stock", Place, Item).put_many(ITEMS)
        await client.table("empty", Place, Item).put_many({Place("x", 1): ITEMS[Place("eu", 1)]})
        await client.table("plain", str, int).put_many({"a": 1, "b": 2})
        async with client.writer("raw", ap.Schema(int, str)) as writer:
            await writer.write([(1, "x"), (1, "x"), (2, "")])


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load")
    asyncio.run(_fill(folder))
    return folder


def rows(location: Path, shard: str) -> list[Any]:
    return [json.loads(line) for line in aiopersist("cat", shard, "--location", location).out.splitlines()]


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_dumped_can_be_loaded(form: str, location: Path, tmp_path: Path) -> None:
    """Goal: into a table of the same types, into a new one, and as updates of a shard."""
    file = tmp_path / f"stock.{form}"
    done = aiopersist("dump", "stock", "--to", file, "--json", "--location", location)
    assert (done.status, json.loads(done.out)["rows"]) == (0, len(ITEMS))
    assert list(tmp_path.iterdir()) == [file]
    before = rows(location, "stock")
    for number in range(2):
        done = aiopersist(
            "load", "stock", file, "--key", "region", "--key", "number", "--json", "--location", location
        )
        assert (done.status, done.err, json.loads(done.out)["rows"]) == (0, "", len(ITEMS)), number
    assert rows(location, "stock") == before
    done = aiopersist(
        "load", f"new {form}", file, "--key", "region", "--key", "number", "--location", location
    )
    assert done.status == 0, done.err
    if form in ("parquet", "arrow"):
        assert rows(location, f"new {form}") == before
    for shard, key in (("plain", "key"), ("raw", "key")):
        aiopersist("dump", shard, "--to", tmp_path / f"x.{form}", "--location", location)
        copy = aiopersist(
            "load", f"{shard} {form}", tmp_path / f"x.{form}", "--key", key, "--location", location,
            "--mode", "append" if shard == "raw" else "upsert",
        )  # fmt: skip
        assert copy.status == 0, copy.err
        assert rows(location, f"{shard} {form}") == rows(location, shard)


@pytest.mark.parametrize("form", FORMATS)
def test_pipes(form: str, location: Path) -> None:
    """Goal: from a process to a process, of any format."""
    out, into = ("dump", "stock", "--to", "-"), ("load", "empty", "-", "--key", "region", "--key", "number")
    options = ["--format", form, "--location", str(location)]
    dumped = CliRunner().invoke(app, [*out, *options])
    loaded = CliRunner().invoke(app, [*into, *options], input=dumped.stdout_bytes)
    assert (loaded.exit_code, loaded.stderr) == (0, "")
    assert len(rows(location, "empty")) == len(ITEMS) + 1
    asyncio.run(_only(location))


async def _only(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        table = client.table("empty", Place, Item)
        assert await table.get_many(ITEMS) == ITEMS
        await table.delete(*ITEMS)


def test_a_process_of_its_own(location: Path, tmp_path: Path) -> None:
    """Goal: as a shell runs it, through a pipe."""
    dump = subprocess.run(
        [*COMMAND, "dump", "plain", "--to", "-", "--format", "parquet", "--location", str(location)],
        capture_output=True, timeout=120,
    )  # fmt: skip
    assert (dump.returncode, dump.stderr) == (0, b"")
    assert pq.read_table(io.BytesIO(dump.stdout)).to_pydict() == {"key": ["a", "b"], "val": [1, 2]}
    load = subprocess.run(
        [*COMMAND, "load", "plain", "-", "--key", "key", "--format", "parquet", "--location", str(location)],
        input=dump.stdout, capture_output=True, timeout=120,
    )  # fmt: skip
    assert (load.returncode, load.stdout, load.stderr) == (0, b"plain: 2 rows loaded\n", b"")


def test_the_location_is_made(tmp_path: Path) -> None:
    """Goal: load, which makes what it writes to, makes a location, too, and says so; put and rm do not."""
    file, place = tmp_path / "x.csv", tmp_path / "made"
    file.write_text("key,val\na,1\n")
    for command in (["put", "x", "a", "1"], ["rm", "x", "a"], ["dump", "x", "--to", file]):
        refused = aiopersist(*command, "--location", place)
        assert (refused.status, refused.out) == (2, "")
        assert f"there is no location at {place}: check the path" in refused.err
    assert not place.exists()
    made = aiopersist("load", "x", file, "--key", "key", "--location", place)
    assert made == (0, "x: 1 row loaded, a new table\n", f"created a new location: {place}\n")
    again = aiopersist("load", "x", file, "--key", "key", "--json", "--location", place)
    assert (json.loads(again.out)["new"], again.err) == (False, "")
    urls = ["--blob", f"file://{tmp_path}/b", "--consensus", f"sqlite://{tmp_path}/state.db"]
    by_urls = aiopersist("load", "x", file, "--key", "key", *urls)
    assert (by_urls.status, "sqlite://" in by_urls.err) == (0, True)
    wrong = aiopersist("load", "x", file, "--key", "key", "--location", file)
    assert (wrong.status, wrong.out) == (2, "")
    assert "is not a directory" in wrong.err
    other = aiopersist("load", "x", file, "--key", "key", "--blob", f"file://{tmp_path}/blbo", *urls[2:])
    assert other.status == 2
    assert "blobs are not in the blob store" in other.err
    assert not (tmp_path / "blbo").exists()


def test_types_of_texts(location: Path, tmp_path: Path) -> None:
    """Goal: texts have the types of the shard, whatever the column of the key is called; a new shard takes
    instants with fractions, and a column without a value as texts."""

    def load(name: str, text: str, key: str = "id") -> Any:
        file = tmp_path / name
        file.write_text(text)
        return aiopersist("load", name, file, "--key", key, "--location", location)

    for name, first, second in (
        ("a.ndjson", '{"id":1,"n":1.5,"at":"2026-01-01 00:00:00.5","s":null}\n', '{"id":2,"n":2,"s":"x"}\n'),
        ("a.csv", "id,n,at,s\n1,1.5,2026-01-01 00:00:00.5,\n", "id,n,at,s\n2,2,,x\n"),
    ):
        for text in (first, second, first):
            done = load(name, text)
            assert (done.status, done.err) == (0, ""), done
        found = {row["key"]: row["val"] for row in rows(location, name)}
        assert (found[1]["n"], found[1]["s"], found[2]) == (1.5, None, {"n": 2.0, "at": None, "s": "x"})
        assert "2026-01-01" in found[1]["at"]
    printed = aiopersist("cat", "stock", "--where", "number < 3", "--location", location).out
    lines = [{"key": line["key"], "val": line["val"]} for line in map(json.loads, printed.splitlines())]
    assert [line["val"]["name"] for line in lines] == NAMES[:3]
    lines = [{"key": line["key"]["number"], "val": {"count": 1, "name": None}} for line in lines]
    done = load("whole.ndjson", "\n".join(map(json.dumps, lines[1:])), "key")
    assert (done.status, done.err) == (0, "")
    assert load("whole.ndjson", json.dumps(lines[0]), "key").status == 0
    assert [row["val"] for row in rows(location, "whole.ndjson")] == [{"count": 1, "name": None}] * 3


def test_columns_that_are_no_fields(location: Path, tmp_path: Path) -> None:
    """Goal: a file of other columns is refused by the name of the first one that lacks, or is too much."""
    file = tmp_path / "stock.csv"
    keys = ["--key", "region", "--key", "number"]
    aiopersist("dump", "stock", "--to", file, "--location", location)
    whole = file.read_text().split("\n", 1)
    for header, said in (("good", "no column 'good': the fields of the value are count, name"),
                         ("weight", "no column 'weight'")):  # fmt: skip
        file.write_text(whole[0].replace(header, "colour") + "\n" + whole[1])
        done = aiopersist("load", "stock", file, *keys, "--location", location)
        assert (done.status, done.out) == (1, "")
        assert said in done.err
    file.write_text("key,val,extra\n1,x,y\n")
    done = aiopersist("load", "fields", file, "--key", "key", "--location", location)
    assert done.status == 0
    file.write_text("key,val,extra,more\n1,x,y,z\n")
    done = aiopersist("load", "fields", file, "--key", "key", "--location", location)
    assert (done.status, "column 'more' is no field of the val" in done.err) == (1, True)


def test_nanoseconds(location: Path, tmp_path: Path) -> None:
    """Goal: instants that pandas wrote are stored, unless something of them would be lost."""
    for count, status in ((1_000, 0), (1_001, 1)):
        at = pa.array([count], pa.timestamp("ns", "UTC"))
        pq.write_table(pa.table({"key": [1], "at": at}), tmp_path / "ns.parquet")
        done = aiopersist("load", f"ns {count}", tmp_path / "ns.parquet", "--key", "key",
                          "--location", location)  # fmt: skip
        assert done.status == status
    assert "would lose data: 1001; nothing was written; 'ns 1001' was created and is empty" in done.err


BAD = [
    pytest.param("csv", "key,val\na,1\nb,x\n", "conversion error to int64", id="no int in CSV"),
    pytest.param("csv", "key,val\na,1\nb\n", "Expected 2 columns", id="a short row"),
    pytest.param("csv", "key,val\na,1\n,2\n", "row 2: shard 'plain': key: null", id="no key"),
    pytest.param("csv", "key,val\na,1\nb,\n", "row 2: ", id="no val"),
    pytest.param("ndjson", '{"key":"a","val":1}\n{"key":"b","val":"x"}\n', "row 2: ", id="no int in JSON"),
    pytest.param("ndjson", '{"key":"a","val":1}\n{"key":"b","val":\n', "row 2: ", id="no JSON"),
    pytest.param("ndjson", '{"key":"a","val":1}\n{"key":"b"}\n', "row 2: ", id="absent"),
    pytest.param("ndjson", 'null\n{"key":"a","val":1}\n', "row 1: ", id="null"),
    pytest.param("csv", "id,val\na,1\n", "no column 'key'", id="no key column"),
    pytest.param("csv", "key\na\n", "there are only columns of the key", id="no val column"),
    pytest.param("csv", "key,val,val\na,1,2\n", "two columns have the same name", id="a name twice"),
    pytest.param("parquet", "nonsense", "", id="no Parquet"),
    pytest.param("arrow", "nonsense", "", id="no Arrow"),
]


@pytest.mark.parametrize(("form", "text", "problem"), BAD)
def test_bad_rows(form: str, text: str, problem: str, location: Path, tmp_path: Path) -> None:
    """Goal: the second file is wrong: it is named, with its row, and nothing of the first is written."""
    good, bad = tmp_path / "good.csv", tmp_path / f"bad.{form}"
    good.write_text("key,val\nnew,1\nnewer,2\n")
    bad.write_text(text)
    before = rows(location, "plain")
    done = aiopersist("load", "plain", good, bad, "--key", "key", "--location", location)
    assert (done.status, done.out) == (1, "")
    assert f"{bad}" in done.err
    assert problem in done.err
    assert "Traceback" not in done.err
    assert rows(location, "plain") == before


def test_a_name_twice_in_what_is_new(tmp_path: Path) -> None:
    file = tmp_path / "new.csv"
    file.write_text("key,a,a\nk,1,2\n")
    done = aiopersist("load", "new", file, "--key", "key", "--location", tmp_path / "there")
    assert (done.status, "two columns have the same name" in done.err) == (1, True)


def test_what_cannot_begin(location: Path, tmp_path: Path) -> None:
    for arguments, problem in (
        (["load", "plain", tmp_path / "nothing.csv", "--key", "key"], "no such file"),
        (["load", "plain", tmp_path / "nothing", "--key", "key"], "add --format"),
        (["dump", "plain", "--to", tmp_path / "x.table", "--format", "table"], "for terminals"),
        (["dump", "plain", "--to", tmp_path / "no" / "x.csv"], "No such file"),
    ):
        done = aiopersist(*arguments, "--location", location)
        assert done.status == 2
        assert problem in done.err
    mode = aiopersist("load", "raw", tmp_path / "x.csv", "--key", "key", "--mode", "upsert",
                      "--location", location)  # fmt: skip
    assert mode.status == 2
    (tmp_path / "x.csv").write_text("key,val\n1,x\n")
    for shard, wanted in (("raw", "upsert"), ("plain", "append")):
        done = aiopersist("load", shard, tmp_path / "x.csv", "--key", "key", "--mode", wanted,
                          "--location", location)  # fmt: skip
        assert done.status == 2
        assert "use --mode" in done.err


def test_layout() -> None:
    """Goal: columns that could mean two things stay together."""

    class One(NamedTuple):
        a: int

    class Two(NamedTuple):
        a: int
        b: str

    class Taken(NamedTuple):
        key: int
        diff: int

    class Val(NamedTuple):
        val: int

    cases: dict[tuple[Any, Any], tuple[tuple[str, ...], tuple[str, ...]]] = {
        (str, int): (("key",), ("val",)),
        (One, int): (("key",), ("val",)),
        (Two, int): (("a", "b"), ("val",)),
        (str, Two): (("key",), ("a", "b")),
        (Two, Two): (("a", "b"), ("val",)),
        (str, Taken): (("key",), ("val",)),
        (str, Val): (("key",), ("val",)),
        (str, One): (("key",), ("a",)),
    }
    for (key, val), expected in cases.items():
        layout = ColumnLayout.of_schema(ap.Schema(key, val), ["diff"])
        assert (layout.key, layout.val) == expected
        assert ColumnLayout.of_columns(layout.columns, layout.key) == layout
    assert pa.types.is_struct(ColumnLayout(("a",), ("b", "c"), True, False).schema(
        pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.string())])
    ).arrow_schema.field("val").type)  # fmt: skip


def test_single_entries(location: Path) -> None:
    """Goal: get, put and rm by keys and vals as texts; what is not there is status 1."""

    def run(*arguments: object) -> Any:
        return aiopersist(*arguments, "--location", location)

    assert run("get", "plain", "a").out == "1\n"
    key = '{"region": "eu", "number": 3}'
    item = json.loads(run("get", "stock", key).out)
    assert (item["name"], item["data"], item["day"]) == (NAMES[3], "9wM=", "2026-01-04")
    put = run("put", "stock", '{"region": "eu", "number": 99}', json.dumps(item), "--json")
    time = json.loads(put.out)["time"]
    assert json.loads(run("get", "stock", '{"number": 99, "region": "eu"}').out) == item
    assert run("rm", "stock", '{"region": "eu", "number": 99}').out == "stock: 1 key deleted\n"
    gone = run("get", "stock", '{"region": "eu", "number": 99}')
    assert (gone.status, gone.out) == (1, "")
    assert run("get", "stock", '{"region": "eu", "number": 99}', "--as-of", time).status == 0
    run("put", "plain", "c", "7")
    some = run("rm", "plain", "c", "nobody", "--json")
    assert (some.status, json.loads(some.out)) == (1, {"table": "plain", "deleted": 1, "missing": ["nobody"]})
    assert run("get", "raw", "1").status == 1
    for wrong, problem in (
        (["put", "plain", "a", "x"], "val: expected int, got 'x'"),
        (["put", "plain", "a", '"x"'], "val: expected int, got "),
        (["put", "plain", "a", "null"], "val: expected int, got "),
        (["put", "plain", "a", "true"], "val: expected int, got "),
        (["put", "stock", key, "{}"], "needs 'count'"),
        (["put", "stock", key, json.dumps({**item, "colour": 1})], "has no 'colour'"),
        (["put", "stock", key, json.dumps({**item, "day": "yesterday"})], "day: expected date, got "),
        (["get", "stock", "eu"], "KEY: expected JSON of a struct"),
        (["get", "stock", '{"region": "eu"}'], "needs 'number'"),
        (["get", "plain", "a", "--as-of", "today"], "--as-of"),
    ):
        refused = run(*wrong)
        assert (refused.status, refused.out) == (2, "")
        assert problem in refused.err


def test_a_text_wants_quotes(tmp_path: Path) -> None:
    """Goal: who puts a text as it is learns how to write it; a time is told as the instant that it is."""
    file = tmp_path / "x.csv"
    file.write_text("key,val\n1,a\n")
    place = ["--location", tmp_path / "made"]
    assert aiopersist("load", "x", file, "--key", "key", *place).status == 0
    refused = aiopersist("put", "x", "2", "hello", *place)
    assert (refused.status, refused.out) == (2, "")
    assert (
        "val: expected str, got 'hello': write texts in double quotes, as in JSON: '\"hello\"'" in refused.err
    )
    assert "KEY: expected int, got 'two'\n" in aiopersist("put", "x", "two", '"hello"', *place).err
    assert re.match(
        r"x: written at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", aiopersist("put", "x", "2", '"b"', *place).out
    )


def test_arguments_that_are_no_utf8(location: Path) -> None:
    """Goal: Python makes lone surrogates of them, which neither JSON nor Arrow takes."""
    bad = os.fsdecode(b"\xff")
    for command, told in (
        (["get", "plain", bad], "KEY"),
        (["put", "plain", bad, "1"], "KEY"),
        (["put", "plain", "a", bad], "val"),
        (["put", "plain", "a", "-"], "val"),
        (["rm", "plain", "a", bad], "KEY"),
        (["get", "stock", '{"region": "' + bad + '"}'], "KEY"),
    ):
        done = CliRunner().invoke(app, [*command, "--location", str(location)], input=b"\xff")
        assert done.exit_code == 2, done.stderr
        assert f"{told} " in done.stderr
        assert "is no UTF-8" in done.stderr
    assert aiopersist("get", "plain", "a", "--location", location).status == 0
