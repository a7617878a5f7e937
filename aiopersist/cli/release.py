"""`aiopersist release`: ends a critical since or a named hold without an owner."""

from enum import StrEnum
from typing import Annotated

import typer

from aiopersist.cli.command import Invocation, Problems, Yes
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import safe, shown_frontier
from aiopersist.maintenance.holds import end_hold
from aiopersist.maintenance.inspect import HoldView, ShardView


class HoldKind(StrEnum):
    """The kinds of holds with a name and without a position."""

    CRITICAL = "critical"
    NAMED = "named"


async def release(
    run: Invocation,
    shard: ShardName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A critical since or a named hold.")],
    kind: Annotated[HoldKind | None, typer.Option(help="Needed if both have the name.")] = None,
    yes: Yes = False,
) -> None:
    """End a critical since or a named hold: its owner loses the history that only this hold keeps."""
    async with run.writing() if yes else run.reading() as client:
        view = await client.admin.inspect(shard)
        hold = _chosen(view, shard, name, kind)
        if yes:  # only as shown: if an owner took it over meanwhile, it stays
            await end_hold(await client._shards.existing(shard), view, hold.kind, name)
    if run.as_json:
        run.document({"done": yes, "kind": hold.kind, "since": hold.since.elements})
        return
    what = f"{'is' if yes else 'would be'} released: it held history from"
    run.out.print(safe(name), what, shown_frontier(hold.since, view.clock), soft_wrap=True)
    if not yes:
        run.say("nothing was changed: add --yes to release it, if its owner will not come back")


def _chosen(view: ShardView, shard: str, name: str, kind: HoldKind | None) -> HoldView:
    holds = [hold for hold in view.holds if hold.kind in tuple(HoldKind)]
    matches = [hold for hold in holds if hold.id == name and kind in (None, hold.kind)]
    if len(matches) > 1:
        raise Problems(f"{shard!r} has a critical since and a named hold {name!r}: add --kind")
    if not matches:
        names = ", ".join(f"{hold.kind} {hold.id!r}" for hold in holds) or "none"
        hint = "; this is a subscription: aiopersist forget drops it" if name in view.subscriptions else ""
        raise Problems(f"{shard!r} has no critical since and no named hold {name!r}; it has {names}{hint}")
    return matches[0]
