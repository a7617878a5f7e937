"""What the demos share: their options, the clients of their location, and the comparison with git."""

import asyncio
import logging
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
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
from aiopersist.demo.git import FileVersion

SAMPLES = 12  # commits whose whole tree is compared
OPEN_TIMEOUT_S = 10.0  # a user watches

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
    """The directory of the location; a temporary one, unless a location is given; `None` for URLs."""
    if options.location is not None or options.blob is not None:
        yield options.location
        return
    with tempfile.TemporaryDirectory(prefix="aiopersist-demo-") as directory:
        yield Path(directory)


@asynccontextmanager
async def opened(options: DemoOptions, directory: Path | None, count: int) -> AsyncIterator[list[Client]]:
    """That many clients of the location. Raises the first error of an error group."""
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
    """Import now the modules that the first commit would import: that would count as its latency."""
    for name in ("polars", "pyarrow.compute", "pyarrow.parquet"):
        import_module(name)
    import_module("pyarrow").array([b""])  # looks for pandas


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines: the command says once that a store cannot be reached."""
    handler = logging.NullHandler()
    logging.getLogger("aiopersist").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("aiopersist").removeHandler(handler)


def _first_error(error: BaseException) -> BaseException:
    return _first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


# --- the comparison ----------------------------------------------------------------------------------


def samples(commits: Sequence[str]) -> list[int]:
    """The numbers of the commits to compare, the last one among them."""
    last = len(commits) - 1
    return sorted({round(n * last / (SAMPLES - 1)) for n in range(SAMPLES)})


def add_row(rows: Counter[Row], row: Row, diff: int) -> None:
    """Add `diff` to the row's count; a row of count 0 is gone."""
    rows[row] += diff
    if not rows[row]:
        del rows[row]


def end_of(frontier: Any) -> int:
    """The int time of a frontier; the empty one is past every commit."""
    time = int_time(frontier)
    return TIME_MAX if time is None else time


def compare(expected: Counter[Row], actual: Counter[Row], what: str) -> None:
    """`CheckFailed`, which names a path, if they differ."""
    if expected == actual:
        return
    differing = (row for row in expected | actual if expected[row] != actual[row])
    path, version = next(differing, next(iter(actual.keys() - expected.keys()), (b"?", None)))
    raise CheckFailed(f"{what} is not what git says, at {path!r}: {version}")


# --- the console -------------------------------------------------------------------------------------


def progress(console: Console) -> Progress:
    """Bars with a description, a count and the time."""
    columns = TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console)


def say(console: Console, *lines: str) -> None:
    """Print the lines as they are."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
