"""`GET /metrics` for Prometheus: the metrics of the clients of this process, in its text format.

A scrape reads the current values, so nothing has to be registered or reset. Each metric has the label
`client`, the name of the client in the process.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aiopersist.client.client import Client
from aiopersist.measure.bounds import BOUNDS_S
from aiopersist.measure.instruments import DURATIONS, INSTRUMENTS, Durations, Instrument
from aiopersist.measure.view import Histogram, MetricsView

if TYPE_CHECKING:
    from fastapi import APIRouter, Request

    ClientsOf: TypeAlias = Callable[[Request], Client | Iterable[Client]]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SUFFIXES = {"s": "_seconds", "By": "_bytes"}
_BOUNDS = [f"{bound:.9g}" for bound in BOUNDS_S] + ["+Inf"]


def metrics_text(*clients: Client) -> bytes:
    """The metrics of the clients in the text format of Prometheus. No request."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ClientCollector(*clients))
    return generate_latest(registry)


def metrics_router(
    clients: "Client | Iterable[Client] | ClientsOf", *, path: str = "/metrics"
) -> "APIRouter":
    """A router of FastAPI with `GET /metrics` for Prometheus: `app.include_router(metrics_router(client))`.

    `clients`: one, several, or a function that returns them for a request, for clients that are opened after
    the application is created: `metrics_router(lambda request: request.app.state.client)`. Their metrics
    differ in the name of the client (`settings.client_name`). The route is not in the API's schema. Its
    readers see counts, but no names of shards, keys or locations."""
    from fastapi import APIRouter, Request, Response

    router = APIRouter()

    async def metrics(request: Request) -> Response:
        open_clients = clients(request) if callable(clients) and not isinstance(clients, Client) else clients
        several = (open_clients,) if isinstance(open_clients, Client) else tuple(open_clients)
        return Response(metrics_text(*several), media_type=CONTENT_TYPE)

    router.add_api_route(path, metrics, methods=["GET"], include_in_schema=False)
    return router


class ClientCollector(Collector):
    """A collector for a registry of `prometheus_client` with other metrics. It keeps the clients alive."""

    def __init__(self, *clients: Client) -> None:
        self._clients = clients

    def collect(self) -> Iterator[Metric]:
        """One family per instrument, with a sample per client."""
        views = [client.metrics() for client in self._clients]
        for durations in DURATIONS:
            yield _histograms(durations, views)
        for instrument in INSTRUMENTS:
            yield _numbers(instrument, views)


def _histograms(durations: Durations, views: list[MetricsView]) -> Metric:
    family = HistogramMetricFamily(
        prometheus_name(durations.name, "s"), durations.text, labels=_labels(durations.label)
    )
    for view in views:
        for value, histogram in durations.read(view).items():
            family.add_metric(_values(view, value), _cumulated(histogram), histogram.seconds)
    return family


def _numbers(instrument: Instrument, views: list[MetricsView]) -> Metric:
    kind = CounterMetricFamily if instrument.grows else GaugeMetricFamily
    name = prometheus_name(instrument.name, instrument.unit)
    family: CounterMetricFamily | GaugeMetricFamily = kind(
        name, instrument.text, labels=_labels(instrument.label)
    )
    for view in views:
        for value, number in instrument.read(view).items():
            family.add_metric(_values(view, value), number)
    return family


def prometheus_name(name: str, unit: str) -> str:
    """The name of an instrument in Prometheus, without the `_total` of counts."""
    return f"aiopersist_{name.replace('.', '_')}{_SUFFIXES.get(unit, '')}"


def _labels(label: str) -> list[str]:
    return ["client", label] if label else ["client"]


def _values(view: MetricsView, value: str) -> list[str]:
    return [view.client, value] if value else [view.client]


def _cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    total, pairs = 0, []
    for bound, count in zip(_BOUNDS, histogram.buckets):
        total += count
        pairs.append((bound, float(total)))
    return pairs
