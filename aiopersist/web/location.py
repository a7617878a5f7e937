"""The page of a location: its shards, searched, sorted and paged. Pure, except `location_page`."""

import re
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Literal, NamedTuple

from starlette.datastructures import QueryParams

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.client.client import Client
from aiopersist.maintenance.inspect import GROWTH_S
from aiopersist.maintenance.overview import ShardSummary
from aiopersist.measure.view import MetricsView, RequestsView
from aiopersist.shard.catalog import ShardId
from aiopersist.state.model import Clock
from aiopersist.web.census import Census, Speed
from aiopersist.web.commits import commit_lines

PAGE_ROWS = 50

Sort = Literal["name", "bytes", "updates", "batches", "growth", "written", "rate", "lag"]
SORTS: dict[Sort, str] = {
    "name": "Name",
    "batches": "Batches",
    "updates": "Updates",
    "bytes": "Bytes",
    "growth": "Growth",
    "rate": "Commits",
    "lag": "Lag",
    "written": "Last write",
}


class ListQuery(NamedTuple):
    """The search, the order and the page number in the address."""

    search: str = ""
    sort: Sort = "name"
    page: int = 1

    @classmethod
    def of(cls, params: QueryParams) -> "ListQuery":
        """From the address; `InvalidUsage` names the wrong value."""
        sort, page = params.get("sort", "name"), params.get("page", "1")
        if sort not in SORTS:
            raise InvalidUsage(UsageKind.INVALID_COLUMN, f"sort={shown(sort)}: one of {', '.join(SORTS)}")
        if not re.fullmatch("[1-9][0-9]{0,8}", page):
            raise InvalidUsage(UsageKind.INVALID_COLUMN, f"page={shown(page)}: a number from 1 on")
        return cls(params.get("q", ""), sort, int(page))


class ListedShard(NamedTuple):
    """A shard in the list; `summary` is `None` until it is read."""

    name: str
    shard: ShardId
    summary: ShardSummary | None
    rate: Speed | None
    growth: float | None
    """Bytes in a second; `None` before there are enough data."""


class Listed(NamedTuple):
    """A page of the list."""

    lines: tuple[ListedShard, ...]
    page: int
    pages: int


SpeedOf = Callable[[str], Speed | None]


def listed(
    names: list[tuple[str, ShardId]],
    summaries: Mapping[str, ShardSummary],
    rate: SpeedOf,
    query: ListQuery,
    now: float,
) -> Listed:
    """The requested page, or the last one. Unless sorted by name, shards not read yet come last."""
    search = query.search.casefold()
    matches = [pair for pair in names if search in pair[0].casefold() or query.search == pair[1]]
    if query.sort != "name":
        figure = _figures(query.sort, summaries, rate, now)
        matches.sort(key=lambda pair: -figure(pair[1]))
    pages = max(-(-len(matches) // PAGE_ROWS), 1)
    page = min(query.page, pages)
    lines: list[ListedShard] = []
    for name, shard in matches[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]:
        summary, speed = summaries.get(shard), rate(shard)
        grown = None if summary is None else growth(summary, speed, now)
        lines.append(ListedShard(name, shard, summary, speed, grown))
    return Listed(tuple(lines), page, pages)


def growth(summary: ShardSummary, speed: Speed | None, now: float) -> float | None:
    """Bytes in a second: on a wall clock from the newest batches, on other clocks from the census."""
    if summary.written_at is not None and now - summary.written_at > GROWTH_S:
        return 0.0
    if summary.clock is Clock.WALL:
        return summary.bytes_per_s
    return None if speed is None else speed.bytes


def _figures(
    sort: Sort, summaries: Mapping[str, ShardSummary], rate: SpeedOf, now: float
) -> Callable[[str], float]:
    """The figure that a shard is sorted by, the greatest first; minus infinity if it has none."""
    chosen: dict[str, Callable[[ShardSummary], float | None]] = {
        "bytes": lambda s: s.bytes,
        "updates": lambda s: s.updates,
        "batches": lambda s: s.batches,
        "written": lambda s: s.written_at,
        "lag": lambda s: s.lag_updates,
        "rate": lambda s: speed.versions if (speed := rate(s.shard_id)) else None,
        "growth": lambda s: growth(s, rate(s.shard_id), now),
    }

    def figure(shard: str) -> float:
        summary = summaries.get(shard)
        value = None if summary is None else chosen[sort](summary)
        return -inf if value is None else value

    return figure


async def location_page(client: Client, census: Census, query: ListQuery) -> dict[str, Any]:
    """The values of the template. Names and summaries come from the census."""
    await census.look()
    now = await client._stack.consensus.now()
    page = listed(census.names, census.summaries, census.rate, query, now)
    if any(line.summary is None for line in page.lines):
        await census.read([line.shard for line in page.lines])
        page = listed(census.names, census.summaries, census.rate, query, now)
    metrics = client.metrics()
    return {
        "query": query,
        "sorts": SORTS,
        "listed": page,
        "totals": census.totals,
        "shards": len(census.names),
        "read": len(census.summaries),
        "named": census.named,
        "problem": census.problem,
        "metrics": metrics,
        "stores": stores(metrics),
        "commits": commit_lines(metrics),
        "now": now,
    }


class StoreRequests(NamedTuple):
    """The requests of one kind to a store."""

    store: str
    request: str
    done: RequestsView

    @property
    def seconds(self) -> tuple[float, float, float]:
        """The mean, the median and the 99th percentile."""
        duration = self.done.duration
        return duration.mean_s, duration.quantile_s(0.5), duration.quantile_s(0.99)


def stores(metrics: MetricsView) -> list[StoreRequests]:
    """The requests of this client by store; those with the most time in all come first."""
    named = ((op.partition("."), done) for op, done in metrics.requests.items() if done.count)
    requests = [StoreRequests(store, request, done) for (store, _, request), done in named]
    return sorted(requests, key=lambda each: (each.store, -each.done.duration.seconds))
