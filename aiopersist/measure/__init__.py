"""What a client does, measured: counts and latencies that are cheap to keep, and a frozen view of them.

| module                         | what it has                                                              |
|--------------------------------|--------------------------------------------------------------------------|
| `metrics`                      | the live counts of one client; `client.metrics`                          |
| `view`                         | all of them at one moment, as a frozen value; `client.metrics()`         |
| `bounds`                       | the buckets of its histograms                                            |
| `tracing`                      | spans of what a client does; the form that does nothing                  |
| `providers`                    | whether the application wants metrics and spans from OpenTelemetry       |
| `otel_metrics`, `otel_tracing` | both, for OpenTelemetry; imported only where it is wanted                |
| `instruments`                  | names, units and texts by which exporters tell a view                    |

The wrappers of the stores count requests (`storage/layers.py`), the commit loop counts commits
(`shard/commit.py`), and `Stack.work` long work. What needs no counting is read when a view is asked for
(`client/gauges.py`): queues, open handles, the cache. Nothing here does I/O, reads a clock, or waits.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiopersist.measure.view import (
        CacheView,
        HandlesView,
        Histogram,
        LeasesView,
        QueuesView,
        RequestsView,
        WorkView,
    )

__all__ = [
    "CacheView",
    "HandlesView",
    "Histogram",
    "LeasesView",
    "QueuesView",
    "RequestsView",
    "WorkView",
]


def __getattr__(name: str) -> Any:
    """The classes of views are imported when they are first needed: most processes never ask for a view."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aiopersist.measure import view

    return getattr(view, name)
