"""The frame of every command: location, `--json`, `--debug`, results, messages, exit status.

A command is a coroutine function. Its first parameter is an `Invocation`, the others are its own arguments
and options; `register` adds the common options.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | it found problems, or was refused |
| 2 | it could not start |
| 130 | it was interrupted |
"""

import asyncio
import inspect
import signal
import sqlite3
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, NamedTuple

import pydantic_core
import typer
from rich.console import Console
from rich.text import Text

from aiopersist.base.errors import (
    Corruption,
    Error,
    InvalidLocation,
    StorageUnavailable,
    UnknownShard,
    UnknownTag,
)
from aiopersist.cli.consoles import messages, results
from aiopersist.cli.location import LocationOptions
from aiopersist.cli.terminal import (
    CANNOT_BEGIN,
    INTERRUPTED,
    PROBLEMS,
    complain,
    decoded,
    drop_unwritten,
    output,
    stop,
)
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.client.open import open_to_list

NAMES_SHOWN = 8
PATHS = {"files", "to", "to_location"}  # paths, in the encoding of the system

Location = Annotated[
    str | None,
    typer.Option(help="A directory or a bucket (s3://, az://, gs://); default: $AIOPERSIST_LOCATION."),
]
BlobUrl = Annotated[str | None, typer.Option(help="URL of the blob store; needs --consensus.")]
ConsensusUrl = Annotated[str | None, typer.Option(help="URL of the consensus store; needs --blob.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON: one document, or one per line.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; without --yes, only show what it would do.")]


class CannotBegin(Exception):
    """Nothing was done: an argument is wrong, or something that the command needs is missing."""


class NoLocation(CannotBegin):
    """There is no location yet."""


class Problems(Exception):
    """The command ran, and found problems or was refused."""


class Interrupted(Exception):
    """A signal ended the command before its work was done."""


class Invocation(NamedTuple):
    """One run of a command."""

    location: LocationOptions
    as_json: bool
    out: Console
    """For results: standard output."""
    err: Console
    """For messages and progress: standard error."""

    @asynccontextmanager
    async def reading(self, to_list: bool = False) -> AsyncIterator[Client]:
        """A client that writes nothing to the location. `to_list`: see `open_to_list`."""
        where, blob, consensus = self.location
        if self.location.is_missing:
            source = " (AIOPERSIST_LOCATION)" if self.location.is_environment else ""
            hint = "check the path; aiopersist load creates one, and so does an application that opens it"
            raise NoLocation(f"there is no location at {self.location.folder}{source}: {hint}")
        if to_list:
            opening = open_to_list(where, blob, consensus)
        else:
            opening = open_client(where, blob=blob, consensus=consensus, readonly=True)
        async with opening as client:
            async with _names_in_errors(client):
                yield client

    @asynccontextmanager
    async def writing(self, make: bool = False) -> AsyncIterator[Client]:
        """A client without maintenance. Without `make`, the location must exist: a path may be mistyped."""
        where, blob, consensus = self.location
        is_new = False
        try:
            async with self.reading():
                pass
        except (NoLocation, InvalidLocation):
            if not make:
                raise
            is_new = True
        async with open_client(where, blob=blob, consensus=consensus, maintenance=False) as client:
            if is_new:
                self.say(f"created a new location: {self.location.name}")
            async with _names_in_errors(client):
                yield client

    def say(self, text: object) -> None:
        """Print a message unchanged, without wrapping."""
        self.err.print(str(text), soft_wrap=True, markup=False, highlight=False)

    def tell(self, value: Any, text: str) -> None:
        """Write the result: with `--json` as one JSON document, otherwise as a text."""
        if self.as_json:
            self.document(value)
        else:
            self.out.print(Text(text), soft_wrap=True)

    def tell_one(self, value: Any, text: str) -> None:
        """Write one of many results: with `--json` as a line of JSON, otherwise as a text."""
        if self.as_json:
            self.line(value)
        else:
            self.out.print(Text(text), soft_wrap=True)

    def document(self, value: Any) -> None:
        """Write a result as one JSON document."""
        self._write(pydantic_core.to_json(value, indent=2))

    def line(self, value: Any) -> None:
        """Write one of many results as a line of JSON."""
        self._write(pydantic_core.to_json(value))

    def _write(self, data: bytes) -> None:
        out = output()
        out.write(data + b"\n")
        out.flush()  # a reader of a pipe may wait for it


