"""Goal: `load --mode overwrite` makes the rows of the files the contents, in one append: of a table, and of
any other shard, whatever others write meanwhile and wherever it is killed."""

import asyncio
import json
import subprocess
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.cli.appending import overwrite_rows
from aiopersist.cli.command import Problems
from aiopersist.testing.faults import Faults, FaultyConsensus
from tests.cli.test_commands import COMMAND, aiopersist

SCHEMA: ap.Schema[Any, Any, int] = ap.Schema(str, pa.struct([("n", pa.int64())]))
WIDER: ap.Schema[Any, Any, int] = ap.Schema(str, pa.struct([("n", pa.int64()), ("more", pa.int64())]))
WANTED = [("a", {"n": 1}, 1), ("b", {"n": 2}, 3)]


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        await client.table("stock", str, int).put_many({"a": 1, "b": 2, "c": 3})
        async with client.writer("raw", ap.Schema(str, int)) as writer:
            await writer.compare_and_append([("a", 1, 0, 2), ("c", 3, 4, -1)], 0, 5)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path / "location"))
    return tmp_path / "location"


def contents(location: Path, shard: str) -> list[list[Any]]:
    lines = aiopersist("cat", shard, "--location", location).out.splitlines()
    return [list(json.loads(line).values()) for line in lines]


def test_contents_become_those_of_the_file(location: Path, tmp_path: Path) -> None:
    """Goal: of a table, of a shard with diffs, of one that is new, which becomes a table; history stays."""
    file, none = tmp_path / "x.csv", tmp_path / "none.csv"
    file.write_text("key,val,diff\na,1,1\nd,4,2\n")
    none.write_text("key,val\n")

    def load(shard: str, path: Path, *files: Path) -> None:
        options = ["--key", "key", "--mode", "overwrite", "--json", "--location", location]
        done = aiopersist("load", shard, path, *files, *options)
        assert (done.status, done.err) == (0, "")

    load("raw", file)
    assert contents(location, "raw") == [["a", 1, 1], ["d", 4, 2]]
    assert len(aiopersist("cat", "raw", "--as-of", 4, "--location", location).out.splitlines()) == 2
    load("raw", none)
    assert contents(location, "raw") == []
    two = tmp_path / "y.csv"
    file.write_text("key,val\na,1\nd,4\n")
    two.write_text("key,val\nd,5\ne,6\n")
    for shard in ("stock", "new"):
        load(shard, file, two)
        assert contents(location, shard) == [["a", 1, 1], ["d", 5, 1], ["e", 6, 1]]
        load(shard, none)
        assert contents(location, shard) == []
    kinds = {row["name"]: row["kind"] for row in json.loads(
        aiopersist("ls", "--json", "--location", location).out)}  # fmt: skip
    assert kinds == {"new": "table", "raw": "shard", "stock": "table"}


def test_a_bad_row_writes_nothing(location: Path, tmp_path: Path) -> None:
    good, bad, empty = tmp_path / "good.csv", tmp_path / "bad.csv", tmp_path / "empty.ndjson"
    good.write_text("key,val\nz,1\n")
    bad.write_text("key,val\ny,1\nx,\n")
    empty.write_text("")
    for shard in ("stock", "raw"):
        before = contents(location, shard)
        for files in ((good, bad), (good, empty)):
            done = aiopersist(
                "load", shard, *files, "--key", "key", "--mode", "overwrite", "--location", location
            )
            assert (done.status, done.out) == (1, "")
            assert str(files[1]) in done.err
            assert files[1] is bad or "the file has no columns" in done.err
            assert contents(location, shard) == before


