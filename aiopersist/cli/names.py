"""The name of a shard as an argument, which the shell completes."""

import asyncio
from contextlib import suppress
from typing import Annotated

import typer

from aiopersist.base.settings import Settings
from aiopersist.cli.location import LocationOptions
from aiopersist.client.open import open_to_list

COMPLETE_S = 2.0  # a user waits with a finger on the key


def complete(context: typer.Context, incomplete: str) -> list[str]:
    """The names that begin so; none if the location cannot be read."""
    chosen = (context.params.get(name) for name in LocationOptions._fields)
    with suppress(Exception):  # a completion has nobody to tell
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
    typer.Argument(
        metavar="SHARD", help="The name of a shard or a table, or its id.", autocompletion=complete
    ),
]
AnyShard = Annotated[
    str | None,
    typer.Argument(metavar="SHARD", help="By default all of the location.", autocompletion=complete),
]
SomeShards = Annotated[
    list[str] | None,
    typer.Argument(metavar="SHARD", help="Names of shards and tables.", autocompletion=complete),
]
All = Annotated[bool, typer.Option("--all", help="All shards and tables of the location.")]
