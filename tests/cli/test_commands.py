"""Goal: each command that looks at a location, or takes care of it, says what is there and does what it says;
with `--json` to programs; and its exit status tells how it went."""

import asyncio
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from tests.cli.result import Result

COMMAND = [sys.executable, "-c", "from aiopersist.cli import main; main()"]
HOSTILE = "[red]\x1b[31m\nname"


def aiopersist(*arguments: object) -> Result:
    """In this process."""
    done = CliRunner().invoke(app, list(map(str, arguments)))
    return Result(done.exit_code, done.stdout, done.stderr)


def in_a_process(*arguments: object, **environment: str) -> Result:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    return Result(done.returncode, done.stdout, done.stderr)


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        stock = client.table("stock", str, int)
        for count in range(3):
            await stock.put_many({f"item {n}": count for n in range(100 * (count + 1))})
        async with client.subscription("stock", name="bill") as bill:
            await anext(aiter(bill))
        async with client.writer(HOSTILE, ap.Schema(str, int)) as writer:
            await writer.write([("a", 1)])
        async with client.indexed("stock") as ix:
            await ix.register("orders", str, int)


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A location that the tests of this module only look at."""
    folder = tmp_path_factory.mktemp("location")
    asyncio.run(_fill(folder))
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A location that a test may change."""
    asyncio.run(_fill(tmp_path))
    return tmp_path


