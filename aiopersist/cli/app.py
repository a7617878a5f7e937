"""The commands, by name; the modules of this package say what each takes and does.

A command is imported when it is called, or when its help is shown.
"""

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
    "load": "load",
    "dump": "dump",
    "get": "tables",
    "put": "tables",
    "rm": "tables",
    "erase": "erase",
    "copy": "copy",
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
    """The commands by name, each made when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


@cache
def _made(name: str) -> Any:
    work = getattr(import_module(f"aiopersist.cli.{MODULES[name]}"), name)
    from aiopersist.cli.command import register  # imports a client

    one = typer.Typer(add_completion=False)
    if iscoroutinefunction(work):
        register(one, work)
    else:
        one.command()(work)
    return typer.main.get_command(one)


class _Group(TyperGroup):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": _Commands()})


app = typer.Typer(cls=_Group, no_args_is_help=True, pretty_exceptions_enable=False)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aiopersist {version_of('aiopersist')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version, and end."),
    ] = False,
) -> None:
    """Durable, definite, time-varying collections."""
    if (fault := prepare()) is not None:
        stop(fault, CANNOT_BEGIN)
