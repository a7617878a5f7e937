"""Goal: nothing that a location or a file has moves the cursor of a terminal, hides a text or turns it
around; programs get all bytes; and odd standard streams end in words."""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.cli import ndjson
from aiopersist.cli.terminal import UNSAFE, escaped
from tests.cli.test_commands import COMMAND, aiopersist, in_a_process

C1, ESC, BIDI = "c1\x9b31mRED\x9b2J", "esc\x1b]0;pwned\x07\x1b[31m", "bidi\u202egnp.exe"
OF_RICH = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours, and the moves of a progress bar


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        table = client.table("t", key=str, val=str)
        await table.put_many({C1: ESC, ESC: BIDI})
        hostile = client.table(ESC + C1 + BIDI, key=str, val=str)
        await hostile.put("a", "b")
        await client.reader("t", hold=0, hold_name=ESC + C1, lease_s=600)
        async with client.subscription("t", name=C1 + BIDI):
            pass
        await table.put("later", "val")


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("location")
    asyncio.run(_fill(folder))
    return folder


def on_a_terminal(*arguments: object, location: Path) -> str:
    """What a terminal is sent, standard error included."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "AIOPERSIST_LOCATION": str(location), "COLUMNS": "200", "TERM": "xterm"}
    command = [*COMMAND, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    sent = b""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not data:
            break
        sent += data
    process.wait(60)
    os.close(leader)
    return sent.decode()


def told(sent: str) -> str:
    """Without what rich itself sends: each of its sequences is short, and none of those that are stored."""
    return OF_RICH.sub("", sent.replace("\r\n", "\n")).replace("\r", "")


READING: Sequence[Sequence[object]] = [
    ["ls"],
    ["show", "t"],
    ["cat", "t"],
    ["cat", "t", "--format", "ndjson"],
    ["fsck"],
    ["show", "nothing"],
    ["release", "t", "nobody", "--debug"],
    ["erase", "t", "--keys", C1, "--wait", "0s"],
]


@pytest.mark.parametrize("arguments", READING, ids=lambda given: ascii(" ".join(map(str, given[:4]))))
def test_no_stored_text_reaches_a_terminal_as_it_is(location: Path, arguments: Sequence[object]) -> None:
    sent = told(on_a_terminal(*arguments, location=location))
    assert sent.strip()
    assert UNSAFE.findall(sent) == []


@pytest.mark.parametrize(
    ("name", "data", "key"),
    [
        ("header.csv", "k,a\x1b]0;pwned\x07\x1b[31mRED\nx,1\n", "nokey"),
        ("row.csv", "k,v\nx,1\nx\x1b[31m\x9b2J,2,3\n", "k"),
        ("row.ndjson", '{"k": "x\u202e\x9b"}\n\x1b[31m\x9b', "k"),
    ],
)
def test_what_a_file_has_reaches_no_terminal(
    location: Path, tmp_path: Path, name: str, data: str, key: str
) -> None:
    (tmp_path / name).write_text(data, encoding="utf-8")
    sent = told(on_a_terminal("load", "new", tmp_path / name, "--key", key, location=location))
    assert name in sent and UNSAFE.findall(sent) == []


def test_programs_get_all_bytes(location: Path) -> None:
    at = ("--location", location)
    rows = [json.loads(line) for line in in_a_process("cat", "t", "--format", "ndjson", *at).out.splitlines()]
    assert {row["key"]: row["val"] for row in rows} == {C1: ESC, ESC: BIDI, "later": "val"}
    assert C1 in in_a_process("dump", "t", "--to", "-", "--format", "csv", *at).out
    assert ESC + C1 + BIDI in {row["name"] for row in json.loads(in_a_process("ls", "--json", *at).out)}


def test_an_escape_is_that_of_json() -> None:
    text = f"a{C1}{ESC}{BIDI}\U000e0041\u2028 é中\t\n"
    assert json.loads(f'"{escaped(text)}"', strict=False) == text
    assert escaped("é中\t\n👩‍👩‍👧 \xa0") == "é中\t\n👩‍👩‍👧 \xa0"  # of many scripts, and of emoji


# --- standard streams -----------------------------------------------------------------------------------


def shell(line: str, location: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of a shell, in which `$AP` is the command."""
    given = {"AIOPERSIST_LOCATION": str(location), "AP": f"{sys.executable} -m tests.cli.main", **environment}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | given
    return subprocess.run(["sh", "-c", line], capture_output=True, env=env, timeout=120)


