"""Measurements of a client: cheap counts and latencies, and a frozen view of them.

| module                         | what it has                                                              |
|--------------------------------|--------------------------------------------------------------------------|
| `metrics`                      | the live counts of one client; `client.metrics`                          |
| `view`                         | all counts at one moment, as a frozen value; `client.metrics()`          |
| `bounds`                       | the buckets of histograms                                                |
| `tracing`                      | spans of a client's work; the form that does nothing                     |
| `providers`                    | whether the application has set providers of OpenTelemetry               |
| `otel_metrics`, `otel_tracing` | metrics and spans for OpenTelemetry; imported only if it is set          |
| `instruments`                  | names, units and texts of a view for exporters                           |

The wrappers of the stores count requests (`storage/layers.py`), the commit loop counts commits
(`shard/commit.py`), and `Stack.work` counts long work. Other values are read when a view is requested
(`client/gauges.py`): queues, open handles, the cache. Nothing here does I/O or waits.
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
