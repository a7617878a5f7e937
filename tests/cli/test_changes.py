"""Goal: `diff` writes what changed between two times, and `tail` what happens; a consumer of `tail` that goes
on by a cursor misses nothing, and an end of either side is quiet."""

import asyncio
import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.cli.test_commands import COMMAND, aiopersist


async def _fill(folder: Path) -> list[int]:
    async with ap.open(folder, maintenance=False) as client:
        stock = client.table("stock", str, int)
        times = [
            await stock.put_many({"apple": 3, "pear": 5, "plum": 1}),
            await stock.put("apple", 2),
            await stock.put("apple", 3),
            await stock.delete("plum"),
        ]
        async with client.writer("raw", ap.Schema(str, int)) as writer:
            for at in range(4):
                await writer.compare_and_append([("a", at, at, 1)], at, at + 1)
    return times


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, list[int]]:
    return tmp_path, asyncio.run(_fill(tmp_path))


def lines(*arguments: object) -> list[Any]:
    done = aiopersist(*arguments)
    assert (done.status, done.err) == (0, "")
    return [json.loads(line) for line in done.out.splitlines()]


def test_diff(place: tuple[Path, list[int]]) -> None:
    """Goal: consolidated: what changed and changed back is not there."""
    folder, times = place
    where = ["--location", folder]
    first, second, third, last = times
    assert lines("diff", "stock", first, second, *where) == [
        {"key": "apple", "val": 2, "diff": 1},
        {"key": "apple", "val": 3, "diff": -1},
    ]
    assert lines("diff", "stock", first, third, *where) == []
    assert lines("diff", "stock", first, last, *where) == [{"key": "plum", "val": 1, "diff": -1}]
    assert lines("diff", "stock", last, last, *where) == []
    assert lines("diff", "stock", first, *where) == lines("diff", "stock", first, last, *where)
    assert lines("diff", "stock", last, *where) == []
    assert lines("diff", "raw", 1, *where) == [{"key": "a", "val": n, "diff": 1} for n in (2, 3)]
    assert lines("diff", "stock", first, second, "--where", "val = 2", *where) == [
        {"key": "apple", "val": 2, "diff": 1}
    ]
    assert lines("diff", "stock", first, second, "--columns", "key", *where) == []
    assert lines("diff", "stock", first, second, "--limit", 1, *where) == [
        {"key": "apple", "val": 2, "diff": 1}
    ]
    assert lines("diff", "raw", 0, 2, *where) == [
        {"key": "a", "val": 1, "diff": 1},
        {"key": "a", "val": 2, "diff": 1},
    ]
    for arguments, status in (([2, 0], 2), (["x", 2], 2), ([0, 9], 1)):
        refused = aiopersist("diff", "raw", *arguments, *where)
        assert (refused.status, refused.out) == (status, "")


