"""Arguments that name shards, with completion by the shell."""

import asyncio
from contextlib import suppress
from typing import Annotated

import typer

from aiopersist.base.settings import Settings
from aiopersist.cli.location import LocationOptions
from aiopersist.client.open import open_to_list

COMPLETE_S = 2.0  # the user is waiting


def complete(context: typer.Context, incomplete: str) -> list[str]:
    """The names that begin with a text; none if the location cannot be read."""
    chosen = (context.params.get(name) for name in LocationOptions._fields)
    with suppress(Exception):  # a completion cannot report errors
        return asyncio.run(_names(LocationOptions(*chosen), incomplete))
    return []


async def _names(location: LocationOptions, prefix: str) -> list[str]:
    where, blob, consensus = location
    async with asyncio.timeout(COMPLETE_S):
        settings = Settings(open_timeout_s=COMPLETE_S)
        async with open_to_list(where, blob, consensus, settings) as client:
            names = await client.list_shards()
            return [name for name in names if name.startswith(prefix) and name.isprintable()]


ShardName = Annotated[
    str,
    typer.Argument(metavar="SHARD", help="The name or id of a shard or table.", autocompletion=complete),
]
AnyShard = Annotated[
    str | None,
    typer.Argument(metavar="SHARD", help="By default all in the location.", autocompletion=complete),
]
SomeShards = Annotated[
    list[str] | None,
    typer.Argument(metavar="SHARD", help="Names of shards and tables.", autocompletion=complete),
]
All = Annotated[bool, typer.Option("--all", help="All shards and tables in the location.")]
