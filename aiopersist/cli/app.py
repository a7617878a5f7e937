"""The commands by name. A command is imported when it is called, or when its help is shown."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version as version_of
from inspect import iscoroutinefunction
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from aiopersist.cli.terminal import CANNOT_BEGIN, prepare, stop

MODULES = {
    "ls": "ls",
    "show": "show",
    "cat": "cat",
    "diff": "changes",
    "tail": "changes",
    "sql": "sql",
    "load": "load",
    "dump": "dump",
    "get": "tables",
    "put": "tables",
    "rm": "tables",
    "erase": "erase",
    "copy": "copy",
    "tag": "tags",
    "tags": "tags",
    "untag": "tags",
    "publish": "publish",
    "unpublish": "publish",
    "subscriptions": "admin",
    "forget": "admin",
    "release": "release",
    "fsck": "admin",
    "usage": "admin",
    "doctor": "doctor",
    "compact": "admin",
    "gc": "admin",
    "sweep": "admin",
    "retain": "admin",
    "finalize": "admin",
    "drop": "admin",
    "maintain": "maintain",
    "serve": "serve",
    "demo": "demos",
}
"""The commands in the order of the help, and their modules."""


class _Commands(Mapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


@cache
def _command(name: str) -> Any:
    work = getattr(import_module(f"aiopersist.cli.{MODULES[name]}"), name)
    from aiopersist.cli.command import register  # imports a client

    command_app = typer.Typer(add_completion=False)
    if iscoroutinefunction(work):
        register(command_app, work)
    else:
        command_app.command()(work)
    return typer.main.get_command(command_app)


class _Group(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": _Commands()})


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


def _tell_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"aiopersist {version_of('aiopersist')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Durable, definite, time-varying collections."""
    if (fault := prepare()) is not None:
        stop(fault, CANNOT_BEGIN)
