"""Goal: `aiopersist cat` writes what a shard holds as of a time, for people and for programs; and nothing to
the location. It runs as a command."""

import asyncio
import csv
import io
import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from tests.cli.result import Result

COMMAND = [sys.executable, "-c", "from aiopersist.cli import main; main()", "cat"]
HOSTILE = "[red]\x1b[31m<b>,\n"


class Item(BaseModel):
    count: int
    name: str = ""


def cat(*arguments: object) -> Result:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, env=os.environ, timeout=120
    )
    return Result(done.returncode, done.stdout, done.stderr)


def in_process(*arguments: object) -> Result:
    """The same without a process of its own."""
    done = CliRunner().invoke(app, ["cat", *map(str, arguments)])
    return Result(done.exit_code, done.stdout, done.stderr)


async def filled(folder: Path) -> tuple[int, int]:
    """A table that changed once, and a shard; returns the times of the table's changes."""
    async with ap.open(folder) as client:
        stock = client.table("stock", str, Item)
        first = await stock.put_many({"apple": Item(count=3), HOSTILE: Item(count=1)})
        second = await stock.put("apple", Item(count=2, name="old"))
        async with client.writer("raw", ap.Schema(bytes, float)) as writer:
            await writer.compare_and_append([(b"\xff", 0.5, 4, 2), (b"a", float("nan"), 4, 1)], 0, 5)
    return first, second


def test_contents_as_of_a_time(tmp_path: Path) -> None:
    """Goal: by its number, and by the instant that it is; without one, the newest. One row a line."""
    first, _ = asyncio.run(filled(tmp_path))
    instant = datetime.fromtimestamp(first / 1_000_000, UTC).isoformat()
    newest = cat("stock", "--location", tmp_path)
    assert (newest.status, newest.err) == (0, "")
    apple = {"key": "apple", "val": {"count": 2, "name": "old"}, "diff": 1}
    assert [json.loads(line) for line in newest.out.splitlines()][1:] == [apple]
    for time in (first, instant):
        rows = in_process("stock", "--location", tmp_path, "--as-of", time, "--json").out.splitlines()
        assert [json.loads(row)["val"]["count"] for row in rows] == [1, 3]


def test_formats(tmp_path: Path) -> None:
    asyncio.run(filled(tmp_path))
    lines = in_process("raw", "--location", tmp_path, "--format", "ndjson").out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"key": "YQ==", "val": "NaN", "diff": 1},
        {"key": "_w==", "val": 0.5, "diff": 2},
    ]
    text = in_process("stock", "--location", tmp_path, "--format", "csv", "--columns", "key,val.count").out
    rows = [["key", "val.count", "diff"], [HOSTILE, "1", "1"], ["apple", "2", "1"]]
    assert list(csv.reader(io.StringIO(text, newline=""))) == rows
    shown = in_process("stock", "--location", tmp_path, "--format", "table").out
    assert "\x1b" not in shown
    assert re.search(r'apple +│ \{"count":2,"name":"old"\} +│ 1 ', shown)
    one = in_process("stock", "--location", tmp_path, "--json", "--limit", 1).out
    assert one.count("\n") == 1
    assert in_process("stock", "--location", tmp_path, "--json", "--limit", 0) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["stock", "--as-of", "yesterday"], 2, "'yesterday' is none of"),
        (["stock", "--as-of", "2026-01-01"], 2, "has no zone: write 2026-01-01T00:00:00Z or"),
        (["stock", "--json", "--format", "csv"], 2, "--json is --format ndjson"),
        (["none"], 1, "'none'"),
        (["raw", "--as-of", "2026-01-01T00:00Z"], 1, "INVALID_TIME"),
        (["raw", "--as-of", "7"], 1, "is not complete at 7: its upper is 5"),
        (["stock", "--as-of", "2199-01-01T00:00Z"], 1, "is not complete at 2199-01-01 00:00:00Z"),
        (["stock", "--columns", "val.none"], 2, "--columns: no column 'val.none'; there are key, val, count"),
        (["raw", "--columns", "x"], 2, "no column 'x'; there are key, val\n"),
        (["raw", "--where", "val = x"], 2, "write texts in quotes"),
    ],
)
def test_what_it_refuses(arguments: list[Any], status: int, said: str, tmp_path: Path) -> None:
    """Goal: one line that says why."""
    asyncio.run(filled(tmp_path))
    result = in_process(*arguments, "--location", tmp_path)
    assert (result.status, result.out, result.err.count("\n")) == (status, "", 1)
    assert said in result.err


