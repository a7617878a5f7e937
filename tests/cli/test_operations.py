"""Goal: the commands of `docs/operations.md` answer as the page shows: the same headings, kinds and messages,
on a location like that of the page."""

import asyncio
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app

PAGE = Path(__file__).parents[2] / "docs/operations.md"
SHOWN = re.compile(r"^```console\n\$ aiopersist (.*)\n((?:.*\n)*?)```$", re.MULTILINE)
SCHEMA = ap.Schema(key=str, val=int)


async def fill(location: Path) -> None:
    """A table with a consumer that lags, a shard whose history a pipeline holds."""
    async with ap.open(location, maintenance=False) as client:
        orders = client.table("orders", str, int)
        await orders.put_many({f"o{n}": n for n in range(2000)})
        async with orders.subscription("mailer") as consumer:
            await consumer.ack(await anext(consumer))
        await orders.put_many({f"o{n}": n + 1 for n in range(3000)})
        await client.table("stock", str, int).put("tea", 3)
        async with client.writer("events", SCHEMA) as writer:
            await writer.write([("e", 0)])
            await client.critical_since("events", "pipeline", opaque=1)
            for time in range(8):
                await writer.write([(f"e{time}-{n}", n) for n in range(2000)])
        await client.admin.retain("events", 1)
        await client.admin.maintain()


def damage(location: Path) -> None:
    """A byte of each larger part."""
    for path in (location / "blob").rglob("*.parquet"):
        data = bytearray(path.read_bytes())
        data[len(data) // 4] ^= 255
        path.write_bytes(data)


def shape(line: str) -> set[str]:
    """What a line has besides values: words, no numbers, instants, paths or bars."""
    return set(re.findall(r"(?<![\w./-])[A-Za-z][A-Za-z-]+(?![\w./-])", line)) - {"B", "KiB", "min"}


async def test_commands_answer_as_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(tmp_path / "data")
    await asyncio.to_thread(answers, tmp_path, monkeypatch)


def answers(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("AIOPERSIST_LOCATION", "data")
    monkeypatch.setenv("COLUMNS", "150")
    assert CliRunner().invoke(app, ["copy", "orders", "--to-location", "backup"]).exit_code == 0
    examples = SHOWN.findall(PAGE.read_text(encoding="utf-8"))
    assert len(examples) == 8
    for command, shown in sorted(examples, key=lambda example: example[0].startswith("fsck")):
        damaged = command.startswith("fsck")
        if damaged:
            damage(directory / "data")
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == damaged, done.output
        for line in filter(str.strip, shown.splitlines()):
            found = [answer for answer in done.output.splitlines() if shape(line) <= shape(answer)]
            assert found or (damaged and "sound" in line), f"{command}: {line!r} is not in\n{done.output}"
