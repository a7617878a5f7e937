"""Goal: the command line adds, shows, reads and drops tags; a tag's contents stay when their history is gone;
what is refused changes nothing."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.cli.test_commands import aiopersist

SMALL_PARTS = ap.Settings(inline_writes_single_max_bytes=0)


async def _fill(folder: Path) -> int:
    """Two tables, and the time of the first change."""
    async with ap.open(folder, maintenance=False, settings=SMALL_PARTS) as client:
        stock = client.table("stock", str, int)
        time = await stock.put_many({"apple": 1, "pear": 2})
        await stock.put("apple", 5)
        await client.table("other", str, int).put("fig", 1)
    return time


async def _forget_history(folder: Path) -> None:
    async with ap.open(folder, maintenance=False, settings=SMALL_PARTS) as client:
        await client.table("stock", str, int).put("apple", 9)
        await client.admin.retain("stock", timedelta(0))
        await client.admin.force_compaction("stock")
        await client.admin.force_gc("stock")


@pytest.fixture
def location(tmp_path: Path) -> Path:
    return tmp_path / "location"


@pytest.fixture
def first(location: Path) -> int:
    return asyncio.run(_fill(location))


def run(location: Path, *arguments: object) -> str:
    done = aiopersist(*arguments, "--location", location)
    assert (done.status, done.err) == (0, ""), done
    return done.out


def refused(location: Path, *arguments: object) -> tuple[int, str]:
    done = aiopersist(*arguments, "--location", location)
    assert done.out == ""
    return done.status, done.err


def counts(lines: str) -> dict[str, int]:
    return {row["key"]: row["val"] for row in map(json.loads, lines.splitlines())}


def tags_of(location: Path) -> dict[str, Any]:
    return dict(json.loads(run(location, "tags", "stock", "--json")))


def test_contents_of_a_tag(location: Path, first: int, tmp_path: Path) -> None:
    """Goal: cat and dump write what the tag keeps, when nothing else has it."""
    added = json.loads(run(location, "tag", "stock", "monday", "--as-of", first, "--json"))
    assert (added["tag"], added["as_of"], added["expires_at"]) == ("monday", first, None)
    run(location, "tag", "stock", "noon", "--expires", "30d")
    asyncio.run(_forget_history(location))
    assert refused(location, "cat", "stock", "--as-of", first)[0] == 1
    for command, *rest in (["cat"], ["get", "apple"], ["tag", "late"], ["publish"]):
        status, error = refused(location, command, "stock", *rest, "--as-of", "2026-01-31T12:00Z")
        assert status == 1 and "'stock': the history at 2026-01-31 12:00:00Z is gone: read at" in error
    assert counts(run(location, "cat", "stock", "--tag", "monday", "--json")) == {"apple": 1, "pear": 2}
    assert counts(run(location, "cat", "stock", "--tag", "noon", "--json")) == {"apple": 5, "pear": 2}
    assert counts(run(location, "cat", "stock", "--json")) == {"apple": 9, "pear": 2}
    file = tmp_path / "monday.csv"
    run(location, "dump", "stock", "--tag", "monday", "--to", file)
    assert file.read_text(encoding="utf-8").split() == ["key,val", "apple,1", "pear,2"]


def test_tags_are_shown(location: Path, first: int) -> None:
    """Goal: with time, age, expiry and bytes; of one shard, or of all that have tags."""
    run(location, "tag", "stock", "monday", "--as-of", first, "--expires", "30d")
    run(location, "tag", "stock", "noon")
    found = tags_of(location)
    assert list(found) == ["monday", "noon"]
    lasts = found["monday"]["expires_at"] - found["monday"]["added_at"]
    assert lasts == pytest.approx(timedelta(days=30).total_seconds())
    assert found["noon"]["parts"] == 2 and found["noon"]["blob_bytes"] > 0
    every = json.loads(run(location, "tags", "--json"))
    assert every == {"stock": found}
    for shown in (run(location, "tags"), run(location, "tags", "stock"), run(location, "show", "stock")):
        monday, noon = (next(line for line in shown.splitlines() if name in line) for name in found)
        assert "in 30 d" in monday and "never" in noon and "B" in noon
    assert run(location, "tags", "other").strip() == "no tags"
    assert "tag" not in run(location, "show", "other")
    lines = json.loads(run(location, "ls", "--json"))
    assert {line["name"]: line["tags"] for line in lines} == {"other": 0, "stock": 2}
    view = json.loads(run(location, "show", "stock", "--json"))
    assert view["tags"] == found and not [h for h in view["holds"] if h["id"] in found]


def test_usage_of_tags(location: Path, first: int) -> None:
    run(location, "tag", "stock", "monday", "--as-of", first)
    asyncio.run(_forget_history(location))
    sizes = json.loads(run(location, "usage", "--json"))
    assert 0 < sizes["tagged"] <= sizes["current"] - sizes["live"]
    assert any(line.split()[2] == "tagged" for line in run(location, "usage").splitlines()[1:])


def test_untag(location: Path, first: int) -> None:
    """Goal: without --yes nothing changes; the tags that exist are named if it is none of them."""
    run(location, "tag", "stock", "monday", "--as-of", first)
    shown = aiopersist("untag", "stock", "monday", "--location", location)
    assert shown.status == 0 and "would be dropped" in shown.out and "--yes" in shown.err
    assert list(tags_of(location)) == ["monday"]
    for yes in ((), ("--yes",)):
        status, error = refused(location, "untag", "stock", "tuesday", *yes)
        assert status == 1 and "shard 'stock': there is no tag 'tuesday'; there are 'monday'" in error
    assert json.loads(run(location, "untag", "stock", "monday", "--yes", "--json"))["done"] is True
    assert tags_of(location) == {}


def test_what_is_refused(location: Path, first: int) -> None:
    run(location, "tag", "stock", "monday")
    status, error = refused(location, "tag", "stock", "monday", "--as-of", first)
    assert status == 1 and "there is a tag 'monday'" in error
    status, error = refused(location, "tag", "stock", "later", "--as-of", first * 2)
    assert status == 1 and "'stock' is not complete" in error
    for expires in ("0d", "soon", "-3d"):
        status, error = refused(location, "tag", "stock", "x", f"--expires={expires}")
        assert status == 2 and repr(expires) in error
    for command in (["cat"], ["dump", "--to", "-", "--format", "csv"]):
        status, error = refused(location, *command, "stock", "--tag", "tuesday")
        assert status == 1 and "'tuesday'; there are 'monday'" in error
        status, error = refused(location, *command, "stock", "--tag", "monday", "--as-of", first)
        assert status == 2 and "not both" in error
    assert list(tags_of(location)) == ["monday"]
