"""Metrics by OpenTelemetry. Only `providers` imports this, once a meter provider is set.

Durations are recorded when they happen. Everything else is observed: a collecting reader gets the current
views. The process makes the instruments once for each provider; the attribute `aiopersist.client.name`
distinguishes the clients. The counts of a closed client stay, and a client that takes its name continues
them, so that no count ever goes back.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from inspect import signature
from typing import Any

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Observation

from aiopersist.measure.bounds import BOUNDS_S
from aiopersist.measure.instruments import DURATIONS, INSTRUMENTS, Durations, Instrument
from aiopersist.measure.metrics import Latencies, Metrics

_LABELS = {durations.name: durations.label for durations in DURATIONS}


class OtelMetrics(Metrics):
    """Counts that are also exported."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._exporter = _exporter_of(api.get_meter_provider())
        super().__init__(now)

    def _latencies(self, what: str, op: str | None = None) -> Latencies:
        name = f"{what}.duration"
        return OtelLatencies(self._exporter.histograms[name], partial(self._attributes, name, op or ""))

    def _attributes(self, name: str, op: str) -> dict[str, str]:
        return _attributes(self.name, _LABELS[name], op)

    def begin(self, base: str) -> None:
        super().begin(base)
        self._exporter.add(self)


class OtelLatencies(Latencies):
    """Latencies that an instrument also records."""

    __slots__ = ("_attributes", "_histogram", "_make_attributes")

    def __init__(self, histogram: api.Histogram, make_attributes: Callable[[], dict[str, str]]) -> None:
        super().__init__()
        self._histogram = histogram
        self._make_attributes = make_attributes
        self._attributes: dict[str, str] | None = None

    def add(self, seconds: float) -> None:
        super().add(seconds)
        if self._attributes is None:  # the client has its name now
            self._attributes = self._make_attributes()
        self._histogram.record(seconds, self._attributes)


class Exporter:
    """The instruments of one meter provider, and the clients of the process by name."""

    def __init__(self, provider: api.MeterProvider) -> None:
        self._clients: dict[str, Metrics] = {}
        self._ended: Counter[tuple[str, str, str]] = Counter()
        meter = provider.get_meter("aiopersist")
        self.histograms = {durations.name: _histogram(meter, durations) for durations in DURATIONS}
        for instrument in INSTRUMENTS:
            count, state = meter.create_observable_counter, meter.create_observable_up_down_counter
            create = count if instrument.grows else state
            name, observe = f"aiopersist.{instrument.name}", partial(self._observe, instrument)
            create(name, [observe], unit=instrument.unit, description=instrument.text)

    def add(self, metrics: Metrics) -> None:
        """Export this client. The counts of an earlier client with the same name are added to it."""
        before = self._clients.pop(metrics.name, None)
        for instrument in INSTRUMENTS:
            if before is not None and instrument.grows:
                self._ended.update(dict(_read(instrument, before)))
        self._clients[metrics.name] = metrics

    def _observe(self, instrument: Instrument, options: CallbackOptions) -> Iterable[Observation]:
        for metrics in list(self._clients.values()):
            for key, number in _read(instrument, metrics):
                attributes = _attributes(metrics.name, instrument.label, key[2])
                yield Observation(number + self._ended[key], attributes)


Key = tuple[str, str, str]
"""Instrument, client, value of the label."""


def _read(instrument: Instrument, metrics: Metrics) -> Iterator[tuple[Key, Any]]:
    for value, number in instrument.read(metrics()).items():
        yield (instrument.name, metrics.name, value), number


def _attributes(client: str, label: str, value: str) -> dict[str, str]:
    return {"aiopersist.client.name": client} | ({f"aiopersist.{label}": value} if value else {})


def _histogram(meter: api.Meter, durations: Durations) -> api.Histogram:
    options: dict[str, Any] = {}
    if "explicit_bucket_boundaries_advisory" in signature(meter.create_histogram).parameters:
        options["explicit_bucket_boundaries_advisory"] = list(BOUNDS_S)
    return meter.create_histogram(
        f"aiopersist.{durations.name}", unit="s", description=durations.text, **options
    )


_exporters: dict[int, tuple[api.MeterProvider, Exporter]] = {}


def _exporter_of(provider: api.MeterProvider) -> Exporter:
    """The exporter of that provider. A process usually has only one."""
    if id(provider) not in _exporters:
        _exporters[id(provider)] = (provider, Exporter(provider))
    return _exporters[id(provider)][1]
