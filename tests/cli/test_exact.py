"""Goal: what a command is given is stored, found and deleted as it is, digit by digit, or is refused: no
fraction is cut off, no two keys become one, no junk is left out."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from math import inf, nan
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.cli.result import Result
from tests.cli.test_commands import aiopersist


class Place(BaseModel, frozen=True):
    region: str
    number: int


class Val(BaseModel):
    l: list[int]  # noqa: E741
    n: int


LARGE = Decimal("1234567890123.123456789")
LARGE_BINARY = pa.field("val", pa.large_binary(), nullable=False)
FLOAT32 = pa.field("val", pa.float32(), nullable=False)
TABLES: dict[str, tuple[Any, Any, dict[Any, Any]]] = {
    "ints": (int, str, {3: "three", 4: "four"}),
    "strs": (str, int, {"a": 1}),
    "structs": (Place, str, {Place(region="us", number=2): "two"}),
    "vals": (str, Val, {"a": Val(l=[1], n=2)}),
    "small": (str, FLOAT32, {"a": 1.5}),
    "bytes": (bytes, int, {b"abc": 1}),
    "decimals": (Decimal, int, {LARGE: 1}),
    "times": (datetime, int, {datetime(2026, 1, 1, tzinfo=UTC): 1}),
    "floats": (str, float, {"a": 1.5}),
    "by float": (float, int, {9007199254740992.0: 1}),
    "uuids": (str, UUID, {"a": UUID(int=7)}),
    "large": (str, LARGE_BINARY, {"a": b"a"}),
    "odd": (str, float, {"a": nan, "b": inf}),
}


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        for name, (key, val, entries) in TABLES.items():
            await client.table(name, key, val).put_many(list(entries.items()))


async def _entries(folder: Path) -> dict[str, dict[Any, Any]]:
    found: dict[str, dict[Any, Any]] = {}
    async with ap.open(folder, maintenance=False) as client:
        for name, (key, val, _) in TABLES.items():
            found[name] = {k: v async for k, v in client.table(name, key, val).items()}
    return found


@pytest.fixture
def location(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path))
    return tmp_path


def run(location: Path, *arguments: object) -> Result:
    return aiopersist(*arguments, "--location", location)


REFUSED = [
    ("get", "ints", "3.5"),
    ("get", "ints", "3.0"),
    ("get", "ints", "1e2"),
    ("put", "ints", "3.7", '"changed"'),
    ("rm", "ints", "4.9"),
    ("put", "strs", "a", "5.7"),
    ("put", "strs", "a", "NaN"),
    ("put", "vals", "a", '{"l": [1.5, 2], "n": 2}'),
    ("put", "vals", "a", '{"l": [1], "n": 2.9}'),
    ("get", "structs", '{"region": "us", "number": 2.5}'),
    ("put", "small", "a", "1e300"),
    ("put", "floats", "a", "1e999"),
    ("put", "floats", "a", "1e99999999999999999999"),
    ("put", "floats", "a", "9007199254740993"),
    ("put", "floats", "a", "[" * 300 + "]" * 300),
    ("put", "strs", "a", '"\\ud800"'),
    ("get", "by float", "9007199254740993"),
    ("rm", "by float", "9007199254740993"),
    ("put", "uuids", "a", "[1, 1]"),
    ("put", "uuids", "a", '"YWJj"'),
    ("put", "floats", "a", "[" * 5_000),
    ("get", "bytes", "YW###Jj"),
    ("get", "bytes", "YW Jj$$"),
    ("rm", "bytes", "YW!Jj"),
    ("put", "decimals", "1.1234567891", "2"),
]


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_it_is_refused(arguments: tuple[str, ...], location: Path) -> None:
    before = repr(asyncio.run(_entries(location)))
    done = run(location, *arguments)
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.err
    assert repr(asyncio.run(_entries(location))) == before


def test_decimals_keep_their_digits(location: Path) -> None:
    assert run(location, "put", "decimals", str(LARGE), "7").status == 0
    assert asyncio.run(_entries(location))["decimals"] == {LARGE: 7}
    assert run(location, "cat", "decimals", "--where", f"key = {LARGE}", "--json").out.count("\n") == 1
    assert run(location, "cat", "decimals", "--where", f"key > {LARGE}1", "--json").out == ""
    assert run(location, "put", "floats", "b", "0.1").status == 0
    assert asyncio.run(_entries(location))["floats"] == {"a": 1.5, "b": 0.1}


@pytest.mark.parametrize(
    ("form", "text", "table", "problem"),
    [
        ("ndjson", '{"key":"2026-02-02T00:00:00","val":1}\n', "times", "expected a zone offset"),
        ("csv", "key,val\n2026-02-02T00:00:00,1\n", "times", "expected a zone offset"),
        ("ndjson", '{"key":"YW!Jj","val":1}\n', "bytes", "is no URL-safe base64"),
        ("csv", "key,val\nYW!Jj,1\n", "bytes", "is no URL-safe base64"),
        ("ndjson", '{"key":"a","val":4.0}\n', "strs", "couldn't parse:4.0"),
    ],
)
def test_rows_are_refused(
    form: str, text: str, table: str, problem: str, location: Path, tmp_path: Path
) -> None:
    before = repr(asyncio.run(_entries(location)))
    file = tmp_path / f"rows.{form}"
    file.write_text(text)
    done = run(location, "load", table, file, "--key", "key")
    assert (done.status, done.out) == (1, "")
    assert problem in done.err
    assert repr(asyncio.run(_entries(location))) == before


def test_instants_with_a_zone_are_loaded(location: Path, tmp_path: Path) -> None:
    file = tmp_path / "times.ndjson"
    file.write_text('{"key":"2026-02-02T00:00:00+02:00","val":1}\n{"key":"2026-02-03T00:00:00Z","val":2}\n')
    assert run(location, "load", "times", file, "--key", "key").status == 0
    found = asyncio.run(_entries(location))["times"]
    assert found[datetime(2026, 2, 1, 22, tzinfo=UTC)] == 1
    assert found[datetime(2026, 2, 3, tzinfo=UTC)] == 2


@pytest.mark.parametrize(
    "key",
    [
        "12345678901234567890 12345678901234567891",
        "12345678901234567890 12345678901234567891 0.5",
        "9007199254740993 9007199254740992 0.5",
        "01234 1234",
        "007 7",
        "-0 0",
        "0x10 16",
        "+49123 49123",
    ],
)
def test_different_numbers_of_a_new_table_stay_different(key: str, tmp_path: Path) -> None:
    """Goal: a CSV names no types; what a number would lose of a text stays a text."""
    file = tmp_path / "new.csv"
    file.write_text("card,v,w,zero\n" + "".join(f"{text},x,{n}.5,0\n" for n, text in enumerate(key.split())))
    assert run(tmp_path / "there", "load", "cards", file, "--key", "card").status == 0
    found = run(tmp_path / "there", "cat", "cards", "--json").out
    for n, text in enumerate(key.split()):
        assert f'"key":"{text}"' in found
        assert f'"w":{n}.5' in found
    assert '"zero":0' in found


@pytest.mark.parametrize(
    "line",
    ['{"k":9007199254740993,"v":1}', '{"k":1,"v":{"a":[9007199254740993]}}', f'{{"k":{"9" * 5000},"v":1}}'],
)
def test_integers_beside_fractions_are_refused_in_a_new_table(line: str, tmp_path: Path) -> None:
    file = tmp_path / "new.ndjson"
    file.write_text('{"k":0.5,"v":' + ('{"a":[0.5]}' if "{" in line[1:] else "2") + "}\n" + line + "\n")
    done = run(tmp_path / "there", "load", "t", file, "--key", "k")
    assert done.status == 1
    assert "row 2: " in done.err
    assert "Traceback" not in done.err
    file.write_text('{"k":9007199254740993,"v":0.5}\n{"k":1,"v":9007199254740992}\n')  # each holds its own
    assert run(tmp_path / "there", "load", "t", file, "--key", "k").status == 0


def test_integers_of_more_than_64_bits_are_refused_in_a_new_table(tmp_path: Path) -> None:
    file = tmp_path / "new.ndjson"
    file.write_text('{"k":"x 12345678901234567890","v":1}\n{"k":"b","v":-12345678901234567890}\n')
    done = run(tmp_path / "there", "load", "cards", file, "--key", "k")
    assert done.status == 1
    assert "row 2: v: -12345678901234567890 is no float: write it in quotes, as a text" in " ".join(
        done.err.split()
    )
    file.write_text('{"k":"a","v":9223372036854775807}\n{"k":"b","v":-9223372036854775808}\n')
    assert run(tmp_path / "there", "load", "cards", file, "--key", "k").status == 0


def test_what_json_lacks_is_not_dumped_as_text(location: Path, tmp_path: Path) -> None:
    file = tmp_path / "odd.ndjson"
    done = run(location, "dump", "odd", "--to", file)
    assert done.status == 1
    assert "cannot hold the NaN or infinity in 'val': choose parquet, arrow or csv" in " ".join(
        done.err.split()
    )
    assert not file.exists()
    for form in ("parquet", "csv", "arrow"):
        there = tmp_path / f"odd.{form}"
        assert run(location, "dump", "odd", "--to", there).status == 0
        assert run(location, "load", f"odd {form}", there, "--key", "key").status == 0
        shown = [run(location, "cat", name, "--json").out for name in ("odd", f"odd {form}")]
        assert shown[0] == shown[1]


def test_large_binaries_are_bytes_too(location: Path, tmp_path: Path) -> None:
    assert run(location, "put", "large", "b", '"YWI="').status == 0
    assert asyncio.run(_entries(location))["large"] == {"a": b"a", "b": b"ab"}
    for form in ("ndjson", "csv"):
        file = tmp_path / f"large.{form}"
        assert run(location, "dump", "large", "--to", file).status == 0
        assert run(location, "rm", "large", "a", "b").status == 0
        assert run(location, "load", "large", file, "--key", "key").status == 0
        assert asyncio.run(_entries(location))["large"] == {"a": b"a", "b": b"ab"}


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_instants_of_any_unit_come_back(zone: str | None, tmp_path: Path) -> None:
    val = pa.field("val", pa.timestamp("ms", zone), nullable=False)
    instant = datetime(2026, 1, 1, 2, 3, 4, 123_000, tzinfo=UTC if zone else None)

    async def there(name: str, *, put: bool = False) -> Any:
        async with ap.open(tmp_path, maintenance=False) as client:
            table = client.table(name, str, val)
            if put:
                await table.put("a", instant)
            return await table.get("a")

    assert asyncio.run(there("ms", put=True)) == instant
    for form in ("ndjson", "csv", "parquet", "arrow"):
        file = tmp_path / f"ms.{form}"
        assert run(tmp_path, "dump", "ms", "--to", file).status == 0
        assert run(tmp_path, "rm", "ms", "a").status == 0
        done = run(tmp_path, "load", "ms", file, "--key", "key")
        assert done.status == 0, (form, done)
        assert asyncio.run(there("ms")) == instant
    (tmp_path / "us.ndjson").write_text(
        '{"key":"a","val":"2026-01-01T00:00:00.000001' + ("Z" if zone else "") + '"}\n'
    )
    assert run(tmp_path, "load", "ms", tmp_path / "us.ndjson", "--key", "key").status == 1
