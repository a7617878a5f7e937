"""`aiopersist release`: ends a critical since, which nothing else ends once its owner is gone."""

from typing import Annotated

import typer

from aiopersist.cli.command import Invocation, Problems, Yes
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import safe, shown_frontier


async def release(
    run: Invocation,
    shard: ShardName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The id of the critical since.")],
    yes: Yes = False,
) -> None:
    """End a critical since: what it alone keeps is lost to its owner."""
    async with run.writing() if yes else run.reading() as client:
        view = await client.inspect(shard)
        if name not in view.critical:
            there = ", ".join(map(repr, view.critical)) or "none"
            raise Problems(f"{shard!r} has no critical since {name!r}; it has {there}")
        since, opaque = view.critical[name].since, view.critical[name].opaque
        if yes:  # with the opaque that was seen: an owner that has taken it over meanwhile keeps it
            async with client.critical_since(shard, name, opaque) as held:
                await held.release(opaque)
    if run.as_json:
        run.document({"done": yes, "since": since.elements})
        return
    what = f"{'is' if yes else 'would be'} released: it held history from"
    run.out.print(safe(name), what, shown_frontier(since, view.clock), soft_wrap=True)
    if not yes:
        run.say("nothing was changed: say --yes to release it, once its owner is gone for good")
