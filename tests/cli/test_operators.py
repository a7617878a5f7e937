"""Goal: whoever runs a location that others wrote finds out what grows, what keeps history and garbage, and
whose it is, and can end it; on a terminal of any width."""

import asyncio
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.maintenance.inspect import growth
from aiopersist.maintenance.overview import summary_of
from aiopersist.state.model import State
from tests.cli.test_commands import aiopersist

NAME = "a name that is longer than the terminal is wide, by some characters"


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        stock = client.table("stock", str, int)
        for count in range(20):
            await stock.put("item", count)
        await client.critical_since("stock", "old report", opaque=7)
        async with client.writer(NAME, ap.Schema(str, int), clock="wall") as writer:
            await writer.write([("a", 1)])
        for name in ("stock", NAME):
            async with client.subscription(name, name=f"mail {name}"):
                pass


@pytest.fixture
def location(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path))
    return tmp_path


SAME_AT_ANY_WIDTH = [["ls"], ["show", "stock"], ["subscriptions"], ["usage"]]


@pytest.mark.parametrize("columns", [60, 100])
def test_nothing_is_cut(location: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: on a narrow terminal numbers stay whole and texts go on in a next line."""
    wide = [_letters(aiopersist(*command, "--location", location).out) for command in SAME_AT_ANY_WIDTH]
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = [aiopersist(*command, "--location", location).out for command in SAME_AT_ANY_WIDTH]
    assert list(map(_letters, narrow)) == wide
    blocks = aiopersist("ls", "--long", "--location", location).out
    found = aiopersist("doctor", "--location", location).out
    assert any(line.split()[:2] == ["ok", "python"] for line in found.splitlines())
    for shown in (*narrow, blocks, found):
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= columns


def _letters(text: str) -> list[str]:
    """What a table says but for its figures, however it is broken into lines."""
    return sorted(filter(str.isalpha, text))


def test_who_keeps_versions(location: Path) -> None:
    """Goal: show and gc name the reader, and its process, for which old versions and their blobs are kept;
    once it is gone, gc deletes them."""

    async def beside_a_reader() -> tuple[str, Any, str]:
        settings = ap.Settings(client_name="export")
        async with ap.open(location, maintenance=False, settings=settings) as client, client.reader("stock"):
            table = client.table("stock", str, int)
            for count in range(5):
                await table.put("item", count)
            kept = await asyncio.to_thread(aiopersist, "gc", "stock", "--json", "--location", location)
            told = await asyncio.to_thread(aiopersist, "gc", "stock", "--location", location)
            shown = await asyncio.to_thread(aiopersist, "show", "stock", "--location", location)
            return shown.out, json.loads(kept.out), told.out

    shown, kept, told = asyncio.run(beside_a_reader())
    assert kept["kept"]["reader"].partition("@")[2].startswith("export/")
    assert 5 <= kept["kept"]["versions"] <= kept["held"]
    assert 0 < kept["kept"]["lease_left_s"] <= 900
    for text in (shown, told):
        assert "of export/" in text
        assert "its lease ends in" in text
    after = json.loads(aiopersist("gc", "stock", "--json", "--location", location).out)
    assert after["kept"] is None
    assert after["held"] < kept["held"]


def test_release(location: Path) -> None:
    """Goal: a critical since ends when asked with --yes, and others stay; an unknown one is told with those
    that there are."""

    def critical() -> list[str]:
        return list(json.loads(aiopersist("show", "stock", "--json", "--location", location).out)["critical"])

    unknown = aiopersist("release", "stock", "odl report", "--yes", "--location", location)
    assert unknown.status == 1
    assert "'old report'" in unknown.err
    shown = aiopersist("release", "stock", "old report", "--location", location)
    assert (shown.status, critical()) == (0, ["old report"])
    assert "would be released" in shown.out
    assert "--yes" in shown.err
    done = aiopersist("release", "stock", "old report", "--yes", "--json", "--location", location)
    assert (json.loads(done.out)["done"], critical()) == (True, [])


def test_subscriptions_of_all(location: Path) -> None:
    """Goal: without a shard, the consumers of the location."""
    found = json.loads(aiopersist("subscriptions", "--json", "--location", location).out)
    assert {name: list(rows) for name, rows in found.items()} == {
        "stock": ["mail stock"],
        NAME: [f"mail {NAME}"],
    }
    text = aiopersist("subscriptions", "--location", location).out
    assert "mail stock" in text
    assert NAME in text


def test_a_name_that_is_not_there(location: Path) -> None:
    """Goal: the error says which names there are."""
    for command in (["show"], ["cat"], ["forget", "--yes"]):
        done = aiopersist(*command, "stok", *["mail"] * (command[0] == "forget"), "--location", location)
        assert (done.status, done.out) == (1, "")
        assert "'stok'" in done.err
        assert "'stock'" in done.err


def test_growth(location: Path) -> None:
    """Goal: updates and bytes a second since the newest batches that reach back a minute; none on a clock
    that counts, or in the first minute."""

    async def views() -> tuple[ap.ShardView, ap.ShardView, State]:
        async with ap.open(location, maintenance=False) as client:
            count = await client.writer("count", ap.Schema(str, int))
            await count.compare_and_append([("a", 1, 0, 1)], 0, 1)
            async with client.writer("wall", ap.Schema(str, int), clock="wall") as writer:
                await writer.write([("first", 1)])
                await writer.write([(f"{n}", n) for n in range(100)])
            await client.admin.retain("wall", timedelta(days=1))
            state = await client._shards.at(await client.shard_id("wall")).open()
            return await client.admin.inspect("wall"), await client.admin.inspect("count"), state

    wall, count, state = asyncio.run(views())
    assert growth(wall) is None
    assert growth(count) is None
    began = wall.batches[-1].lower.time
    assert isinstance(began, int)
    summary = summary_of("wall", state, now=began / 1_000_000 + 200)
    grown = growth(wall.model_copy(update={"now": began / 1_000_000 + 200}))
    assert grown is not None
    assert grown.updates_per_s == pytest.approx(0.5)
    assert grown.span_s == pytest.approx(200)
    assert (summary.updates_per_s, summary.bytes_per_s) == grown[:2]
    assert summary_of("wall", state, now=wall.now).bytes_per_s is None
    sorted_by_it = aiopersist("ls", "--sort", "growth", "--location", location).out
    assert sorted_by_it.splitlines()[0].split()[-1] == "GROWTH"
