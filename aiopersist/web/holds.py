"""Holds on the history and the old versions of a shard: their owners, and what ends them. Pure."""

from typing import NamedTuple

from aiopersist.maintenance.inspect import HoldView, Keeper, ShardView, signer
from aiopersist.state.model import Retention
from aiopersist.web.words import counted, duration_text, frontier_text, short_id

HOLDS_SHOWN = 100
NAMED = 3  # holds named in a sentence; the table lists all

ENDS = {
    "reader": "when its snapshots, feeds and listens are closed, or its process ends",
    "named": "when its owner moves or closes it, or its lease expires",
    "critical": "only by critical_since or aiopersist release",
    "subscription": "moves with acknowledgements; ends by aiopersist forget",
    "retention": "moves with time; aiopersist retain changes it",
}


class HoldLine(NamedTuple):
    """A hold, its owner, and what ends it."""

    hold: HoldView
    name: str
    owner: str
    """The client and the process, as `name/host:pid`; empty if unknown."""
    ends: str


def hold_lines(view: ShardView) -> list[HoldLine]:
    """The holds; those that keep since from moving come first."""
    lines = []
    for hold in view.holds[:HOLDS_SHOWN]:
        name = "" if hold.kind == "retention" else short_id(hold.id)
        lines.append(HoldLine(hold, name, hold.owner or "", ENDS[hold.kind]))
    return lines


def history_text(view: ShardView) -> str:
    """Which holds keep since from moving, and their owners; without any, how since moves."""
    since, keepers = frontier_text(view.since, view.clock), [hold for hold in view.holds if hold.pins]
    holders = [hold for hold in keepers if hold.kind != "retention"]
    if holders:
        named = [_named(hold) for hold in holders[:NAMED]]
        named += [counted(len(holders) - NAMED, "other hold")] if len(holders) > NAMED else []
        return f"Since stays at {since} because of {_and(named)}."
    if keepers:
        return f"No hold keeps since from moving. Retention has moved it to {since}."
    if view.retention is None:
        return "No hold keeps since from moving, and nothing moves it: without retention all history stays."
    return f"No hold keeps since from moving. It is at {since}; retention moves it."


def retention_text(policy: Retention | None) -> str:
    """The history that a retention policy keeps."""
    if policy is None:
        return "all history"
    if policy.times is not None:
        return f"the last {counted(policy.times, 'time')}"
    return f"the last {duration_text(policy.seconds or 0)}"


def keeper_text(keeper: Keeper | None, before: str = "") -> str:
    """Who keeps old versions and their blobs, after the text `before`; empty if nobody does."""
    if keeper is None:
        return ""
    owner = f"reader {short_id(keeper.reader)} of {signer(keeper.reader) or 'an unknown process'}"
    rest = round(keeper.lease_left_s)
    until = f"its lease ends in {duration_text(rest)} unless renewed" if rest >= 0 else "its lease is over"
    return f"{before}{owner} keeps the last {keeper.versions:,} with their blobs; {until}"


def _named(hold: HoldView) -> str:
    kind = {"critical": "the critical since", "named": "the hold"}.get(hold.kind, f"the {hold.kind}")
    return f"{kind} {short_id(hold.id)}" + (f" of {hold.owner}" if hold.owner else "")


def _and(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