class Tailing:
    """A process that tails."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "tail", *options, "--location", str(folder)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def take(self, many: int) -> list[Any]:
        assert self.process.stdout is not None
        return [json.loads(self.process.stdout.readline()) for _ in range(many)]

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


def test_tail_of_a_table(place: tuple[Path, list[int]]) -> None:
    """Goal: the contents, then changes with old and new; resumed behind any line, nothing is missing."""
    folder, _ = place
    tailing = Tailing(folder, "stock", "--from-start")
    contents = tailing.take(2)
    assert [(line["key"], line["old"], line["new"]) for line in contents] == [
        ("apple", None, 3),
        ("pear", None, 5),
    ]
    asyncio.run(_put(folder, {"apple": 9, "fig": 1}))
    live = tailing.take(2)
    assert [(line["key"], line["old"], line["new"]) for line in live] == [("apple", 3, 9), ("fig", None, 1)]
    assert tailing.interrupt() == (130, "aiopersist: interrupted\n")
    whole = [(line["time"], line["key"]) for line in (*contents, *live)]
    assert [line["cursor"] is None for line in contents] == [True, False]
    again = Tailing(folder, "stock", "--cursor", contents[-1]["cursor"])
    assert [(line["time"], line["key"]) for line in again.take(2)] == whole[2:]
    assert again.interrupt()[0] == 130


async def _put(folder: Path, entries: dict[str, int]) -> None:
    async with ap.open(folder, maintenance=False) as client:
        await client.table("stock", str, int).put_many(entries)


def test_tail_of_a_shard(place: tuple[Path, list[int]]) -> None:
    """Goal: updates from a cursor on; a reader that has enough ends it quietly."""
    folder, _ = place
    tailing = Tailing(folder, "raw", "--from-start")
    contents = tailing.take(4)
    assert [(line["key"], line["val"], line["diff"]) for line in contents] == [("a", n, 1) for n in range(4)]
    assert [line["cursor"] is None for line in contents] == [True, True, True, False]
    cursor = contents[-1]["cursor"]
    tailing.interrupt()
    asyncio.run(_append(folder, 4))
    tailing = Tailing(folder, "raw", "--cursor", cursor)
    assert [(line["time"], line["val"]) for line in tailing.take(1)] == [(4, 4)]
    assert tailing.process.stdout is not None
    tailing.process.stdout.close()
    for at in (5, 6):
        asyncio.run(_append(folder, at))
    tailing.process.wait(timeout=120)
    assert tailing.process.stderr is not None
    assert (tailing.process.returncode, tailing.process.stderr.read()) == (0, "")
    tailing.process.stderr.close()
    both = aiopersist("tail", "raw", "--cursor", cursor, "--from-start", "--location", folder)
    assert both.status == 2


LONG = [
    ["cat", "big"],
    ["diff", "big", "0", "--format", "parquet"],
    ["dump", "big", "--to", "{folder}/out.csv"],
    ["load", "big", "{folder}/in.csv", "--key", "key", "--mode", "overwrite"],
    ["copy", "big", "--to-location", "{folder}/copy"],
    ["fsck", "big"],
]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_interrupted(tmp_path: Path) -> None:
    """Goal: a command that is interrupted, wherever it is, says so in one line, with status 130; nothing of
    its file is left, and nothing of its rows."""
    asyncio.run(_big(tmp_path / "location"))
    (tmp_path / "in.csv").write_text("key,val\n" + "".join(f"{n},x\n" for n in range(300_000)))
    statuses = []
    for number, command in enumerate(LONG * 2):
        arguments = [argument.format(folder=tmp_path) for argument in command]
        process = subprocess.Popen(
            [*COMMAND, *arguments, "--location", str(tmp_path / "location")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        )  # fmt: skip
        time.sleep(0.7 if number < len(LONG) else 1.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode in (0, 130, -signal.SIGINT), err  # the last: Python itself had not begun
        if process.returncode == 130:
            assert err in ("", "aiopersist: interrupted\n")
        if process.returncode >= 0:
            statuses.append(process.returncode)
    assert 130 in statuses
    assert not list(tmp_path.glob("*.tmp"))
    shown = aiopersist("fsck", "big", "--json", "--location", tmp_path / "location")
    assert json.loads(shown.out)["updates"] in (300_000, 900_000)


async def _big(folder: Path) -> None:
    schema = ap.Schema(int, str)
    async with ap.open(folder, maintenance=False) as client, client.writer("big", schema) as writer:
        rows = ((n, f"{n:050}", 0, 1) for n in range(300_000))
        async with writer.builder(0) as builder:
            await builder.extend(rows)
            await writer.compare_and_append_batch([await builder.finish(1)], 0, 1)


async def _append(folder: Path, at: int) -> None:
    async with (
        ap.open(folder, maintenance=False) as client,
        client.writer("raw", ap.Schema(str, int)) as writer,
    ):
        await writer.compare_and_append([("a", at, at, 1)], at, at + 1)
