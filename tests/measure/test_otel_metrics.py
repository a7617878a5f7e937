"""Goal: OpenTelemetry gets what the view says, with the names and units of its conventions; and nothing is
imported or created where there is no provider."""

import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import metrics
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import aiopersist as ap
from aiopersist.measure.instruments import DURATIONS, INSTRUMENTS
from aiopersist.measure.metrics import Metrics
from aiopersist.measure.view import BOUNDS_S

SCHEMA = ap.Schema(key=str, val=int)
Points = dict[tuple[str, frozenset[tuple[str, Any]]], Any]


def collected(reader: InMemoryMetricReader) -> tuple[dict[str, Any], Points]:
    """The instruments, and their points by attributes."""
    data = reader.get_metrics_data()
    found, points = {}, {}
    for resource in data.resource_metrics if data is not None else ():
        for scope in resource.scope_metrics:
            assert scope.scope.name == "aiopersist"
            for metric in scope.metrics:
                found[metric.name] = metric
                for point in metric.data.data_points:
                    key = (metric.name, frozenset((point.attributes or {}).items()))
                    assert key not in points
                    points[key] = point
    return found, points


def named(client: str, **labels: str) -> frozenset[tuple[str, str]]:
    found = {"client.name": client, **labels}
    return frozenset((f"aiopersist.{name}", value) for name, value in found.items())


def opened(name: str, place: str = "mem://", **settings: Any) -> Any:
    return ap.open(place, settings=ap.Settings(client_name=name, **settings), maintenance=False)


async def test_every_instrument_says_what_the_view_says(reader: InMemoryMetricReader) -> None:
    async with opened("one") as client, client.writer("s", SCHEMA) as w:
        for n in range(5):
            await w.write([("k", n)])
        await client.admin.force_compaction("s")
        await client.admin.force_gc("s")
        async with client.stash() as stash:
            await ap.stash.TypedCollection("settings", str, str).upsert_key(stash, "theme", "dark")
        view = client.metrics()
        instruments, points = collected(reader)
        for instrument in INSTRUMENTS:
            name = f"aiopersist.{instrument.name}"
            for value, number in instrument.read(view).items():
                labels = {instrument.label: value} if value else {}
                if instrument.name not in ("queue.length", "request.active"):
                    assert points[name, named("one", **labels)].value == number, name
                assert instruments[name].unit == instrument.unit
                assert instruments[name].data.is_monotonic == instrument.grows
        for durations in DURATIONS:
            name = f"aiopersist.{durations.name}"
            for value, histogram in durations.read(view).items():
                if histogram.count:
                    labels = {durations.label: value} if value else {}
                    point = points[name, named("one", **labels)]
                    assert point.count == histogram.count
                    assert point.sum == pytest.approx(histogram.seconds)
                    assert tuple(point.explicit_bounds) == BOUNDS_S
                    assert tuple(point.bucket_counts) == histogram.buckets
            assert instruments[name].unit == "s"
        assert points["aiopersist.commit.duration", named("one")].count >= 6


def test_names_and_units_follow_the_conventions() -> None:
    for name in [i.name for i in INSTRUMENTS] + [d.name for d in DURATIONS]:
        assert re.fullmatch(r"[a-z]+(\.[a-z_]+)+", name)
    for instrument in INSTRUMENTS:
        assert re.fullmatch(r"By|\{[a-z]+\}", instrument.unit)
        assert instrument.text.endswith(".")


async def test_clients_are_told_apart_and_counts_never_go_back(reader: InMemoryMetricReader) -> None:
    name, place = "aiopersist.append.batches", f"mem://{uuid.uuid4().hex}"
    async with opened("one", place) as one, opened("two", place) as two, one.writer("s", SCHEMA) as w:
        await w.write([("k", 1)])
        _, points = collected(reader)
        assert points[name, named("one")].value == 1
        assert points[name, named("two")].value == 0
        assert two.metrics().appends == 0
    _, points = collected(reader)
    assert points[name, named("one")].value == 1  # the last collection comes after the end
    assert points["aiopersist.handle.open", named("one", kind="writers")].value == 0
    async with opened("one", place) as again, again.writer("s", SCHEMA) as w:
        _, points = collected(reader)
        assert points[name, named("one")].value == 1
        await w.write([("k", 2)])
        _, points = collected(reader)
        assert points[name, named("one")].value == 2
        assert again.metrics().appends == 1


async def test_metrics_that_are_off_are_not_exported(reader: InMemoryMetricReader) -> None:
    async with opened("off", metrics=False) as client, client.writer("s", SCHEMA) as w:
        await w.write([("k", 1)])
    assert collected(reader) == ({}, {})


async def test_without_a_provider_there_is_no_instrument() -> None:
    """Goal: an application that has the API imported, but sets no provider, pays nothing."""
    assert type(metrics.get_meter_provider()).__module__.startswith("opentelemetry.metrics")
    async with opened("none") as client:
        assert type(client.metrics) is Metrics
        assert not client._stack.tracing.on


NOT_IMPORTED = """
import asyncio, sys
import aiopersist as ap

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("opentelemetry", "prometheus_client", "fastapi"):
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Missing())

async def main():
    async with ap.open(sys.argv[1]) as client, client.writer("s", ap.Schema(key=str, val=int)) as w:
        await w.write([("k", 1)])
        print(client.metrics().appends, len(w.to_transmittable().split(b"\\n")))
        async with client.reader("s") as r, r.snapshot() as s:
            print(await s.rows())
    print([name for name in sys.modules if name.startswith("opentelemetry")])
    print([name for name in sys.modules if "otel" in name and name.startswith("aiopersist")])

asyncio.run(main())
"""


def test_nothing_is_imported_where_it_is_not_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOT_IMPORTED, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:4] == ["1 2", "[('k', 1, 1)]", "[]", "[]"]
