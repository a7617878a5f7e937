"""The page of a location: which of its shards are shown, in which order. Pure, but for the reading."""

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


class WantedList(NamedTuple):
    """What a page of a location shows."""

    search: str = ""
    sort: Sort = "name"
    page: int = 1

    @classmethod
    def of(cls, query: QueryParams) -> "WantedList":
        """From the address; `InvalidUsage` names the value at fault."""
        sort, page = query.get("sort", "name"), query.get("page", "1")
        if sort not in SORTS:
            raise InvalidUsage(UsageKind.INVALID_COLUMN, f"sort={shown(sort)}: one of {', '.join(SORTS)}")
        if not re.fullmatch("[1-9][0-9]{0,8}", page):
            raise InvalidUsage(UsageKind.INVALID_COLUMN, f"page={shown(page)}: a number from 1 on")
        return cls(query.get("q", ""), sort, int(page))


class ListedShard(NamedTuple):
    """A shard in the list; `summary` is `None` until it was read."""

    name: str
    shard: ShardId
    summary: ShardSummary | None
    rate: Speed | None
    growth: float | None
    """Bytes in a second; `None` if it was not watched for long enough."""


class Listed(NamedTuple):
    """A page of the list."""

    lines: tuple[ListedShard, ...]
    found: int
    """How many shards the search found."""
    page: int
    pages: int


SpeedOf = Callable[[str], Speed | None]


def listed(
    names: list[tuple[str, ShardId]],
    summaries: Mapping[str, ShardSummary],
    rate: SpeedOf,
    wanted: WantedList,
    now: float,
) -> Listed:
    """The page that is wanted, or the last one. Shards that were not read yet come last, unless by name."""
    search = wanted.search.casefold()
    found = [pair for pair in names if search in pair[0].casefold() or wanted.search == pair[1]]
    if wanted.sort != "name":
        figure = _figures(wanted.sort, summaries, rate, now)
        found.sort(key=lambda pair: -figure(pair[1]))
    pages = max(-(-len(found) // PAGE_ROWS), 1)
    page = min(wanted.page, pages)
    lines: list[ListedShard] = []
    for name, shard in found[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]:
        summary, speed = summaries.get(shard), rate(shard)
        grown = None if summary is None else growth(summary, speed, now)
        lines.append(ListedShard(name, shard, summary, speed, grown))
    return Listed(tuple(lines), len(found), page, pages)


def growth(summary: ShardSummary, speed: Speed | None, now: float) -> float | None:
    """Bytes in a second: on a wall clock by the newest batches, on other clocks as it was watched."""
    if summary.written_at is not None and now - summary.written_at > GROWTH_S:
        return 0.0
    if summary.clock is Clock.WALL:
        return summary.bytes_per_s
    return None if speed is None else speed.bytes


def _figures(
    sort: Sort, summaries: Mapping[str, ShardSummary], rate: SpeedOf, now: float
) -> Callable[[str], float]:
    """The figure of a shard by which it is sorted, the greatest first; the least if there is none."""
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


async def location_page(client: Client, census: Census, wanted: WantedList) -> dict[str, Any]:
    """What the template shows. The names come from the census, and so do the summaries, as far as they were
    read."""
    await census.look()
    now = await client._stack.consensus.now()
    page = listed(census.names, census.summaries, census.rate, wanted, now)
    if any(line.summary is None for line in page.lines):
        await census.read([line.shard for line in page.lines])
        page = listed(census.names, census.summaries, census.rate, wanted, now)
    metrics = client.metrics()
    return {
        "wanted": wanted,
        "sorts": SORTS,
        "listed": page,
        "totals": census.totals,
        "shards": len(census.names),
        "known": len(census.summaries),
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
        """The mean; what half of them took at most, and 99 of 100."""
        found = self.done.duration
        return found.mean_s, found.quantile_s(0.5), found.quantile_s(0.99)


def stores(metrics: MetricsView) -> list[StoreRequests]:
    """The requests of this client to both stores; of each those first that took the longest together."""
    named = ((op.partition("."), done) for op, done in metrics.requests.items() if done.count)
    found = [StoreRequests(store, request, done) for (store, _, request), done in named]
    return sorted(found, key=lambda requests: (requests.store, -requests.done.duration.seconds))