class Meddling(Faults):
    """Lets others act before each of the next compare-and-sets."""

    def __init__(self, act: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.times, self.happened = 0, 0
        self._act = act

    async def call(self, op: str, act: Any) -> Any:
        if op == "compare_and_set" and self.times:
            self.times, self.happened = self.times - 1, self.happened + 1
            await self._act()
        return await super().call(op, act)


@asynccontextmanager
async def meddled(
    act: Callable[[ap.Client], Awaitable[None]], clock: str
) -> AsyncIterator[tuple[ap.Client, ap.Client, Meddling]]:
    """A client beside which `act` happens, and the one that acts."""
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, maintenance=False) as other:
        meddling = Meddling(lambda: act(other))
        consensus = FaultyConsensus(ap.open_consensus(url), meddling)
        async with (
            other.writer("raw", SCHEMA, clock=clock) as writer,
            ap.open(blob=ap.open_blob(url), consensus=consensus, maintenance=False) as client,
        ):
            await writer.write([("a", {"n": 1}), ("x", {"n": 7}), ("x", {"n": 8})])
            yield client, other, meddling


def rows(meddling: Meddling, times: int = 0) -> Iterator[pa.Table]:
    """Once they are read, the next commits are those of the append: others act before so many of these."""
    for row in WANTED:
        yield pa.table([[column] for column in row], ["key", "val", "diff"])
    meddling.times = times


async def _found(client: ap.Client) -> list[Any]:
    async with client.reader("raw") as reader, reader.snapshot() as snapshot:
        return await snapshot.rows()


@pytest.mark.parametrize("clock", ["logical", "wall"])
@pytest.mark.parametrize("shifts", [False, True], ids=["", "history goes"])
async def test_others_write_before_every_commit(clock: str, shifts: bool) -> None:
    """Goal: what came, and what went, until the append is replaced, too; nothing is left over."""
    count = 0

    async def act(other: ap.Client) -> None:
        nonlocal count
        count += 1
        async with other.writer("raw", SCHEMA) as writer:
            await writer.write([("x", {"n": 7}, -1), (f"new {count}", {"n": count}, 1), ("x", {"n": 9}, 2)])
            if shifts:
                async with other.reader("raw") as reader:
                    await reader.downgrade_since(writer.upper)

    async with meddled(act, clock) as (client, other, meddling):
        await overwrite_rows(client, "raw", SCHEMA, rows(meddling, 5))
        assert meddling.happened == 5
        assert await _found(other) == WANTED
        assert (await other.fsck("raw")).ok


async def test_since_is_beyond_the_upper() -> None:
    """Goal: what cannot be read before the upper is read behind it."""

    async def nothing(other: ap.Client) -> None:
        return

    async with meddled(nothing, "logical") as (client, other, meddling):
        async with other.reader("raw") as reader:
            await reader.downgrade_since(20)
        await overwrite_rows(client, "raw", SCHEMA, rows(meddling))
        assert await _found(other) == WANTED


async def test_another_schema_meanwhile() -> None:
    """Goal: rows with a field that this command does not know would be lost in part: it is refused."""

    async def act(other: ap.Client) -> None:
        assert await other.compare_and_evolve_schema("raw", 0, WIDER)
        async with other.writer("raw", WIDER) as writer:
            await writer.write([("y", {"n": 1, "more": 2})])

    async with meddled(act, "logical") as (client, other, meddling):
        with pytest.raises(Problems, match="schema"):
            await overwrite_rows(client, "raw", SCHEMA, rows(meddling, 1))
        assert len(await _found(other)) == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", ["stock", "raw"])
def test_killed(shard: str, location: Path, tmp_path: Path) -> None:
    """Goal: killed with SIGKILL at any point, the contents are those before or those of the file."""
    file = tmp_path / "x.ndjson"
    before = contents(location, shard)
    for number in range(3):
        lines = (json.dumps({"key": f"{number}-{n:05}", "val": n}) for n in range(40_000))
        file.write_text("\n".join(lines))
        command = [*COMMAND, "load", shard, str(file), "--key", "key", "--mode", "overwrite"]
        loading = subprocess.Popen([*command, "--location", str(location)], stdout=-3, stderr=-3)
        time.sleep(1.1 + 0.5 * number)
        loading.kill()
        loading.wait()
        found = contents(location, shard)
        whole = len(found) == 40_000 and found[0][0] == f"{number}-00000"
        assert whole or found == before
        before = found
    assert aiopersist("fsck", shard, "--location", location).status == 0
