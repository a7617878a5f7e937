"""Texts about who holds history, for commands that would remove it."""

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
    "tag": "tag",
}


def holder_text(holder: Holder, view: ShardView) -> str:
    """What a holder keeps, and until when."""
    name = shown_id(holder.id) if holder.kind == "reader" else repr(holder.id)
    owner = f" of {holder.owner}" if holder.owner else ""
    kept = "old versions"
    if holder.since is not None:
        what = "the contents at" if holder.kind == "tag" else "history from"
        kept = f"{what} {shown_frontier(holder.since, view.clock)}"
    return f"{KINDS[holder.kind]} {name}{owner} keeps {kept} {_until(holder, view)}"


def _until(holder: Holder, view: ShardView) -> str:
    remaining = None if holder.until is None else shown_age(max(holder.until - view.now, 0))
    if holder.kind == "critical":
        return "until it is moved or released"
    if holder.kind == "subscription":
        expires = "" if remaining is None else f"; it expires in {remaining}"
        return f"until it acknowledges or is dropped{expires}"
    if holder.kind == "tag":
        return "until it is dropped" + ("" if remaining is None else f"; it expires in {remaining}")
    ends = "is released" if holder.kind == "named" else "is closed"
    return f"until it {ends}; if its process has ended, its lease ends in {remaining}"


def held_json(holders: Iterable[Holder], view: ShardView) -> list[dict[str, Any]]:
    """Holders as JSON, with their texts."""
    return [{**holder.model_dump(mode="json"), "text": holder_text(holder, view)} for holder in holders]


def held_lines(held: Iterable[dict[str, Any]]) -> str:
    """Lines after a result; empty without holders."""
    return "".join(f"\n  {holder['text']}" for holder in held)
