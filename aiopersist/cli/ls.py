"""`aiopersist ls`: the shards of a location, one per line."""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.measure import Measurement

from aiopersist.base.runtime import SYSTEM
from aiopersist.cli.command import Invocation, Problems
from aiopersist.cli.names import complete
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import NOTHING, plain_table, record, safe, short_frontier, shown_age, shown_bytes
from aiopersist.maintenance.overview import ShardSummary
from aiopersist.web.words import growth_text


class SortBy(StrEnum):
    """The order of the lines: names ascending, other columns greatest first."""

    NAME = "name"
    BYTES = "bytes"
    BATCHES = "batches"
    UPDATES = "updates"
    GROWTH = "growth"
    WRITTEN = "written"
    LAG = "lag"
    HOLDS = "holds"


ORDERS: dict[SortBy, Callable[[ShardSummary], Any]] = {
    SortBy.BYTES: lambda s: -s.bytes,
    SortBy.BATCHES: lambda s: -s.batches,
    SortBy.UPDATES: lambda s: -s.updates,
    SortBy.GROWTH: lambda s: -(s.bytes_per_s or 0),
    SortBy.WRITTEN: lambda s: -(s.written_at or 0),
    SortBy.LAG: lambda s: -(s.lag_updates or 0),
    SortBy.HOLDS: lambda s: -s.holds,
}
SHORT = ("name", "kind", "since", "upper", "batches", "bytes", "written")
LONG = (*SHORT, "updates", "growth", "parts", "holds", "tags", "subs", "lag", "seqno", "id")
NUMBERS = ("batches", "bytes", "updates", "growth", "parts", "holds", "tags", "subs", "lag", "seqno")


async def ls(
    run: Invocation,
    prefix: Annotated[
        str, typer.Argument(help="Only names that begin with this.", autocompletion=complete)
    ] = "",
    sort: Annotated[
        SortBy, typer.Option(help="Names sort ascending, the rest greatest first.")
    ] = SortBy.NAME,
    long: Annotated[bool, typer.Option("--long", "-l", help="Show all columns.")] = False,
) -> None:
    """List shards, tables and Indexed with frontiers and sizes."""
    async with run.reading(to_list=True) as client:
        summaries = await drawn(run.err, client.admin.overview(prefix))
    if sort in ORDERS:
        summaries.sort(key=ORDERS[sort])
    if run.as_json:
        run.document([summary.model_dump(mode="json") for summary in summaries])
    elif summaries:
        columns = LONG if long else tuple(dict.fromkeys((*SHORT, sort)))
        table = plain_table(*(name.upper() for name in columns), right=tuple(n.upper() for n in NUMBERS))
        lines = [_cells(summary, SYSTEM.wall()) for summary in summaries]
        for cells in lines:
            table.add_row(*(cells[name] for name in columns))
        if not long or Measurement.get(run.out, run.out.options, table).maximum < run.out.width:
            run.out.print(table)
        else:
            for cells in lines:
                run.out.print(record({name: cells[name] for name in columns}), "")
    if damaged := [summary for summary in summaries if summary.problem]:
        raise Problems("; ".join(f"{s.name!r} cannot be read: {s.problem}" for s in damaged))


def _cells(summary: ShardSummary, now: float) -> dict[str, Any]:
    kind = f"indexed({summary.streams})" if summary.streams is not None else summary.kind
    return {
        "name": safe(summary.name),
        "kind": f"{kind}, finalized" if summary.finalized else kind,
        "since": short_frontier(summary.since, summary.clock),
        "upper": short_frontier(summary.upper, summary.clock),
        "batches": f"{summary.batches:,}",
        "bytes": shown_bytes(summary.bytes),
        "written": NOTHING if summary.written_at is None else f"{shown_age(now - summary.written_at)} ago",
        "updates": f"{summary.updates:,}",
        "growth": NOTHING if summary.bytes_per_s is None else growth_text(summary.bytes_per_s),
        "parts": f"{summary.parts:,}",
        "holds": str(summary.holds),
        "tags": str(summary.tags),
        "subs": str(summary.subscriptions),
        "lag": NOTHING if summary.lag_updates is None else _at_most(summary.lag_updates),
        "seqno": NOTHING if summary.seqno is None else str(summary.seqno),
        "id": summary.shard_id,
    }


def _at_most(count: int) -> str:
    """A count from the descriptions of batches: a position may lie within a batch."""
    return f"<= {count:,}" if count else "0"
