"""Who holds history, in words: for commands that would forget it."""

from collections.abc import Iterable
from typing import Any

from aiopersist.cli.shown import shown_age, shown_frontier, shown_id
from aiopersist.maintenance.holds import Holder
from aiopersist.maintenance.inspect import ShardView

KINDS = {
    "reader": "reader",
    "named": "named hold",
    "critical": "critical since",
    "subscription": "subscription",
}


def holder_text(holder: Holder, view: ShardView) -> str:
    """One of them: what it keeps, and until when."""
    name = shown_id(holder.id) if holder.kind == "reader" else repr(holder.id)
    whose = f" of {holder.owner}" if holder.owner else ""
    kept = "old versions"
    if holder.since is not None:
        kept = f"history from {shown_frontier(holder.since, view.clock)}"
    return f"{KINDS[holder.kind]} {name}{whose} keeps {kept} {_until(holder, view)}"


def _until(holder: Holder, view: ShardView) -> str:
    left = None if holder.until is None else shown_age(max(holder.until - view.now, 0))
    if holder.kind == "critical":
        return "until it is moved, or released"
    if holder.kind == "subscription":
        expires = "" if left is None else f"; it expires in {left}"
        return f"until it acknowledges, or is forgotten{expires}"
    ends = "is released" if holder.kind == "named" else "lets go"
    return f"until it {ends}; its lease ends in {left} if its process is gone"


def held_json(holders: Iterable[Holder], view: ShardView) -> list[dict[str, Any]]:
    """Them as JSON, with their texts."""
    return [{**holder.model_dump(mode="json"), "text": holder_text(holder, view)} for holder in holders]


def held_lines(held: Iterable[dict[str, Any]]) -> str:
    """Lines that follow a result; nothing where nobody holds."""
    return "".join(f"\n  {holder['text']}" for holder in held)
