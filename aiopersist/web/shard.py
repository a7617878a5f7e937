"""The page of a shard: its picture, the chosen batches, its versions, holds, readers and writers."""

from typing import Any, NamedTuple

from starlette.datastructures import QueryParams

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain
from aiopersist.client.client import Client
from aiopersist.maintenance.inspect import BatchView, ShardView, growth, inspect, keeper, signer
from aiopersist.shard.log import consensus_key, decoded
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.diff import MAPS, Diff
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.record import HollowPart
from aiopersist.web.holds import history_text, hold_lines, keeper_text, retention_text
from aiopersist.web.picture import Picture, picture

VERSIONS_SHOWN = 16
BATCHES_SHOWN = 100
PARTS_SHOWN = 50
OWNERS_SHOWN = 100
TAGS_SHOWN = 100


class ShardQuery(NamedTuple):
    """The shard, and the times and batches that its page shows."""

    name: str
    window: tuple[int, int] | None
    """The times in the picture; `None`: all."""
    batches: tuple[int, int] | None
    """The first and the last ordinal of the batches to list."""

    @classmethod
    def of(cls, params: QueryParams) -> "ShardQuery":
        """From the address; `InvalidUsage` names the wrong value."""
        return cls(params.get("name", ""), _pair(params, "window"), _pair(params, "batches"))


def _pair(params: QueryParams, name: str) -> tuple[int, int] | None:
    """Two ints with a hyphen between them."""
    text = params.get(name)
    if text is None:
        return None
    first, _, last = text.partition("-")
    are_numbers = all(part.isascii() and part.isdigit() and len(part) < 20 for part in (first, last))
    if not are_numbers or int(last) < int(first):
        raise InvalidUsage(UsageKind.INVALID_BOUNDS, f"{name}={shown(text)}: two numbers, as in 3-7")
    return int(first), int(last)


class VersionLine(NamedTuple):
    """A version of the shard, and its changes."""

    seqno: int
    at: float
    changes: str


class Versions(NamedTuple):
    """The newest versions, newest first, and their rate."""

    lines: tuple[VersionLine, ...]
    per_s: float
    span_s: float


class LeaseLine(NamedTuple):
    """A reader or writer, and the rest of its lease."""

    kind: str
    id: str
    name: str
    owner: str | None
    """The client and the process, as `name/host:pid`, if known."""
    held: Antichain | None
    keeps: int | None
    """The number of versions since the oldest one that it may read; `None`: it keeps none."""
    rest_s: float
    lease_s: float


class PartLine(NamedTuple):
    """A part of a batch."""

    where: str
    rows: int
    size: int
    statistics: tuple[tuple[str, str, str, int], ...]
    """Column, least, greatest, nulls."""


class Chosen(NamedTuple):
    """The requested batches; of a single one, its parts, too."""

    first: int
    last: int
    batches: tuple[BatchView, ...]
    more: int
    """The number of batches beyond those shown."""
    parts: tuple[PartLine, ...]
    parts_more: int


async def shard_page(client: Client, shard: Shard, query: ShardQuery) -> dict[str, Any]:
    """The values of the template. Five requests."""
    with client._shards.calls.call():
        view = await inspect(shard)
        state, stack = shard.state, shard.stack
        now = await shard.register.now()
        drawn: Picture = await stack.compute(picture, view, query.window)
        return {
            "name": query.name,
            "query": query,
            "view": view,
            "picture": drawn,
            "chosen": None if query.batches is None else chosen(view, state, *query.batches),
            "versions": await versions(stack, shard.id, view, now),
            "leases": leases(state, now)[:OWNERS_SHOWN],
            "leases_count": len(state.readers) + len(state.writers),
            "holds": hold_lines(view),
            "history": history_text(view),
            "tags_shown": TAGS_SHOWN,
            "retention": retention_text(view.retention),
            "kept": keeper_text(keeper(view)),
            "growth": growth(view),
            "now": now,
            "rows": sum(batch.len for batch in view.batches),
        }


def chosen(view: ShardView, state: State, first: int, last: int) -> Chosen:
    """The batches with ordinals from `first` to `last`."""
    batches = [batch for batch in view.batches if first <= batch.ordinal <= last]
    parts: list[HollowPart] = []
    if len(batches) == 1:
        batch: HollowBatch | None = state.batches.get(batches[0].ordinal)
        parts = [] if batch is None else list(batch.parts)
    return Chosen(
        first=first,
        last=last,
        batches=tuple(batches[:BATCHES_SHOWN]),
        more=max(len(batches) - BATCHES_SHOWN, 0),
        parts=tuple(map(_part_line, parts[:PARTS_SHOWN])),
        parts_more=max(len(parts) - PARTS_SHOWN, 0),
    )


def _part_line(part: HollowPart) -> PartLine:
    stats = part.stats or {}
    lines = tuple((name, _bound(s["min"]), _bound(s["max"]), s["nulls"]) for name, s in stats.items())
    return PartLine(part.key or "inline in the state", part.rows, part.size, lines)


def _bound(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else str(value)


async def versions(stack: Stack, shard: str, view: ShardView, now: float) -> Versions:
    """The newest versions that the consensus store has. One request."""
    first = max(view.earliest_seqno, view.seqno + 1 - VERSIONS_SHOWN)
    newest = await stack.consensus.scan(consensus_key(shard), first, VERSIONS_SHOWN)
    diffs = await stack.compute(decoded, newest, shard)
    lines = tuple(VersionLine(diff.seqno, diff.at, changes_text(diff)) for diff in reversed(diffs))
    span_s = max(now - diffs[0].at, 1e-3) if diffs else 0.0
    return Versions(lines, len(lines) / span_s if lines else 0.0, span_s)


def changes_text(diff: Diff) -> str:
    """The changes of a version, as words: names of what it sets, with a minus sign what it drops."""
    changes = diff.changes
    words = ["finalized"] if changes.finalized else []
    words += [name for name in ("since", "upper") if getattr(changes, name) is not None]
    sets = {name: len(getattr(changes, name)) for name in MAPS}
    drops = {f"-{name}": len(keys) for name, keys in changes.drop.items()}
    for name, count in (sets | drops).items():
        if count:
            words.append(name if count == 1 else f"{name} ({count})")
    if changes.streams is not None:
        words.append("streams")
    return ", ".join(words)


def leases(state: State, now: float) -> list[LeaseLine]:
    """Readers and writers, sorted by the rest of their leases."""
    readers = [
        LeaseLine(
            "named hold" if r.name else "reader",
            reader,
            r.name or "",
            signer(r.owner if r.name else reader),
            r.since if r.since.elements else None,
            None if r.seqno_hold is None else max(state.seqno - r.seqno_hold, 0),
            r.heartbeat + r.lease_s - now,
            r.lease_s,
        )
        for reader, r in state.readers.items()
    ]
    writers = [
        LeaseLine("writer", key, "", signer(key), None, None, w.heartbeat + w.lease_s - now, w.lease_s)
        for key, w in state.writers.items()
    ]
    return sorted([*readers, *writers], key=lambda line: line.rest_s)
