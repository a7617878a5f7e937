"""Shared by the demos: options, the clients of the location, and the comparison with git."""

import asyncio
import logging
import os
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aiopersist.base.frontier import TIME_MAX, int_time
from aiopersist.base.resource import Opening
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.data.types.schema import Schema
from aiopersist.demo.git import FileVersion

SAMPLES = 12  # commits whose trees are compared
OPEN_TIMEOUT_S = 10.0  # a user is waiting

Row = tuple[bytes, FileVersion]


class CheckFailed(Exception):
    """The data differ from git."""


class DemoOptions(NamedTuple):
    """The options of the command."""

    repository: Path
    location: Path | None
    blob: str | None
    consensus: str | None
    limit: int | None


# --- the location ------------------------------------------------------------------------------------


@contextmanager
def directory_of(options: DemoOptions) -> Iterator[Path | None]:
    """The directory of the location; without the option a temporary one; `None` for URLs."""
    if options.location is not None or options.blob is not None:
        yield options.location
        return
    with tempfile.TemporaryDirectory(prefix="aiopersist-demo-") as directory:
        yield Path(directory)


@asynccontextmanager
async def opened(options: DemoOptions, directory: Path | None, count: int) -> AsyncIterator[list[Client]]:
    """`count` clients of the location. Raises the first error of an error group."""
    await asyncio.to_thread(_import_all)
    async with AsyncExitStack() as stack:
        with _quiet():
            clients = [await stack.enter_async_context(_client(options, directory)) for _ in range(count)]
        try:
            yield clients
        except* Exception as group:
            raise _first_error(group) from None


def _client(options: DemoOptions, directory: Path | None) -> Opening[Client]:
    named = "AIOPERSIST_OPEN_TIMEOUT_S" in os.environ
    settings = Settings() if named else Settings(open_timeout_s=OPEN_TIMEOUT_S)
    if directory is not None:
        return open_client(directory, settings=settings)
    return open_client(blob=options.blob, consensus=options.consensus, settings=settings)


def _import_all() -> None:
    """Import modules now; otherwise the first commit would import them and be slow."""
    for name in ("polars", "pyarrow.compute", "pyarrow.parquet"):
        import_module(name)
    import_module("pyarrow").array([b""])  # looks for pandas


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines: the command itself reports that a store cannot be reached."""
    handler = logging.NullHandler()
    logging.getLogger("aiopersist").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("aiopersist").removeHandler(handler)


def _first_error(error: BaseException) -> BaseException:
    return _first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def follow(
    client: Client, shard: str, schema: Schema[bytes, FileVersion, int], last: int, rows: Counter[Row]
) -> AsyncGenerator[int, None]:
    """Add the changes up to commit `last` to `rows`; the upper after each step, at most `last + 1`."""
    async with client.reader(shard, schema) as reader, reader.subscribe(as_of=0) as changes:
        async for step in changes.steps():
            for path, version, time, diff in step.updates:
                if time <= last:
                    add_row(rows, (path, version), diff)
            upper = min(end_of(step.upper), last + 1)
            yield upper
            if upper > last:
                return


# --- the comparison ----------------------------------------------------------------------------------


def samples(commits: Sequence[str]) -> list[int]:
    """The numbers of the commits to compare, including the last one."""
    last = len(commits) - 1
    return sorted({round(n * last / (SAMPLES - 1)) for n in range(SAMPLES)})


def add_row(rows: Counter[Row], row: Row, diff: int) -> None:
    """Add `diff` to the row's count; a row with count 0 is removed."""
    rows[row] += diff
    if not rows[row]:
        del rows[row]


def end_of(frontier: Any) -> int:
    """The int time of a frontier; the empty one is beyond every commit."""
    time = int_time(frontier)
    return TIME_MAX if time is None else time


def compare(expected: Counter[Row], actual: Counter[Row], what: str) -> None:
    """`CheckFailed` with a path if they differ."""
    if expected == actual:
        return
    differing = (row for row in expected | actual if expected[row] != actual[row])
    path, version = next(differing, next(iter(actual.keys() - expected.keys()), (b"?", None)))
    raise CheckFailed(f"{what} differs from git at {path!r}: {version}")


# --- the console -------------------------------------------------------------------------------------


def progress(console: Console) -> Progress:
    """Bars with a description, a count and the time."""
    columns = TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def say(console: Console, *lines: str) -> None:
    """Print the lines unchanged."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
