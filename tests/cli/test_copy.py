"""Goal: `copy` makes a backup that verifies, of one shard, several or all, whatever happens to it, and says
what it did; restored, it reads the same at every time."""

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.cli.result import Result
from tests.cli.test_commands import COMMAND, aiopersist
from tests.conftest import StoreUrls

SMALL = {
    "AIOPERSIST_BLOB_TARGET_SIZE": "2000",
    "AIOPERSIST_INLINE_WRITES_SINGLE_MAX_BYTES": "0",
}


async def _put(folder: Path, many: int) -> None:
    async with ap.open(folder, maintenance=False) as client:
        stock = client.table("stock", str, int)
        for count in range(many):
            await stock.put_many({f"item {n}": count for n in range(50)})


def test_copy_and_back(tmp_path: Path) -> None:
    """Goal: a copy, what is new, and the way back; each says what it brought."""
    source, backup, restored = (tmp_path / name for name in ("source", "backup", "restored"))
    asyncio.run(_put(source, 3))
    first = aiopersist("copy", "stock", "--location", source, "--to-location", backup, "--verify")
    assert (first.status, first.err) == (0, "")
    assert "stock: 250 updates copied" in first.out
    assert "equal at" in first.out
    asyncio.run(_put(source, 1))
    again = aiopersist("copy", "stock", "--location", source, "--to-location", backup, "--json")
    copied = json.loads(again.out)
    assert (copied["shard"], copied["updates"], copied["differing"]) == ("stock", 100, [])
    back = aiopersist(
        "copy", "stock", "--location", backup, "--to-location", restored, "--as", "new", "--detach"
    )
    assert back.status == 0
    contents = [aiopersist("cat", "stock", "--location", place).out for place in (source, backup)]
    contents.append(aiopersist("cat", "new", "--location", restored).out)
    assert contents[0] == contents[1] == contents[2]
    asyncio.run(_put(backup, 2))
    refused = aiopersist("copy", "stock", "--location", source, "--to-location", backup)
    assert refused.status == 1
    assert "but has other writes since" in refused.err


def test_where_to(tmp_path: Path) -> None:
    """Goal: nothing is begun without one other location, or without the source."""
    asyncio.run(_put(tmp_path / "a", 1))
    for to in (
        [],
        ["--to-blob", "mem://"],
        ["--to-location", tmp_path / "b", "--to-blob", "mem://x", "--to-consensus", "mem://x"],
    ):
        refused = aiopersist("copy", "stock", "--location", tmp_path / "a", *to)
        assert (refused.status, refused.out) == (2, "")
        assert "--to-location DIR, or" in refused.err
    nothing = aiopersist("copy", "stock", "--location", tmp_path / "c", "--to-location", tmp_path / "b")
    assert nothing.status == 2
    assert not (tmp_path / "b").exists()


