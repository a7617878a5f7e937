"""`aiopersist show`: one shard in detail."""

from collections.abc import Iterator
from math import log10
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aiopersist.cli.command import Invocation
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import (
    NOTHING,
    counted,
    plain_table,
    record,
    safe,
    shown_age,
    shown_bytes,
    shown_frontier,
    shown_id,
    shown_moment,
)
from aiopersist.cli.tags import tag_cells, tag_table
from aiopersist.client.client import Client
from aiopersist.maintenance.inspect import (
    BatchView,
    HoldView,
    ShardView,
    growth,
    keeper,
    signer,
)
from aiopersist.web.holds import keeper_text, retention_text

SPINE_LINES_MAX = 40
BAR_WIDTH = 12  # characters of the bar of 10 ** 9 updates


async def show(run: Invocation, shard: ShardName) -> None:
    """Show a shard: frontiers, schema, batches, holds, writers, subscriptions."""
    async with run.reading() as client:
        view = await client.admin.inspect(shard)
        schema = await _schema(client, view)
    if run.as_json:
        run.document({"name": shard, "schema": schema, **view.model_dump(mode="json")})
        return
    for title, lines in _sections(shard, schema, view):
        run.out.print()
        run.out.print(Text(title, style="bold"))
        run.out.print(lines)


async def _schema(client: Client, view: ShardView) -> dict[str, str]:
    """The newest schema, in Arrow types; empty for an `Indexed`, whose streams have schemas."""
    if view.streams is not None:
        return {}
    number, schema = await client.schema(view.shard_id)
    key, val = (str(schema.contents_schema.field(name).type) for name in ("key", "val"))
    return {"id": str(number), "key": key, "val": val}


def _sections(name: str, schema: dict[str, str], view: ShardView) -> Iterator[tuple[str, RenderableType]]:
    kind = "indexed" if view.streams is not None else "table" if view.table else "shard"
    yield f"{kind} {safe(name).plain}", _facts(schema, view)
    if view.streams is not None:
        yield counted(len(view.streams), "stream"), _streams(view)
    else:
        yield f"{counted(len(view.batches), 'batch')}, the oldest first", _spine(view)
    if view.holds:
        yield f"{counted(len(view.holds), 'hold')}, those that keep since from moving first", _holds(view)
    if view.subscriptions:
        yield counted(len(view.subscriptions), "subscription"), _subscriptions(view)
    if view.tags:
        yield counted(len(view.tags), "tag"), _tags(view)
    if view.writers or view.readers:
        yield f"{counted(len(view.writers), 'writer')}, {counted(len(view.readers), 'reader')}", _leases(view)


def _facts(schema: dict[str, str], view: ShardView) -> RenderableType:
    facts = {
        "id": view.shard_id,
        "since": shown_frontier(view.since, view.clock),
        "upper": shown_frontier(view.upper, view.clock),
        "clock": str(view.clock),
        "key": schema.get("key"),
        "val": schema.get("val"),
        "retention": retention_text(view.retention),
        "bytes": f"{shown_bytes(view.blob_bytes)} in blobs, {shown_bytes(view.inline_bytes)} in the state",
        "growth": _growth(view),
        "versions": f"{view.live_diffs:,} held, the newest {view.seqno:,}{keeper_text(keeper(view), '; ')}",
        "written": f"{shown_moment(view.written_at)}, {shown_age(view.now - view.written_at)} ago",
    }
    if view.streams is not None:
        for name in ("since", "upper", "retention"):
            del facts[name]
    return record({name: fact for name, fact in facts.items() if fact is not None})


def _growth(view: ShardView) -> str | None:
    rates = growth(view)
    if rates is None:
        return None
    per_s = f"{rates.updates_per_s:,.1f} updates, {shown_bytes(round(rates.bytes_per_s))} a second"
    return f"{per_s}, over the last {shown_age(rates.span_s)}"


def _spine(view: ShardView) -> RenderableType:
    """A line for each batch. A batch begins where the one before ends. The bar is the logarithm of its
    updates. Of many batches the middle ones are left out."""
    levels = {
        ordinal: (number, len(level.batches) > 1)
        for number, level in view.levels.items()
        for batch in level.batches
        for ordinal in range(batch.first, batch.last + 1)
    }
    claimed = {n for claim in view.claims.values() for n in range(claim.first, claim.last + 1)}
    table = plain_table(
        "  LEVEL", "UP TO", "UPDATES", "", "PARTS", "BYTES", "",
        right=("UPDATES", "PARTS", "BYTES"), whole=("UP TO",),
    )  # fmt: skip
    for batch in _shortened(view.batches):
        if batch is None:
            table.add_row("  ...", f"{len(view.batches) - SPINE_LINES_MAX:,} more")
            continue
        level, merges = levels.get(batch.ordinal, (0, False))
        note = "merging" if batch.ordinal in claimed else "due" if merges else ""
        table.add_row(
            f"  {level}",
            shown_frontier(batch.upper, view.clock),
            f"{batch.len:,}",
            "█" * round(BAR_WIDTH * log10(1 + batch.len) / 9),
            f"{batch.parts:,}",
            shown_bytes(batch.blob_bytes + batch.inline_bytes),
            note,
        )
    return table


