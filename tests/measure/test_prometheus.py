"""Goal: what Prometheus scrapes is what the view says, in its own format, for one client and for several."""

from collections.abc import AsyncIterator
from typing import Any

import fastapi
import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import aiopersist as ap
from aiopersist.measure.instruments import DURATIONS, INSTRUMENTS
from aiopersist.web import ClientCollector, metrics_router, metrics_text
from aiopersist.web.metrics import prometheus_name

SCHEMA = ap.Schema(key=str, val=int)
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    """The samples, each of which is there once."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found
            found[key] = sample.value
    return found


@pytest.fixture
async def clients() -> AsyncIterator[list[ap.Client]]:
    one, two = (ap.open("mem://", settings=ap.Settings(client_name=name)) for name in ("one", "two"))
    async with one as first, two as second:
        async with first.writer("s", SCHEMA) as w:
            await w.write([("k", 1), ("l", 2)])
        yield [first, second]


async def test_each_instrument_has_its_sample(clients: list[ap.Client]) -> None:
    client, _ = clients
    view, samples = client.metrics(), parsed(metrics_text(client).decode())
    for instrument in INSTRUMENTS:
        name = prometheus_name(instrument.name, instrument.unit) + "_total" * instrument.grows
        for value, number in instrument.read(view).items():
            labels = {"client": "one"} | ({instrument.label: value} if value else {})
            if instrument.name not in ("request.active", "queue.length"):
                assert samples[name, tuple(sorted(labels.items()))] == number, name
    assert samples["aiopersist_append_rows_total", (("client", "one"),)] == 2
    put = (("client", "one"), ("operation", "consensus.compare_and_set"))
    assert samples["aiopersist_request_io_bytes_total", put] > 100


async def test_histograms_cumulate(clients: list[ap.Client]) -> None:
    client, _ = clients
    view, samples = client.metrics(), parsed(metrics_text(client).decode())
    for durations in DURATIONS:
        name = prometheus_name(durations.name, "s")
        for value, histogram in durations.read(view).items():
            labels = {"client": "one"} | ({durations.label: value} if value else {})
            key = tuple(sorted(labels.items()))
            assert samples[f"{name}_count", key] == histogram.count
            assert samples[f"{name}_sum", key] == pytest.approx(histogram.seconds)
            buckets = [(k, v) for (n, k), v in samples.items() if n == f"{name}_bucket" and {*key} <= {*k}]
            bounds = {dict(k)["le"]: v for k, v in buckets}
            assert next(iter(bounds)) == "0.0001"
            assert list(bounds.values()) == sorted(bounds.values())
            assert bounds["+Inf"] == histogram.count
    assert samples["aiopersist_commit_duration_seconds_count", (("client", "one"),)] > 0


async def test_several_clients_are_told_apart(clients: list[ap.Client]) -> None:
    samples = parsed(metrics_text(*clients).decode())
    rows = {dict(labels)["client"]: n for (name, labels), n in samples.items() if "append_rows" in name}
    assert rows == {"one": 2, "two": 0}


def served(app: fastapi.FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_router_serves_one_several_or_those_of_the_request(clients: list[ap.Client]) -> None:
    given: list[Any] = [clients[0], clients, lambda request: request.app.state.clients]
    for one in given:
        app = fastapi.FastAPI()
        app.state.clients = clients
        app.include_router(metrics_router(one))
        async with served(app) as http:
            answer = await http.get("/metrics")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert parsed(answer.text)
            assert "/metrics" not in (await http.get("/openapi.json")).json()["paths"]


async def test_the_router_takes_another_path(clients: list[ap.Client]) -> None:
    app = fastapi.FastAPI()
    app.include_router(metrics_router(clients, path="/internal/metrics"), prefix="/v1")
    async with served(app) as http:
        assert (await http.get("/v1/internal/metrics")).status_code == 200


async def test_a_registry_of_the_application_takes_the_collector(clients: list[ap.Client]) -> None:
    registry = CollectorRegistry()
    registry.register(ClientCollector(*clients))
    assert registry.get_sample_value("aiopersist_append_rows_total", {"client": "one"}) == 2


async def test_a_client_without_metrics_can_be_scraped() -> None:
    async with ap.open("mem://", settings=ap.Settings(metrics=False, client_name="off")) as client:
        samples = parsed(metrics_text(client).decode())
        assert samples["aiopersist_append_rows_total", (("client", "off"),)] == 0


def test_no_name_is_there_twice() -> None:
    names = [prometheus_name(i.name, i.unit) for i in INSTRUMENTS]
    names += [prometheus_name(d.name, "s") for d in DURATIONS]
    assert len(names) == len({*names})
