"""Goal: every command answers programs, and as a shell runs it: in a process of its own."""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from tests.cli.result import Result
from tests.cli.test_commands import in_a_process

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
ELSEWHERE = {
    "cat": "test_cat.py",
    "copy": "test_copy.py",
    "demo": "test_demo.py",
    "dump": "test_load.py",
    "load": "test_load.py",
    "ls": "test_commands.py",
    "maintain": "test_maintain.py",
    "serve": "test_serve.py",
    "tail": "test_changes.py",
}
"""The commands whose processes have tests of their own, which need more than one answer."""
READING = [
    ["show", "stock"],
    ["diff", "raw", "0"],
    ["get", "stock", "apple"],
    ["subscriptions", "stock"],
    ["tags", "stock"],
    ["sql", "select * from stock"],
    ["usage"],
    ["fsck"],
    ["doctor"],
]
CHANGING = [
    ["put", "other", "pear", "2"],
    ["rm", "other", "pear"],
    ["compact", "other"],
    ["gc", "other"],
    ["retain", "other", "--keep", "7d"],
    ["forget", "other", "bill", "--yes"],
    ["tag", "other", "monday"],
    ["untag", "other", "monday", "--yes"],
    ["publish", "other"],
    ["unpublish", "other"],
    ["release", "other", "report", "--yes"],
    ["erase", "other", "--keys", "pear", "--wait", "0s", "--yes"],
    ["drop", "other", "--yes"],
    ["finalize", "ended", "--yes"],
    ["sweep", "--yes"],
]
SOME = {"show", "fsck", "put", "drop"}
"""Of each lane, one that answers with a document and one that answers by lines."""
BY_LINES = {"compact", "diff", "drop", "finalize", "fsck", "gc", "retain"}


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        await client.table("stock", str, int).put("apple", 1)
        await client.table("other", str, int).put("apple", 1)
        async with client.subscription("other", name="bill"):
            pass
        await client.critical_since("other", "report")
        for name in ("raw", "ended"):
            async with client.writer(name, ap.Schema(str, int)) as writer:
                await writer.compare_and_append([("a", 1, 0, 1)], 0, 1)
        async with client.writer("ended", ap.Schema(str, int)) as writer:
            await writer.compare_and_append([], 1, ap.Antichain())
        async with client.reader("ended") as reader:
            await reader.downgrade_since(ap.Antichain())


def _wrong(command: list[str], done: Result) -> str:
    """What is wrong with its answer; nothing, if it is right."""
    if (done.status, done.err) != (0, ""):
        return f"{command}: {done}"
    for document in done.out.splitlines() if command[0] in BY_LINES else [done.out]:
        json.loads(document)
    return ""


Ran = Callable[..., Result]


def _ran(run: Ran, commands: list[list[str]], folder: Path) -> list[str]:
    answers = (
        _wrong(command, run(*command, "--json", AIOPERSIST_LOCATION=str(folder))) for command in commands
    )
    return [wrong for wrong in answers if wrong]


def _here(*arguments: str, **environment: str) -> Result:
    done = CliRunner().invoke(app, arguments, env=environment)
    return Result(done.exit_code, done.stdout, done.stderr)


def _apart(*arguments: str, **environment: str) -> Result:
    """Modules are compiled once for all processes."""
    return in_a_process(*arguments, **environment, PYTHONDONTWRITEBYTECODE="")


def test_every_command(tmp_path: Path) -> None:
    """Goal: programs get JSON on standard output, no message, status 0."""
    folder = tmp_path / "location"
    asyncio.run(_fill(folder))
    assert _ran(_here, [*READING, *CHANGING], folder) == []


@pytest.mark.slow
@pytest.mark.timeout(300)  # processes, on a machine that others load, too
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)])
def test_commands_as_processes(every: bool, tmp_path: Path) -> None:
    """Goal: so does a shell; from those that read while others change, too."""
    folder = tmp_path / "location"
    asyncio.run(_fill(folder))
    chosen = [[command for command in lane if every or command[0] in SOME] for lane in (READING, CHANGING)]
    with ThreadPoolExecutor(2) as lanes:
        assert [*lanes.map(lambda lane: _ran(_apart, lane, folder), chosen)] == [[], []]


def test_none_is_left_out() -> None:
    """Goal: a command that is added runs as a process, here or in a file that says so."""
    here = {command[0] for command in (*READING, *CHANGING)}
    assert here | ELSEWHERE.keys() == COMMANDS.keys()
    for command, file in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f'"{command}"' in text, file
        assert "subprocess." in text, file
