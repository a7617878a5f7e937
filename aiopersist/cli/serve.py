"""`aiopersist serve`: the inspector of a location."""

from typing import Annotated

import typer

from aiopersist.base.errors import to_install
from aiopersist.cli.command import CannotBegin, Invocation


async def serve(
    run: Invocation,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback, visitors need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8321,
    write: Annotated[
        bool,
        typer.Option("--write", help="Also offer compaction, garbage collection, fsck, retention and tags."),
    ] = False,
) -> None:
    """Serve web pages that show the location, until a signal."""
    try:
        from aiopersist.web.serve import serve as serve_pages
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        raise CannotBegin(f"{name} is not installed: {to_install('web')}") from error

    def tell(address: str) -> None:
        run.tell_one({"address": address}, address)

    async with run.writing() if write else run.reading() as client:
        try:
            await serve_pages(client, host, port, write=write, tell=tell)
        except OSError as error:
            raise CannotBegin(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
