"""The instruments of a view for exporters: OpenTelemetry and Prometheus take names, units and texts from this
list. Names and units follow the semantic conventions of OpenTelemetry; all begin with `aiopersist.` there,
and with `aiopersist_` in Prometheus."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from aiopersist.measure.view import Histogram, MetricsView

OPERATION = "operation"


class Instrument(NamedTuple):
    """A number of a view, or one for each value of a label."""

    name: str
    unit: str
    """The unit in UCUM: `s`, `By`, or a word in braces."""
    grows: bool
    """Whether it is a count that only grows; else it is a current value."""
    text: str
    read: Callable[[MetricsView], Mapping[str, float]]
    """The numbers by the value of the label; without a label, by the empty text."""
    label: str = ""


class Durations(NamedTuple):
    """A histogram of seconds of a view, or one for each value of a label."""

    name: str
    text: str
    read: Callable[[MetricsView], Mapping[str, Histogram]]
    label: str = ""


def _count(name: str, unit: str, path: str, text: str) -> Instrument:
    """A count, at that path of the view."""
    value = attrgetter(path)
    return Instrument(name, unit, True, text, lambda view: {"": value(view)})


def _now(name: str, unit: str, path: str, text: str) -> Instrument:
    """A current value, at that path of the view."""
    return _count(name, unit, path, text)._replace(grows=False)


def _requests(name: str, unit: str, field: str, text: str, *, grows: bool = True) -> Instrument:
    """A field of the requests to each operation."""

    def read(view: MetricsView) -> Mapping[str, float]:
        return {op: getattr(requests, field) for op, requests in view.requests.items()}

    return Instrument(name, unit, grows, text, read, OPERATION)


def _fields(name: str, unit: str, path: str, label: str, text: str) -> Instrument:
    """Each field of a part of the view: current values."""
    part = attrgetter(path)
    return Instrument(name, unit, False, text, lambda view: part(view).model_dump(), label)


DURATIONS = (
    Durations(
        "request.duration",
        "Requests to the stores.",
        lambda view: {op: requests.duration for op, requests in view.requests.items()},
        OPERATION,
    ),
    Durations(
        "commit.duration",
        "Commits, from the call until they were durable: turns, lost races and retries included.",
        lambda view: {"": view.commits},
    ),
    Durations(
        "stash.duration",
        "Changes of stashes, from the call until they were durable.",
        lambda view: {"": view.stash},
    ),
    Durations(
        "compaction.duration", "Compactions that were applied.", lambda view: {"": view.compactions.duration}
    ),
    Durations(
        "collection.duration",
        "Collections of garbage that deleted anything.",
        lambda view: {"": view.collections.duration},
    ),
)

INSTRUMENTS = (
    _requests("request.errors", "{error}", "errors", "Requests that failed."),
    _requests("request.retries", "{retry}", "retries", "Failed requests that were repeated."),
    _requests("request.io", "By", "bytes", "Values sent to the stores, or received."),
    _requests("request.active", "{request}", "in_flight", "Requests under way.", grows=False),
    _count("commit.versions", "{version}", "versions", "Versions of shards that were written."),
    _count("commit.mismatches", "{mismatch}", "mismatches", "Races lost to commits of other processes."),
    _count("commit.refusals", "{refusal}", "refusals", "Commands that the newest state refused."),
    _count("commit.lost_answers", "{answer}", "lost_answers", "Commits whose answer was lost."),
    _count("append.batches", "{batch}", "appends", "Appends that wrote."),
    _count("append.rows", "{row}", "rows", "Updates that were appended."),
    _count("cache.hits", "{read}", "cache.hits", "Reads of blobs that the cache answered."),
    _count("cache.misses", "{read}", "cache.misses", "Reads of blobs that cost a request."),
    _now("cache.usage", "By", "cache.bytes", "What the cache of blobs holds."),
    _now("cache.limit", "By", "cache.bytes_max", "What the cache of blobs may hold."),
    _now("compaction.active", "{compaction}", "compactions.running", "Compactions under way."),
    _count("compaction.failures", "{compaction}", "compactions.failures", "Compactions that failed."),
    _now("collection.active", "{collection}", "collections.running", "Collections under way."),
    _count("collection.failures", "{collection}", "collections.failures", "Collections that failed."),
    _fields("queue.length", "{item}", "queues", "queue", "What waits."),
    _fields("handle.open", "{handle}", "handles", "kind", "Open handles."),
    _count("lease.heartbeats", "{heartbeat}", "leases.heartbeats", "Heartbeats that succeeded."),
    _count("lease.late", "{heartbeat}", "leases.late", "Heartbeats that began late."),
    _count("lease.failures", "{heartbeat}", "leases.failures", "Heartbeats that failed."),
    _count("lease.lost", "{lease}", "leases.lost", "Registrations that were found to be gone."),
    _count("wait.stalls", "{wait}", "stalls", "Waits of more than 5 s."),
    _count("background.failures", "{failure}", "failures", "Background work that failed."),
)
