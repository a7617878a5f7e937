"""The commands and their options; other modules do the work."""

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from aiopersist.cli import cat as cat_
from aiopersist.cli import maintain as maintain_
from aiopersist.cli.location import LocationOptions
from aiopersist.demo import history as demo_history
from aiopersist.demo import indexed as demo_indexed
from aiopersist.demo import spark as demo_spark
from aiopersist.demo import tables as demo_tables
from aiopersist.demo.common import CheckFailed, DemoOptions
from aiopersist.demo.git import GitError
from aiopersist.errors import Error, InvalidLocation, StorageUnavailable

CANNOT_BEGIN = 2
CHECK_FAILED = 1

Location = Annotated[str | None, typer.Option(help="A directory, or what $AIOPERSIST_LOCATION says.")]
BlobUrl = Annotated[str | None, typer.Option(help="URL of the blob store; with --consensus.")]
ConsensusUrl = Annotated[str | None, typer.Option(help="URL of the consensus store; with --blob.")]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Durable, definite, time-varying collections."""


@app.command()
def demo(
    repo: Annotated[Path, typer.Argument(help="A git repository.")] = Path(),
    location: Annotated[str | None, typer.Option(help="Keep the data in this directory.")] = None,
    blob: BlobUrl = None,
    consensus: ConsensusUrl = None,
    limit: Annotated[int | None, typer.Option(min=1, help="N commits, or transfers.")] = None,
    tables: Annotated[
        bool,
        typer.Option("--tables", help="A bank in two tables: transactions of processes, no git."),
    ] = False,
    indexed: Annotated[
        bool, typer.Option("--indexed", help="By author date, one stream per top-level folder.")
    ] = False,
    spark: Annotated[
        bool, typer.Option("--spark", help="Loaded, read back and compacted by Spark jobs; needs Java.")
    ] = False,
) -> None:
    """Store the history of a git repository, follow it live, and check it against git; or run a bank."""
    _check_location(location, blob, consensus)
    if location is not None and "://" in location:
        _stop("--location is a directory; a URL is for --blob or --consensus", CANNOT_BEGIN)
    options = DemoOptions(repo, None if location is None else Path(location), blob, consensus, limit)
    demos = {demo_tables.run: tables, demo_indexed.run: indexed, demo_spark.run: spark}
    chosen = [run for run, is_chosen in demos.items() if is_chosen] or [demo_history.run]
    if len(chosen) > 1:
        _stop("--tables, --indexed and --spark are demos of their own: choose one", CANNOT_BEGIN)
    _run(chosen[0](options, Console()))


@app.command()
def maintain(
    location: Location = None,
    blob: BlobUrl = None,
    consensus: ConsensusUrl = None,
    once: Annotated[bool, typer.Option("--once", help="One round and a sweep, then end.")] = False,
    every_s: Annotated[float, typer.Option(min=0.01, help="Seconds between two rounds.")] = 10.0,
    sweep_every_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between two sweeps of leaked blobs.")
    ] = 3600.0,
) -> None:
    """Maintain all shards of a location: compact, collect garbage, apply retention, sweep leaked blobs."""
    _check_location(location, blob, consensus)
    pace = maintain_.Pace(every_s, sweep_every_s, once)
    _run(maintain_.run(LocationOptions(location, blob, consensus), pace, Console()))


@app.command()
def cat(
    shard: Annotated[str, typer.Argument(help="The name of a shard, or of a table.")],
    location: Location = None,
    blob: BlobUrl = None,
    consensus: ConsensusUrl = None,
    as_of: Annotated[
        str | None, typer.Option(help="A time, or an instant such as 2026-01-31T12:00Z; else the newest.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns instead of key, val, diff: key,val.amount")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=0, help="So many rows; a table shows 100.")] = None,
    form: Annotated[
        cat_.Format | None, typer.Option("--format", help="table on a terminal, else ndjson.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format ndjson.")] = False,
) -> None:
    """Write the contents of a shard as of a time."""
    _check_location(location, blob, consensus)
    if as_json and form not in (None, cat_.Format.NDJSON):
        _stop(f"--json is --format ndjson, not {form}", CANNOT_BEGIN)
    try:
        time = None if as_of is None else cat_.time_of(as_of)
    except ValueError as e:
        _stop(f"--as-of: {e}", CANNOT_BEGIN)
    chosen = form or (cat_.Format.NDJSON if as_json or not sys.stdout.isatty() else cat_.Format.TABLE)
    names = None if columns is None else tuple(columns.split(","))
    options = cat_.CatOptions(time, names, limit, chosen)
    _run(cat_.run(LocationOptions(location, blob, consensus), shard, options, Console()))


def _check_location(location: object, blob: str | None, consensus: str | None) -> None:
    if location is not None and (blob or consensus):
        _stop("--location cannot be combined with --blob and --consensus", CANNOT_BEGIN)
    if (blob is None) is not (consensus is None):
        _stop("--blob and --consensus need each other", CANNOT_BEGIN)


def _run(work: Coroutine[Any, Any, None]) -> None:
    try:
        asyncio.run(work)
    except (GitError, InvalidLocation, StorageUnavailable) as e:
        _stop(e, CANNOT_BEGIN)
    except (CheckFailed, maintain_.RoundFailed, Error) as e:
        _stop(e, CHECK_FAILED)
    except BrokenPipeError:  # whoever reads the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        _stop("interrupted", 130)


def _stop(why: object, status: int) -> NoReturn:
    line = " ".join(str(why).split()) or type(why).__name__
    sys.stderr.write(f"aiopersist: {line}\n")
    raise typer.Exit(status)