async def _several(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        for name in ("stock", "orders", "users"):
            await client.table(name, str, int).put_many({"a": 1, "b": 2})
        async with client.indexed("streams") as ix:
            await ix.register("paid", str, int)


def _copied(*arguments: object) -> tuple[Result, dict[str, Any]]:
    """What the command with `--json` says, by name."""
    done = aiopersist("copy", *arguments, "--json")
    return done, {line["shard"]: line for line in map(json.loads, done.out.splitlines())}


def test_several(tmp_path: Path) -> None:
    """Goal: several names in one call, each verified; then all of the location, where what is new comes, and
    an `Indexed` is left out and named; and all of it back."""
    source, backup, restored = (tmp_path / name for name in ("source", "backup", "restored"))
    asyncio.run(_several(source))
    places = ["--location", source, "--to-location", backup]
    done = aiopersist("copy", "stock", "orders", "stock", *places, "--verify")
    assert (done.status, done.err) == (0, "")
    same = r"(\w+): 2 updates copied, up to .*; equal at (\d) of \2 times?\n"
    assert [found[1] for found in re.finditer(same, done.out)] == ["stock", "orders"]
    assert len(done.out.splitlines()) == 2
    asyncio.run(_put(source, 1))
    done, found = _copied("--all", *places, "--verify")
    assert done.status == 0
    assert done.err == "left out, since an Indexed cannot be copied: 'streams'\n"
    assert {name: line["updates"] for name, line in found.items()} == {"orders": 0, "stock": 50, "users": 2}
    assert all(line["compared"] and line["differing"] == [] for line in found.values())
    back = aiopersist("copy", "--all", "--location", backup, "--to-location", restored, "--detach")
    assert (back.status, back.err) == (0, "")
    for name in ("stock", "orders", "users"):
        contents = [aiopersist("cat", name, "--location", place).out for place in (source, backup, restored)]
        assert contents[0] == contents[1] == contents[2] != ""
    asyncio.run(_put(restored, 2))  # they are shards of their own


def test_one_of_several_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a shard that fails does not stop the others; it is told, and the exit status is 1. A name that
    is not there and an `Indexed` fail like others; a shard that has ended is passed by, unless it is
    named."""
    source, backup = tmp_path / "source", tmp_path / "backup"
    asyncio.run(_several(source))
    asyncio.run(_put(backup, 1))  # no copy
    places = ["--location", source, "--to-location", backup]
    done, found = _copied("users", "stock", "nothing", "streams", "orders", *places)
    assert (done.status, done.err) == (1, "aiopersist: 3 of 5 shards failed\n")
    assert [name for name, line in found.items() if "error" in line] == ["stock", "nothing", "streams"]
    assert "is not a copy of" in found["stock"]["error"]
    assert "Indexed" in found["streams"]["error"]
    assert found["orders"]["updates"] == found["users"]["updates"] == 2
    asyncio.run(_end(source, "ended"))
    done, found = _copied("--all", *places)
    assert (done.status, done.err.splitlines()[-1]) == (1, "aiopersist: 1 of 4 shards failed")
    assert found["ended"] == {"shard": "ended", "ended": True}
    assert aiopersist("copy", "ended", "orders", *places).status == 1

    async def different(*_: object) -> bool:
        return False

    monkeypatch.setattr("aiopersist.backup.copy.compare", different)
    done, found = _copied("users", "orders", *places, "--verify")
    assert done.status == 1
    assert all(line["differing"] == line["compared"] != [] for line in found.values())
    assert "users and its copy differ at" in done.err
    assert "orders and its copy differ at" in done.err
    text = aiopersist("copy", "users", "orders", *places, "--verify").out
    assert text.count("; equal at 0 of ") == 2


async def _end(folder: Path, name: str) -> None:
    async with ap.open(folder, maintenance=False) as client:
        async with client.writer(name, ap.Schema(str, int)) as writer:
            await writer.compare_and_append([("a", 1, 0, 1)], 0, ap.Antichain())
        async with client.reader(name) as reader:
            await reader.downgrade_since(ap.Antichain())
        await client.admin.finalize(name)


def test_which(tmp_path: Path) -> None:
    """Goal: nothing is begun without names or `--all`, with both, or with one name for several copies."""
    asyncio.run(_several(tmp_path / "a"))
    for arguments, why in (
        ([], "name shards, or use --all"),
        (["stock", "--all"], "not both"),
        (["stock", "users", "--as", "x"], "--as names one copy"),
        (["--all", "--as", "x"], "--as names one copy"),
    ):
        places = ["--location", tmp_path / "a", "--to-location", tmp_path / "b"]
        refused = aiopersist("copy", *arguments, *places)
        assert (refused.status, refused.out) == (2, "")
        assert why in refused.err
    assert not (tmp_path / "b").exists()


class Writing:
    """A table that is written meanwhile, and its contents at each time."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.stock = client.table("stock", str, int)
        self.contents: dict[int, dict[str, int]] = {}
        self.goes_on = True

    async def run(self) -> None:
        now: dict[str, int] = {}
        count = 0
        while self.goes_on:
            count += 1
            changed = {f"item {n}": count for n in range(count % 7, 200, 7)}
            now = now | changed
            self.contents[await self.stock.put_many(changed)] = now
            if not count % 10:
                await self.client.admin.retain("stock", 2_000_000)
                await self.client.admin.force_compaction("stock")
                await self.client.admin.force_gc("stock")
            await asyncio.sleep(0.02)


def _command(source: StoreUrls, target: StoreUrls, *options: str) -> list[str]:
    places = ["--blob", source.blob, "--consensus", source.consensus]
    to = ["--to-blob", target.blob, "--to-consensus", target.consensus]
    return [*COMMAND, "copy", "stock", *places, *to, *options]


async def _killed_and_repeated(source: StoreUrls, target: StoreUrls, kills: int) -> None:
    async with ap.open(blob=source.blob, consensus=source.consensus, maintenance=False) as client:
        writing = Writing(client)
        task = asyncio.create_task(writing.run())
        try:
            await _until(lambda: len(writing.contents) > 5)
            for number in range(kills):
                process = subprocess.Popen(
                    _command(source, target), env={**os.environ, **SMALL}, stderr=subprocess.PIPE
                )
                ended = asyncio.create_task(asyncio.to_thread(process.communicate))
                await asyncio.wait([ended], timeout=0.8 + 0.6 * number / kills)
                process.kill()
                await ended
            done = await asyncio.to_thread(
                subprocess.run, _command(source, target, "--verify", "--json"), env={**os.environ, **SMALL},
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
        finally:
            writing.goes_on = False
            await task
    assert done.returncode == 0, done.stderr
    copied = json.loads(done.stdout)
    assert copied["differing"] == []
    assert len(copied["compared"]) > 2
    async with ap.open(blob=target.blob, consensus=target.consensus, readonly=True) as client:
        (since,), (upper,) = copied["since"], copied["upper"]
        held = [time for time in writing.contents if since <= time < upper]
        assert held
        async with client.reader("stock") as r:
            for time in held:
                async with r.snapshot(time) as s:
                    assert {key: val for key, val, _ in await s.rows()} == writing.contents[time]


async def _until(done: Any) -> None:
    async with asyncio.timeout(50):
        while not done():
            await asyncio.sleep(0.01)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [2, pytest.param(4, marks=pytest.mark.long)])
async def test_killed_under_writes(kills: int, tmp_path: Path) -> None:
    """Goal: while a table is written, compacted and collected, copies are killed with SIGKILL wherever they
    are; the last one verifies, and the copy has the contents of every time that it holds."""
    places = [
        StoreUrls(f"file://{tmp_path}/{name}/blob", f"sqlite://{tmp_path}/{name}/state.db")
        for name in ("source", "target")
    ]
    for name in ("source", "target"):
        (tmp_path / name).mkdir()
    await _killed_and_repeated(*places, kills=kills)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_killed_under_writes_in_s3(best_s3_url: str, postgres_url: str, tmp_path: Path) -> None:
    """Goal: the same from S3 and Postgres to files, and back."""
    source = StoreUrls(best_s3_url, postgres_url)
    target = StoreUrls(f"file://{tmp_path}/blob", f"sqlite://{tmp_path}/state.db")
    await _killed_and_repeated(source, target, kills=6)
    back = await asyncio.to_thread(
        subprocess.run, [*_command(target, source, "--verify"), "--as", "back"],
        env=os.environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert back.returncode == 0, back.stderr
