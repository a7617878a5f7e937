"""Goal: docs/cli.md has every command with all its options, and names none that is not there."""

import re
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from aiopersist.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group
SECTIONS = dict(re.findall(r"^## aiopersist (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
COMMON = {"--location", "--blob", "--consensus", "--json", "--debug", "--help"}


def options_of(command: str) -> set[str]:
    parameters = COMMANDS[command].params
    return {name for parameter in parameters for name in parameter.opts if name.startswith("--")}


def test_every_command_has_a_section() -> None:
    assert SECTIONS.keys() == COMMANDS.keys()
    intro = PAGE[: PAGE.index("## aiopersist ")]
    assert not [name for name in COMMON - {"--help"} if name not in intro]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_options(command: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", SECTIONS.get(command, "")))
    assert options_of(command) - COMMON == named - COMMON


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help(command: str) -> None:
    """Goal: what `--help` prints has the options of the page, and no others."""
    help_ = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert help_.exit_code == 0
    told = set(re.findall(r"^\W*(--[a-z][a-z-]*)", help_.stdout, re.MULTILINE))
    assert told == options_of(command) | {"--help"}