def _shortened(batches: list[BatchView]) -> list[BatchView | None]:
    if len(batches) <= SPINE_LINES_MAX:
        return [*batches]
    half = SPINE_LINES_MAX // 2
    return [*batches[:half], None, *batches[-half:]]


def _streams(view: ShardView) -> RenderableType:
    table = plain_table(
        "  NAME", "SINCE", "SEAL", "UNSEALED", "TRACE", "UPDATES", "BYTES",
        right=("SINCE", "SEAL", "UNSEALED", "TRACE", "UPDATES", "BYTES"),
    )  # fmt: skip
    for name, stream in (view.streams or {}).items():
        table.add_row(
            Text("  ") + safe(name),
            str(stream.since),
            str(stream.seal),
            counted(stream.unsealed_batches, "batch"),
            counted(stream.trace_batches, "batch"),
            f"{stream.updates:,}",
            shown_bytes(stream.bytes),
        )
    return table


def _holds(view: ShardView) -> RenderableType:
    table = plain_table("  KIND", "NAME", "OWNER", "FROM", "BEHIND", "")
    for hold in view.holds:
        table.add_row(
            f"  {hold.kind}",
            safe(shown_id(hold.id)),
            safe(hold.owner or NOTHING),
            shown_frontier(hold.since, view.clock),
            _span(None if hold.since.time == 0 else hold.behind, view),
            _note(hold),
        )
    return table


def _note(hold: HoldView) -> str:
    until = "until it is released" if hold.kind == "critical" else ""
    return ", ".join(filter(None, ("keeps since from moving" if hold.pins else "", until)))


def _subscriptions(view: ShardView) -> RenderableType:
    table = subscription_table()
    for name, row in view.subscriptions.items():
        table.add_row(*subscription_cells(name, row, view))
    return table


def subscription_table(*before: str) -> Table:
    """A table of subscriptions, with `before` as its first columns."""
    columns = (*before, "  NAME", "AT", "BEHIND", "UPDATES AT MOST", "KEEPS", "LAST ACK", "OWNER")
    return plain_table(*columns, right=("UPDATES AT MOST", "KEEPS"))


def subscription_cells(name: str, row: Any, view: ShardView) -> list[Any]:
    """A subscription as cells of that table."""
    if row.expired:
        state = "expired: it lost its position"
    else:
        state = "nobody has it" if row.owner is None else signer(row.owner) or row.owner
    return [
        Text("  ") + safe(name),
        "in its first contents" if row.contents else shown_frontier(row.position, view.clock),
        _span(row.lag, view),
        f"{row.lag_updates:,}",
        shown_bytes(row.held_bytes),
        "never" if row.last_ack is None else f"{shown_age(view.now - row.last_ack)} ago",
        safe(state),
    ]


def _tags(view: ShardView) -> RenderableType:
    table = tag_table()
    for name, row in view.tags.items():
        table.add_row(*tag_cells(name, row, view))
    return table


def _leases(view: ShardView) -> RenderableType:
    """Writers, then readers; readers that keep the oldest versions come first."""
    table = plain_table("  KIND", "ID", "OWNER", "RENEWED", "LEASE ENDS", "VERSIONS", "", right=("VERSIONS",))
    writers: list[tuple[str, str, Any, int | None]] = [
        ("writer", n, w, None) for n, w in view.writers.items()
    ]
    readers = [("reader", name, r, r.seqno_hold) for name, r in view.readers.items()]
    readers.sort(key=lambda row: view.seqno if row[3] is None else row[3])
    for kind, name, lease, seqno in (*writers, *readers):
        remaining_s = lease.heartbeat + lease.lease_s - view.now
        table.add_row(
            f"  {kind}",
            safe(shown_id(name)),
            safe(signer(name) or NOTHING),
            f"{shown_age(view.now - lease.heartbeat)} ago",
            f"in {shown_age(remaining_s)}" if remaining_s >= 0 else f"{shown_age(-remaining_s)} ago",
            NOTHING if seqno is None else f"{view.seqno - seqno:,}",
            "" if remaining_s >= 0 else "overdue: the next commit drops it",
        )
    return table


def _span(times: int | None, view: ShardView) -> str:
    if times is None:
        return NOTHING
    return shown_age(times / 1_000_000) if view.clock == "wall" else f"{times:,} times"
