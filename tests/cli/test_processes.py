"""Goal: every command runs as a shell runs it, in a process of its own."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer.main

import aiopersist as ap
from aiopersist.cli.app import app
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
    ["release", "other", "report", "--yes"],
    ["drop", "other", "--yes"],
    ["finalize", "ended", "--yes"],
    ["sweep", "--yes"],
]
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


def _ran(command: list[str], folder: Path) -> str:
    """What is wrong with its answer; nothing, if it is right. Modules are compiled once for all processes."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder.parent / "compiled")}
    done = in_a_process(*command, "--json", AIOPERSIST_LOCATION=str(folder), **compiled)
    if (done.status, done.err) != (0, ""):
        return f"{command}: {done}"
    for document in done.out.splitlines() if command[0] in BY_LINES else [done.out]:
        json.loads(document)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(300)  # seventeen processes, on a machine that others load, too
def test_every_command_as_a_process(tmp_path: Path) -> None:
    """Goal: a shell gets JSON on standard output, no message, status 0; from those that read while others
    change, too."""
    folder = tmp_path / "location"
    asyncio.run(_fill(folder))
    with ThreadPoolExecutor(2) as lanes:
        done = lanes.map(lambda lane: [_ran(command, folder) for command in lane], (READING, CHANGING))
        assert [wrong for answers in done for wrong in answers if wrong] == []


def test_none_is_left_out() -> None:
    """Goal: a command that is added runs as a process, here or in a file that says so."""
    here = {command[0] for command in (*READING, *CHANGING)}
    assert here | ELSEWHERE.keys() == COMMANDS.keys()
    for command, file in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text(encoding="utf-8")
        assert f'"{command}"' in text, file
        assert "subprocess." in text, file
