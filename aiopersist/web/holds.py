"""What keeps the history of a shard, and its old versions: whose it is, and what ends it. Pure."""

from typing import NamedTuple

from aiopersist.maintenance.inspect import HoldView, ShardView, keeper, signature
from aiopersist.state.model import Retention
from aiopersist.web.words import counted, duration_text, frontier_text, short_id

HOLDS_SHOWN = 100
NAMED = 3  # holds that a sentence names: the table has all

ENDS = {
    "reader": "with its snapshots, feeds and listens, or with its process",
    "named": "when its owner moves or closes it, or its lease runs out",
    "critical": "never by itself: critical_since and release end it",
    "subscription": "as it acknowledges, or by aiopersist forget",
    "retention": "never: it moves with time, as aiopersist retain says",
}


class HoldLine(NamedTuple):
    """A hold, whose it is, and what ends it."""

    hold: HoldView
    name: str
    owner: str
    """The client and the process that have it; empty if none does, or none is known."""
    ends: str


def hold_lines(view: ShardView) -> list[HoldLine]:
    """Those that keep since back first."""
    lines = []
    for hold in view.holds[:HOLDS_SHOWN]:
        name = "" if hold.kind == "retention" else short_id(hold.id)
        lines.append(HoldLine(hold, name, hold.owner or "", ENDS[hold.kind]))
    return lines


def history_text(view: ShardView) -> str:
    """Which holds keep since where it is, and who owns them; what maintenance keeps."""
    since, pins = frontier_text(view.since, view.clock), [hold for hold in view.holds if hold.pins]
    holders = [hold for hold in pins if hold.kind != "retention"]
    if holders:
        named = [_named(hold) for hold in holders[:NAMED]]
        named += [counted(len(holders) - NAMED, "other hold")] if len(holders) > NAMED else []
        return f"Since stays at {since} as long as it is held there, by {_and(named)}."
    if pins:
        return f"No hold keeps since back. It is at {since}, where retention has it."
    if view.retention is None:
        return "No hold keeps since back, and nothing moves it: without a retention all history stays."
    return f"No hold keeps since back. It is at {since}; maintenance moves it as retention says."


def retention_text(policy: Retention | None) -> str:
    """What a policy keeps."""
    if policy is None:
        return "all history"
    return duration_text(policy.seconds) if policy.seconds is not None else counted(policy.times or 0, "time")


def versions_text(view: ShardView) -> str:
    """Who keeps old versions and the blobs of replaced parts; empty if nobody does."""
    found = keeper(view)
    if found is None:
        return ""
    whose = f"Reader {short_id(found.reader)} of {signature(found.reader) or 'an unknown process'}"
    left = found.lease_left_s
    until = f"its lease ends in {duration_text(left)} unless renewed" if left >= 0 else "its lease is over"
    return f"{whose} keeps the last {found.versions:,}, and the parts that were replaced since; {until}."


def _named(hold: HoldView) -> str:
    kind = {"critical": "the critical since", "named": "the hold"}.get(hold.kind, f"the {hold.kind}")
    return f"{kind} {short_id(hold.id)}" + (f" of {hold.owner}" if hold.owner else "")


def _and(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
