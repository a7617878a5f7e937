"""Whether the application has set providers of OpenTelemetry, and the measures of a client.

An application that never imported the API of OpenTelemetry cannot have set a provider. Then the API is not
imported here, and need not be installed. A client looks once, at its opening.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

from aiopersist.measure.metrics import Metrics, NoMetrics
from aiopersist.measure.tracing import NO_TRACING, Tracing


class Measures(NamedTuple):
    """The metrics and the tracing of one client."""

    metrics: Metrics
    tracing: Tracing

    @classmethod
    def new(cls, now: Callable[[], float], *, enabled: bool) -> "Measures":
        """The measures of a new client; `now` is a clock that never goes back."""
        return cls(_metrics(now) if enabled else NoMetrics(), _tracing())


def carrier() -> dict[str, str]:
    """The present trace as text, for another process; empty if there is none."""
    if not _is_set("trace", "get_tracer_provider"):
        return {}
    from aiopersist.measure.otel_tracing import injected

    return injected()


def _metrics(now: Callable[[], float]) -> Metrics:
    if not _is_set("metrics", "get_meter_provider"):
        return Metrics(now)
    from aiopersist.measure.otel_metrics import OtelMetrics

    return OtelMetrics(now)


def _tracing() -> Tracing:
    if not _is_set("trace", "get_tracer_provider"):
        return NO_TRACING
    from aiopersist.measure.otel_tracing import OtelTracing

    return OtelTracing()


def _is_set(signal: str, getter: str) -> bool:
    """Whether there is a provider for that signal, besides the defaults, which do nothing."""
    api = sys.modules.get(f"opentelemetry.{signal}")
    if api is None or not hasattr(api, getter):  # it may be under import
        return False
    return not type(getattr(api, getter)()).__module__.startswith(f"opentelemetry.{signal}")