def test_ls(location: Path) -> None:
    """Goal: a line for each shard, table and Indexed; a name cannot move the cursor; sorted as asked."""
    lines = aiopersist("ls", "--location", location).out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", '"[red]\\u001b[31m\\nname"', "stock", "stock"]
    kinds = [line.split()[1] for line in lines[2:]]
    assert kinds == ["indexed(1)", "table"]
    rows = json.loads(aiopersist("ls", "st", "--sort", "bytes", "--json", "--location", location).out)
    assert [(row["name"], row["kind"]) for row in rows] == [("stock", "table"), ("stock", "indexed")]
    table, indexed = rows
    assert (table["updates"], table["batches"], table["subscriptions"]) == (100 + 300 + 500, 3, 1)
    assert table["lag_updates"] > 0 == indexed["batches"]
    assert indexed["streams"] == 1
    assert "LAG" not in aiopersist("ls", "--location", location).out
    assert "LAG" in aiopersist("ls", "--sort", "lag", "--location", location).out
    long = aiopersist("ls", "--long", "--location", location).out
    assert table["shard_id"] in long


def test_show(location: Path) -> None:
    """Goal: frontiers, schema, batches with their sizes, holds with their owners, subscriptions."""
    text = aiopersist("show", "stock", "--location", location).out
    assert "table stock" in text
    assert "3 batches, the oldest first" in text
    assert "bill" in text
    assert "string" in text
    view = json.loads(aiopersist("show", "stock", "--json", "--location", location).out)
    assert view["schema"] == {"id": "0", "key": "string", "val": "int64"}
    assert [batch["len"] for batch in view["batches"]] == [100, 300, 500]
    assert {hold["kind"] for hold in view["holds"]} == {"retention", "subscription"}
    assert view["subscriptions"]["bill"]["owner"] is None
    ids = {row["kind"]: row["shard_id"] for row in json.loads(
        aiopersist("ls", "--json", "--location", location).out)}  # fmt: skip
    assert "orders" in aiopersist("show", ids["indexed"], "--location", location).out
    missing = aiopersist("show", "nothing", "--location", location)
    assert (missing.status, missing.out) == (1, "")
    assert "'nothing'" in missing.err


def test_usage_and_subscriptions(location: Path) -> None:
    funnel = json.loads(aiopersist("usage", "--json", "--location", location).out)
    assert funnel["total"] >= funnel["referenced"] >= funnel["current"] >= funnel["live"] >= 0
    assert "all blobs" in aiopersist("usage", "--location", location).out
    consumers = json.loads(aiopersist("subscriptions", "stock", "--json", "--location", location).out)
    assert consumers["bill"]["lag_updates"] > 0
    assert "nobody has it" in aiopersist("subscriptions", "stock", "--location", location).out


def test_fsck(own: Path) -> None:
    """Goal: sound data is 0, and damage is 1 and named; the other shards are checked, too."""
    asyncio.run(_big(own))
    sound = aiopersist("fsck", "--json", "--location", own)
    assert (sound.status, len(sound.out.splitlines())) == (0, 4)
    blob = max((path for path in own.rglob("*") if path.suffix == ".parquet"),
               key=lambda path: path.stat().st_size)  # fmt: skip
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    damaged = aiopersist("fsck", "--json", "--location", own)
    assert damaged.status == 1
    found = {line["shard"]: line["ok"] for line in map(json.loads, damaged.out.splitlines())}
    by_id = next(shard for shard in found if shard.startswith("i"))  # an Indexed with the name of a table
    assert found == {"big": False, "stock": True, HOSTILE: True, by_id: True}
    assert "DAMAGED" in aiopersist("fsck", "big", "--location", own).out
    unread = aiopersist("cat", "big", "--limit", 30_000, "--location", own)
    assert unread.status == 1
    assert "aiopersist fsck" in unread.err
    assert "1 of 1 shards are damaged" in aiopersist("fsck", "big", "--location", own).err


async def _big(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client, client.writer("big", ap.Schema(int, int)) as big:
        await big.write([(n, n) for n in range(20_000)])


def test_compact_and_collect(own: Path) -> None:
    done = aiopersist("compact", "stock", "--json", "--location", own)
    assert json.loads(done.out)["batches"] == [3, 1]
    done = aiopersist("gc", "--all", "--json", "--location", own)
    lines = {line["shard"]: line["versions"] for line in map(json.loads, done.out.splitlines())}
    assert lines["stock"] > 0
    neither = aiopersist("compact", "--location", own)
    both = aiopersist("compact", "stock", "--all", "--location", own)
    assert neither.status == both.status == 2
    sound = aiopersist("fsck", "--all", "--json", "--location", own)
    assert (sound.status, len(sound.out.splitlines())) == (0, 3)
    assert aiopersist("fsck", "stock", "--all", "--location", own).status == 2
    some = aiopersist("compact", "stock", "missing", "--location", own)
    assert some.status == 1
    assert "missing: UnknownShard" in some.out
    assert "stock: 1 batch" in some.out


def test_retain(own: Path) -> None:
    """Goal: a policy by times or by age, or none; what says nothing is refused by its text."""
    policies = {
        "7d": (7 * 86_400, None),
        "90s": (90, None),
        "1.5h": (5_400, None),
        "1000": (None, 1000),
        "all": (None, None),
    }
    for keep, wanted in policies.items():
        assert aiopersist("retain", "stock", "--keep", keep, "--location", own).status == 0
        policy = json.loads(aiopersist("show", "stock", "--json", "--location", own).out)["retention"]
        assert (policy and policy["seconds"], policy and policy["times"]) == wanted
    for keep in ("7x", "-1", "", "d", "1e9d", "9" * 30 + "d", "٣"):
        done = aiopersist("retain", "stock", f"--keep={keep}", "--location", own)
        assert done.status == 2
        assert repr(keep) in done.err


def test_nothing_ends_without_yes(own: Path) -> None:
    """Goal: drop, finalize, forget and sweep show what they would do; `--yes` does it."""
    shown = aiopersist("drop", "stock", "--location", own)
    assert "would delete 900 updates" in shown.out
    assert "--yes" in shown.err
    refused = aiopersist("finalize", "stock", "--location", own)
    assert "finalize would refuse" in refused.out
    assert aiopersist("finalize", "stock", "--yes", "--location", own).status == 1
    assert "would be forgotten" in aiopersist("forget", "stock", "bill", "--location", own).out
    before = json.loads(aiopersist("ls", "--json", "--location", own).out)
    assert len(before) == 3
    assert aiopersist("forget", "stock", "bill", "--yes", "--location", own).status == 0
    assert aiopersist("subscriptions", "stock", "--json", "--location", own).out.strip() == "{}"
    gone = aiopersist("forget", "stock", "bill", "--yes", "--location", own)
    assert gone.status == 1
    assert "'bill'" in gone.err
    assert aiopersist("drop", "stock", "--yes", "--location", own).status == 0
    left = json.loads(aiopersist("ls", "--json", "--location", own).out)
    assert [row["kind"] for row in left] == ["shard", "indexed"]


def test_sweep(own: Path) -> None:
    """Goal: a blob of a writer that is gone is shown, then deleted."""
    leak = _leak(own)
    shown = json.loads(aiopersist("sweep", "--json", "--location", own).out)
    assert (shown["keys"], shown["deleted"]) == ([leak], False)
    assert json.loads(aiopersist("sweep", "--yes", "--json", "--location", own).out)["deleted"] is True
    assert json.loads(aiopersist("sweep", "--json", "--location", own).out)["keys"] == []


def _leak(folder: Path) -> str:
    """Leave a blob as a writer does that was killed; returns its key."""

    async def shard() -> str:
        async with ap.open(folder, readonly=True) as client:
            return await client.shard_id("stock")

    writer, part = uuid4(), uuid4()
    key = f"{asyncio.run(shard())}/w{writer}/{part}.parquet"
    path = folder / "blob" / key
    path.parent.mkdir(parents=True)
    path.write_bytes(b"leaked")
    return key


def test_a_process_of_its_own(location: Path, tmp_path: Path) -> None:
    """Goal: the command as a shell runs it: the location from the environment, no markup in a pipe, status 2
    for a location that is not there, and a traceback only with `--debug`."""
    done = in_a_process("ls", AIOPERSIST_LOCATION=str(location))
    assert (done.status, done.err) == (0, "")
    assert "\x1b" not in done.out
    nowhere = in_a_process("ls", "--location", tmp_path / "nothing")
    assert (nowhere.status, nowhere.out) == (2, "")
    assert "Traceback" not in nowhere.err
    assert not (tmp_path / "nothing").exists()
    debug = in_a_process("show", "nothing", "--debug", "--location", location)
    assert "Traceback" in debug.err


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({}, [], "no location: use --location DIR, or"),
        ({"LOCATION": "a", "BLOB": "file:///b"}, [], "AIOPERSIST_LOCATION and AIOPERSIST_BLOB are both set"),
        ({"CONSENSUS": "sqlite:///c"}, [], "AIOPERSIST_CONSENSUS is set, but AIOPERSIST_BLOB is not"),
        ({"LOCATION": "/no/where"}, [], "there is no location at /no/where (AIOPERSIST_LOCATION)"),
        ({"LOCATION": "a"}, ["--location", "/no/where"], "there is no location at /no/where: check the path"),
        ({"LOCATION": "a"}, ["--blob", "file:///b"], "--blob and --consensus need each other"),
        ({}, ["--location", ""], "it is empty"),
    ],
)
def test_which_location(
    environment: dict[str, str], options: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: options go before the environment; what names no location is told with what to do."""
    for name in ("LOCATION", "BLOB", "CONSENSUS"):
        monkeypatch.delenv(f"AIOPERSIST_{name}", raising=False)
        if name in environment:
            monkeypatch.setenv(f"AIOPERSIST_{name}", environment[name])
    for command in ("ls", "usage"):
        done = aiopersist(command, *options)
        assert (done.status, done.out) == (2, "")
        assert said in done.err


def test_version() -> None:
    done = aiopersist("--version")
    assert done == (0, f"aiopersist {version('aiopersist')}\n", "")


def test_names_complete(location: Path) -> None:
    """Goal: the shell completes names of shards, and stays silent where there is no location."""

    def completed(**environment: str) -> Any:
        words = {
            "COMP_WORDS": "aiopersist show st",
            "COMP_CWORD": "2",
            "_AIOPERSIST_COMPLETE": "complete_bash",
        }
        program = "import sys; sys.argv[0] = 'aiopersist'; from aiopersist.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
            env={**os.environ, **words, **environment},
        )  # fmt: skip
        return done.stdout.split(), done.stderr

    assert completed(AIOPERSIST_LOCATION=str(location)) == (["stock"], "")
    assert completed(AIOPERSIST_LOCATION=str(location / "nothing")) == ([], "")


def test_all_passes_by_what_has_ended(tmp_path: Path) -> None:
    """Goal: the name of a finalized shard stays taken; a command for all shards goes on without failing, one
    that names it fails."""

    async def ended() -> None:
        async with ap.open(tmp_path, maintenance=False) as client:
            await client.table("stock", str, int).put("a", 1)
            async with client.writer("ended", ap.Schema(str, int)) as writer:
                await writer.compare_and_append([], 0, ap.Antichain())
            async with client.reader("ended") as reader:
                await reader.downgrade_since(ap.Antichain())
            await client.admin.finalize("ended")

    asyncio.run(ended())
    for command in (["fsck"], ["compact"], ["gc"], ["retain", "--keep", "7d"]):
        done = aiopersist(*command, "--all", "--json", "--location", tmp_path)
        assert done.status == 0, (command, done)
        lines = [json.loads(line) for line in done.out.splitlines()]
        assert lines[0] == {"shard": "ended", "ended": True}
        assert lines[1]["shard"] == "stock"
        assert aiopersist(*command, "ended", "--location", tmp_path).status == 1
    assert "ended: has ended" in aiopersist("fsck", "--location", tmp_path).out