def test_standard_output_that_is_closed(location: Path) -> None:
    done = shell("$AP ls >&-", location)
    assert (done.returncode, done.stderr) == (2, b"aiopersist: standard output is closed\n")


def test_standard_error_that_is_closed(location: Path) -> None:
    """Goal: no file of ours becomes standard error, where others write to."""
    done = shell("$AP get t nokey 2>&-; echo $?", location)
    assert done.stdout == b"1\n"
    assert shell("$AP fsck t <&- 2>&-", location).returncode == 0


def test_standard_input_that_is_closed(location: Path) -> None:
    done = shell("$AP put t key - <&-", location)
    assert (done.returncode, done.stderr) == (2, b"aiopersist: standard input is closed\n")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no device that is full")
def test_standard_output_that_is_full(location: Path) -> None:
    for command, unbuffered in (
        ("ls", ""),
        ("ls --json", "1"),
        ("cat t --format ndjson", ""),
        ("--help", ""),
    ):
        done = shell(f"$AP {command} >/dev/full", location, PYTHONUNBUFFERED=unbuffered)
        told = (2, b"aiopersist: No space left on device\n")
        assert (done.returncode, done.stderr) == told, command


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="the system has no device that is full")
def test_standard_error_that_is_full(location: Path) -> None:
    for command, status in (("show nothing", 1), ("ls", 0)):
        assert shell(f"$AP {command} 2>/dev/full", location).returncode == status, command


def test_a_reader_that_has_enough(location: Path) -> None:
    done = shell("{ $AP cat t --format ndjson; echo $? >&2; } | true", location)
    assert done.stderr == b"0\n"


def test_an_encoding_that_has_few_characters(tmp_path: Path) -> None:
    async def fill() -> None:
        async with ap.open(tmp_path, maintenance=False) as client:
            await client.table("né中", key=str, val=str).put("é", "中")

    asyncio.run(fill())
    few = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    assert shell("$AP ls", tmp_path, **few).returncode == 0
    listed = shell("$AP ls --json", tmp_path, **few)
    assert json.loads(listed.stdout.decode())[0]["name"] == "né中"
    assert shell("$AP get 'né中' é", tmp_path, **few).stdout.decode() == '"中"\n'
    rows = shell("$AP cat 'né中' --format ndjson --where \"key = 'é'\"", tmp_path, **few)
    assert json.loads(rows.stdout.decode())["val"] == "中"


# --- files ----------------------------------------------------------------------------------------------


class Endless:
    """A line without an end, and how much of it was read."""

    def __init__(self) -> None:
        self.size = 0

    def read(self, size: int) -> bytes:
        self.size += size
        return b"x" * size


def test_a_line_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ndjson, "BLOCK_BYTES", 1024)
    monkeypatch.setattr(ndjson, "LINE_BYTES_MAX", 100_000)
    endless = Endless()
    with pytest.raises(Exception, match="line 1 is longer than 100,000 bytes"):
        list(ndjson._lines(endless))  # type: ignore[arg-type]
    assert endless.size < 110_000


def test_a_long_line_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the work is that of its length: pieces are joined when its end comes."""
    monkeypatch.setattr(ndjson, "BLOCK_BYTES", 7)
    lines = [b'{"a": 1}\n', b'{"a": "' + b"x" * 1000 + b'"}\n', b'{"a": 2}']

    class File:
        def __init__(self) -> None:
            self.left = b"\xef\xbb\xbf" + b"".join(lines)
            self.joined = 0

        def read(self, size: int) -> bytes:
            some, self.left = self.left[:size], self.left[size:]
            return some

    assert b"".join(ndjson._lines(File())) == b"".join(lines)  # type: ignore[arg-type]


def test_a_bar_takes_names_as_they_are(location: Path) -> None:
    async def fill() -> None:
        async with ap.open(location, maintenance=False) as client:
            await client.table("[red]markup[/nothing]", key=str, val=str).put("a", "b")

    asyncio.run(fill())
    assert "[red]markup[/nothing]: sound" in told(on_a_terminal("fsck", location=location))
    assert aiopersist("drop", "[red]markup[/nothing]", "--yes", "--location", location).status == 0
