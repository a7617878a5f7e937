"""Goal: a task of Spark continues the trace of the job on the driver."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import aiopersist as ap

pytest.importorskip("pyspark")

from aiopersist.spark import tasks
from aiopersist.spark.bridge import bridge
from aiopersist.spark.tasks import Retraction

SCHEMA = ap.Schema(key=str, val=int)


async def open_both(place: Path) -> tuple[ap.Client, ap.Client]:
    settings = ap.Settings(inline_writes_single_max_bytes=0)
    return await ap.open(place, settings=settings), await ap.open(place, settings=settings)


async def lend(driver: ap.Client) -> tuple[Any, bytes]:
    writer = await driver.writer("s", SCHEMA)
    with trace.get_tracer("test").start_as_current_span("job"):
        return writer, writer.to_transmittable()


async def pieces(driver: ap.Client) -> AsyncIterator[bytes]:
    async with driver.shared_read("s") as read:
        for piece in await read.pieces(1):
            yield piece


async def end(*clients: ap.Client) -> None:
    for client in clients:
        await client.aclose()


def test_a_task_continues_the_trace_of_its_job(spans: InMemorySpanExporter, tmp_path: Path) -> None:
    driver, worker = bridge().run(open_both, tmp_path)
    writer, lent = bridge().run(lend, driver)
    table = pa.table({"key": ["a"], "val": [1], "time": [0], "diff": [1]})
    staged = bridge().run(tasks._stage, worker, lent, iter([table]))
    assert staged.rows == 1

    async def append() -> None:
        await writer.compare_and_append_batch([await writer.batch_from_transmittable(staged.batch)], 0, 1)

    bridge().run(append)
    (piece,) = bridge().iterate(lambda: pieces(driver))
    assert bridge().run(tasks._retract, worker, lent, Retraction(piece)).rows == 1
    bridge().run(end, driver, worker)
    found = spans.get_finished_spans()
    (job,) = (span for span in found if span.name == "job")
    done = [span for span in found if span.name == "aiopersist.spark.task"]
    assert len(done) == 2
    for span in done:
        assert span.parent is not None
        assert span.parent.span_id == job.context.span_id
        inside = [
            s for s in found if s.context.trace_id == job.context.trace_id and s.name == "aiopersist.blob.set"
        ]
        assert len(inside) == 2