@asynccontextmanager
async def _names_in_errors(client: Client) -> AsyncIterator[None]:
    """Adds the existing names to errors about unknown names."""
    try:
        yield
    except (UnknownShard, UnknownTag) as error:
        names, command = tuple[str, ...](), "ls"
        with suppress(Error):
            if isinstance(error, UnknownShard):
                names = tuple(await client.list_shards())
            else:
                names, command = tuple(await client.tags(error.shard_id or "")), "tags"
        quoted = ", ".join(map(repr, names[:NAMES_SHOWN])) or "none"
        more = f", ...: aiopersist {command} lists all" if len(names) > NAMES_SHOWN else ""
        raise Problems(f"{error}; there are {quoted}{more}") from error


def register(app: typer.Typer, work: Callable[..., Coroutine[Any, Any, None]]) -> None:
    """Make `work` a command of `app`, with the common options."""

    def entry(**values: Any) -> None:
        debug = values.pop("debug")
        location = LocationOptions(*(values.pop(name) for name in LocationOptions._fields))
        check_location(location)
        values |= {name: decoded(value) for name, value in values.items() if name not in PATHS}
        run = Invocation(location, values.pop("as_json"), results(), messages())
        execute(work(run, **values), debug=debug)

    own = list(inspect.signature(work, eval_str=True).parameters.values())[1:]
    common = inspect.signature(_common, eval_str=True).parameters.values()
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *common)]
    entry.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]  # what typer reads
    entry.__annotations__, entry.__doc__ = {}, work.__doc__
    app.command(work.__name__)(entry)


def _common(
    location: Location = None,
    blob: BlobUrl = None,
    consensus: ConsensusUrl = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """The common options."""


def check_location(location: LocationOptions) -> None:
    """End with status 2 unless the options, or the environment, name one location."""
    if (refusal := location.refusal()) is not None:
        stop(refusal, CANNOT_BEGIN)


def execute(work: Coroutine[Any, Any, None], *, debug: bool = False) -> None:
    """Run the coroutine of a command, and exit with its status."""
    try:
        asyncio.run(_until_terminated(work))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has closed it
        drop_unwritten()
    except (KeyboardInterrupt, Interrupted):
        stop("interrupted", INTERRUPTED)
    except Exception as error:
        if debug:
            complain("".join(traceback.format_exception(error)).rstrip())
        stop(_message_of(error), _status(error))


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Do the work; SIGTERM cancels it, so that it cleans up. A command may handle signals itself."""
    task, terminated = asyncio.current_task(), False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        assert task is not None
        task.cancel()

    with suppress(RuntimeError, ValueError):  # not in the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await work
    except asyncio.CancelledError:
        if terminated:
            raise Interrupted from None
        raise


def _status(error: Exception) -> int:
    begun = not isinstance(error, CannotBegin | InvalidLocation | StorageUnavailable | OSError)
    return PROBLEMS if begun else CANNOT_BEGIN


def _message_of(error: Exception) -> str:
    """The message for users: the text of a known error; of any other its type, too."""
    if isinstance(error, Corruption):
        is_of_database = isinstance(error.__cause__, sqlite3.Error)  # then fsck could not open it either
        return f"{error}{'' if is_of_database else '; aiopersist fsck names each damaged blob'}"
    if isinstance(error, Error | CannotBegin | Problems):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error} (--debug shows where)"
