"""`aiopersist release`: ends a critical since, or a named hold, whose owner is gone."""

from enum import StrEnum
from typing import Annotated

import typer

from aiopersist.cli.command import Invocation, Problems, Yes
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import safe, shown_frontier
from aiopersist.maintenance.holds import end_hold
from aiopersist.maintenance.inspect import HoldView, ShardView


class HoldKind(StrEnum):
    """The holds that have a name and no position."""

    CRITICAL = "critical"
    NAMED = "named"


async def release(
    run: Invocation,
    shard: ShardName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a critical since, or of a named hold.")],
    kind: Annotated[HoldKind | None, typer.Option(help="Where both have the name.")] = None,
    yes: Yes = False,
) -> None:
    """End a critical since, or a named hold: what it alone keeps is lost to its owner."""
    async with run.writing() if yes else run.reading() as client:
        view = await client.admin.inspect(shard)
        hold = _chosen(view, shard, name, kind)
        if yes:  # as it was seen: an owner that has taken it over meanwhile keeps it
            await end_hold(await client._shards.existing(shard), view, hold.kind, name)
    if run.as_json:
        run.document({"done": yes, "kind": hold.kind, "since": hold.since.elements})
        return
    what = f"{'is' if yes else 'would be'} released: it held history from"
    run.out.print(safe(name), what, shown_frontier(hold.since, view.clock), soft_wrap=True)
    if not yes:
        run.say("nothing was changed: say --yes to release it, once its owner is gone for good")


def _chosen(view: ShardView, shard: str, name: str, kind: HoldKind | None) -> HoldView:
    ours = [hold for hold in view.holds if hold.kind in tuple(HoldKind)]
    found = [hold for hold in ours if hold.id == name and kind in (None, hold.kind)]
    if len(found) > 1:
        raise Problems(f"{shard!r} has a critical since and a named hold {name!r}: say --kind")
    if not found:
        there = ", ".join(f"{hold.kind} {hold.id!r}" for hold in ours) or "none"
        hint = "; it is a subscription: aiopersist forget drops it" if name in view.subscriptions else ""
        raise Problems(f"{shard!r} has no critical since and no named hold {name!r}; it has {there}{hint}")
    return found[0]
