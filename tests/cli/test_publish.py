"""Goal: `aiopersist publish` and `unpublish`, and `aiopersist maintain --publish`, which goes on after a
failure."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from tests.cli.result import Result
from tests.iceberg.kit import by_pyiceberg, counted, own_files


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return Result(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with ap.open(tmp_path) as client:
            table = client.table("stock", key=str, val=int)
            await table.put_many({"apple": 1, "pear": 2})
            schema: Any = ap.Schema(str, int)
            async with client.writer("counts", schema) as writer:
                await writer.compare_and_append([("a", 1, 0, 1)], 0, 1)
                await writer.compare_and_append([("b", 2, 1, 1)], 1, 2)

    asyncio.run(fill())
    return tmp_path


def test_publish_and_unpublish(location: Path) -> None:
    at = ("--location", location)
    done = run("publish", "stock", *at)
    assert done.status == 0, done.err
    metadata = f"file://{location}/blob/iceberg/stock/metadata/v1.metadata.json"
    first, second = done.out.splitlines()
    assert first.startswith("stock: version 1 has 2 rows in 1 file, ")
    assert second.strip() == metadata
    again = run("publish", "stock", *at, "--json")
    assert json.loads(again.out) | {"as_of": 0, "snapshot_id": 0} == {
        "shard": "stock",
        "as_of": 0,
        "metadata": metadata,
        "location": f"file://{location}/blob/iceberg/stock",
        "version": 1,
        "snapshot_id": 0,
        "rows": 2,
        "data_files": 1,
        "bytes_written": 0,
    }
    assert "nothing new" in run("publish", "stock", *at).out
    assert by_pyiceberg(metadata) == counted([("apple", 1, 1), ("pear", 2, 1)])
    ended = run("unpublish", "stock", *at)
    assert ended.out.startswith("stock: deleted ")
    assert own_files(location) == {}
    for name in ("stock", "stok"):
        assert run("unpublish", name, *at).out.strip() == f"{name}: was not published"


def test_a_time_and_a_number_of_versions(location: Path) -> None:
    for version, as_of in enumerate((0, 1), 1):
        done = run("publish", "counts", "--as-of", as_of, "--keep", 1, "--location", location, "--json")
        assert json.loads(done.out)["as_of"] == as_of
        assert json.loads(done.out)["version"] == version
    assert len([name for name in own_files(location) if name.endswith(".metadata.json")]) == 1
    late = run("publish", "counts", "--as-of", 2, "--location", location)
    assert late.status == 1
    assert "not complete at 2" in late.err
    assert run("publish", "counts", "--keep", 0, "--location", location).status == 2


def test_maintain_publishes(location: Path) -> None:
    options = ("--once", "--location", location, "--json")
    done = run(
        "maintain", *options, "--publish", "stock=10min", "--publish", "gone=1h", "--publish", "counts=1s"
    )
    assert done.status == 1
    assert "'gone'" in done.err
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["shard"] for line in lines if "metadata" in line] == ["stock", "counts"]
    assert [line["error"].split(":")[0] for line in lines if "error" in line] == ["UnknownShard"]
    quiet = run("maintain", *options, "--publish", "stock=10min")
    assert quiet.status == 0
    assert not [line for line in quiet.out.splitlines() if "metadata" in line]


@pytest.mark.parametrize("option", ["stock", "stock=", "=10min", "stock=often", "stock=0s"])
def test_a_schedule_that_is_none(location: Path, option: str) -> None:
    done = run("maintain", "--once", "--location", location, "--publish", option)
    assert done.status == 2
    assert "stock=10min" in done.err
