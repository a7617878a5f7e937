"""`aiopersist demo`: shows the library at work, on a bank or on a git repository."""

from collections.abc import Coroutine
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from aiopersist.cli.command import (
    BlobUrl,
    CannotBegin,
    ConsensusUrl,
    Problems,
    check_location,
    execute,
)
from aiopersist.cli.consoles import results
from aiopersist.cli.location import LocationOptions
from aiopersist.cli.terminal import CANNOT_BEGIN, stop
from aiopersist.demo import history as demo_history
from aiopersist.demo import indexed as demo_indexed
from aiopersist.demo import spark as demo_spark
from aiopersist.demo import tables as demo_tables
from aiopersist.demo.common import CheckFailed, DemoOptions
from aiopersist.demo.git import GitError


def demo(
    repo: Annotated[Path, typer.Argument(help="A git repository.")] = Path(),
    location: Annotated[str | None, typer.Option(help="Keep the data in this directory.")] = None,
    blob: BlobUrl = None,
    consensus: ConsensusUrl = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most N commits or transfers.")] = None,
    tables: Annotated[
        bool,
        typer.Option("--tables", help="A bank in two tables, with several processes; no git."),
    ] = False,
    indexed: Annotated[
        bool, typer.Option("--indexed", help="One stream per top-level folder, by author date.")
    ] = False,
    spark: Annotated[
        bool, typer.Option("--spark", help="Load, read and compact with Spark jobs; needs Java.")
    ] = False,
) -> None:
    """Store the history of a git repository, follow it live and check it against git; or run a bank."""
    if location or blob or consensus:  # else in a temporary directory
        check_location(LocationOptions(location, blob, consensus))
    if location is not None and "://" in location:
        stop("--location is a directory; a URL is for --blob or --consensus", CANNOT_BEGIN)
    options = DemoOptions(repo, None if location is None else Path(location), blob, consensus, limit)
    demos = {demo_tables.run: tables, demo_indexed.run: indexed, demo_spark.run: spark}
    chosen = [run for run, is_chosen in demos.items() if is_chosen] or [demo_history.run]
    if len(chosen) > 1:
        stop("--tables, --indexed and --spark are separate demos: choose one", CANNOT_BEGIN)
    execute(_with_messages(chosen[0](options, results()), location))


async def _with_messages(work: Coroutine[Any, Any, None], kept_in: str | None) -> None:
    """Run a demo: turn its errors into those of a command, and name the command that shows kept data."""
    try:
        await work
    except CheckFailed as error:
        raise Problems(str(error)) from error
    except GitError as error:
        raise CannotBegin(str(error)) from error
    if kept_in is not None:
        command = f"aiopersist serve --location {quote(kept_in)}"
        results().print(f"Now look at it: {command}", soft_wrap=True, markup=False, highlight=False)
