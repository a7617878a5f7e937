"""The commands, by name; the modules of this package say what each takes and does."""

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated

import typer

from aiopersist.cli import (
    admin,
    cat,
    changes,
    copy,
    doctor,
    dump,
    erase,
    load,
    ls,
    maintain,
    release,
    serve,
    show,
    tables,
)
from aiopersist.cli.command import (
    CANNOT_BEGIN,
    BlobUrl,
    ConsensusUrl,
    check_location,
    execute,
    register,
    stop,
)
from aiopersist.cli.location import LocationOptions
from aiopersist.cli.terminal import prepare, results
from aiopersist.demo import history as demo_history
from aiopersist.demo import indexed as demo_indexed
from aiopersist.demo import spark as demo_spark
from aiopersist.demo import tables as demo_tables
from aiopersist.demo.common import DemoOptions

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)


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


for command in (
    ls.ls,
    show.show,
    cat.cat,
    changes.diff,
    changes.tail,
    load.load,
    dump.dump,
    tables.get,
    tables.put,
    tables.rm,
    erase.erase,
    copy.copy,
    admin.subscriptions,
    admin.forget,
    release.release,
    admin.fsck,
    admin.usage,
    doctor.doctor,
    admin.compact,
    admin.gc,
    admin.sweep,
    admin.retain,
    admin.finalize,
    admin.drop,
    maintain.maintain,
    serve.serve,
):
    register(app, command)


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
    if location or blob or consensus:  # else in a temporary directory
        check_location(LocationOptions(location, blob, consensus))
    if location is not None and "://" in location:
        stop("--location is a directory; a URL is for --blob or --consensus", CANNOT_BEGIN)
    options = DemoOptions(repo, None if location is None else Path(location), blob, consensus, limit)
    demos = {demo_tables.run: tables, demo_indexed.run: indexed, demo_spark.run: spark}
    chosen = [run for run, is_chosen in demos.items() if is_chosen] or [demo_history.run]
    if len(chosen) > 1:
        stop("--tables, --indexed and --spark are demos of their own: choose one", CANNOT_BEGIN)
    execute(chosen[0](options, results()))