def test_an_instant_that_has_passed_at_rest(tmp_path: Path) -> None:
    """Goal: nobody has written since, so the contents are those of the last commit. A message says so, for
    every command that reads; nothing is written."""
    _, last = asyncio.run(filled(tmp_path))
    at = datetime.now(UTC).isoformat()
    said = "'stock': nobody has written since"
    for command in (
        ["cat", "stock", "--as-of", at, "--format", "ndjson"],
        ["cat", "stock", "--as-of", "now-0s", "--format", "ndjson"],
        ["get", "stock", "apple", "--as-of", at],
        ["dump", "stock", "--as-of", at, "--to", "-", "--format", "ndjson"],
    ):
        done = CliRunner().invoke(app, [*command, "--location", str(tmp_path)])
        assert (done.exit_code, said in done.stderr) == (0, True), done.stderr
        assert '"count":2,"name":"old"' in done.stdout
    for times in ([str(last), at], [at], [at, "now-0s"]):
        done = CliRunner().invoke(app, ["diff", "stock", *times, "--location", str(tmp_path)])
        assert (done.exit_code, done.stdout, said in done.stderr) == (0, "", True)
    assert asyncio.run(upper_of(tmp_path)) == last + 1


async def upper_of(folder: Path) -> object:
    async with ap.open(folder, readonly=True) as client:
        return (await client.upper("stock")).time


def test_it_makes_nothing(tmp_path: Path) -> None:
    """Goal: a mistyped location is told, and not made."""
    result = cat("stock", "--location", tmp_path / "none")
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert not (tmp_path / "none").exists()


async def test_whoever_reads_may_have_enough(tmp_path: Path) -> None:
    """Goal: it ends quietly when its output is closed."""
    async with ap.open(tmp_path) as client:
        await client.table("t", int, str).put_many(dict.fromkeys(range(5000), "x" * 1000))
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "t", "--location", str(tmp_path), stdout=-1, stderr=-1, limit=4096
    )
    assert process.stdout is not None and process.stderr is not None
    assert json.loads(await process.stdout.readline())["key"] == 0
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    assert await process.stderr.read() == b""
    assert await process.wait() == 0


def test_where(tmp_path: Path) -> None:
    """Goal: the rows that a condition says; a wrong one is refused at its place, before anything is read."""
    asyncio.run(filled(tmp_path))
    where = 'key >= "a" and val.count >= 2'
    lines = in_process("stock", "--location", tmp_path, "--where", where).out.splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["apple"]
    assert in_process("stock", "--location", tmp_path, "--where", "count > 9", "--format", "csv").out == (
        "key,val,diff\n"
    )
    refused = in_process("stock", "--location", tmp_path, "--where", "key >= and")
    assert (refused.status, refused.out) == (2, "")
    assert "--where: expected a column or a value, at character 8: key >= >>> and" in refused.err


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_for_programs(tmp_path: Path, form: str) -> None:
    """Goal: Parquet and Arrow go through a pipe as they are, whole types included, also of no rows."""
    asyncio.run(filled(tmp_path))
    command = [*COMMAND, "stock", "--location", str(tmp_path), "--format", form]
    done = subprocess.run(command, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    one, none = (
        CliRunner().invoke(app, [*command[len(COMMAND) - 1 :], "--limit", str(limit)]).stdout_bytes
        for limit in (1, 0)
    )
    for data, keys in ((done.stdout, [HOSTILE, "apple"]), (one, [HOSTILE]), (none, [])):
        table = pq.read_table(io.BytesIO(data)) if form == "parquet" else pa.ipc.open_stream(data).read_all()
        assert table.column("key").to_pylist() == keys
        assert table.schema.field("val").type.field("count").type == pa.int64()
        assert table.schema.names == ["key", "val", "diff"]
