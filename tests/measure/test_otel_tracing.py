"""Goal: a trace shows what a call did, with the requests to the stores, through groups, background work, and
other processes."""

import asyncio
import uuid
from collections import Counter
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import aiopersist as ap
from aiopersist.parts.envelope import Envelope
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from aiopersist.write.transmit import ENVELOPE, WRITER, TransmittedWriter
from tests.support.shards import until

SCHEMA = ap.Schema(key=str, val=int)
SMALL = ap.Settings(inline_writes_single_max_bytes=0)
APPENDS = 64  # enough for a compaction


def opened(**given: Any) -> Any:
    return ap.open(**({"location": f"mem://{uuid.uuid4().hex}", "maintenance": False} | given))


class Family:
    """The spans that have ended, by their names."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self.all = exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == f"aiopersist.{name}"]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def children(self, parent: ReadableSpan) -> Counter[str]:
        mine = [s for s in self.all if s.parent is not None and s.parent.span_id == parent.context.span_id]
        return Counter(span.name.removeprefix("aiopersist.") for span in mine)


def users_span(name: str = "request") -> Any:
    return trace.get_tracer("test").start_as_current_span(name)


def ids(span: Any) -> tuple[int, int]:
    context = span.get_span_context()
    return context.trace_id, context.span_id


async def test_an_append_has_its_requests_as_children(spans: InMemorySpanExporter) -> None:
    async with opened(settings=SMALL) as client, client.writer("s", SCHEMA) as w:
        spans.clear()
        with users_span() as mine:
            await w.compare_and_append([("k", 1, 0, 1)], 0, 1)
        found = Family(spans)
        append = found.one("append")
        assert append.parent is not None
        assert append.parent.span_id == mine.get_span_context().span_id
        assert append.attributes == {"aiopersist.shard.name": "s"}
        assert append.status.status_code is StatusCode.UNSET
        assert found.children(append) == {"blob.set": 1, "consensus.compare_and_set": 1}
        request = found.one("blob.set")
        assert request.kind is SpanKind.CLIENT
        assert request.attributes == {"aiopersist.operation": "blob.set"}


async def test_a_retry_and_a_failure_are_seen(spans: InMemorySpanExporter) -> None:
    faults, name = Faults(), uuid.uuid4().hex
    consensus = FaultyConsensus(MemoryConsensus(name), faults)
    async with opened(location=None, blob=MemoryBlob(name), consensus=consensus) as client:
        async with client.writer("s", SCHEMA) as w:
            spans.clear()
            faults.fail_next("compare_and_set", Outcome.REFUSED)
            await w.compare_and_append([("k", 1, 0, 1)], 0, 1)
            failed, done = Family(spans).named("consensus.compare_and_set")
            assert failed.status.status_code is StatusCode.ERROR
            assert (failed.attributes or {})["error.type"] == "StorageUnavailable"
            assert failed.status.description is None
            assert failed.events == ()
            assert done.status.status_code is StatusCode.UNSET
            spans.clear()
            with pytest.raises(ap.UpperMismatch):
                await w.compare_and_append([("k", 1, 0, 1)], 0, 1)
            append = Family(spans).one("append")
            assert (append.attributes or {})["error.type"] == "UpperMismatch"


async def test_a_group_continues_one_trace_and_links_the_others(spans: InMemorySpanExporter) -> None:
    async with opened() as client, client.writer("s", SCHEMA) as w:
        spans.clear()
        origins = []

        async def write(n: int) -> None:
            with users_span(f"request {n}") as span:
                origins.append(ids(span))
                await w.write([("k", n)])

        await asyncio.gather(*(write(n) for n in range(4)))
        append = Family(spans).one("append")
        assert append.parent is not None
        linked = [(link.context.trace_id, link.context.span_id) for link in append.links]
        assert [(append.parent.trace_id, append.parent.span_id), *linked] == origins
        spans.clear()
        await w.write([("k", 9)])  # outside of any trace
        append = Family(spans).one("append")
        assert append.parent is None
        assert not append.links


async def test_operations_on_tables_share_a_span(spans: InMemorySpanExporter) -> None:
    async with opened() as client:
        table = client.table("t", str, int)
        await table.put("a", 0)
        spans.clear()
        origins = []

        async def put(n: int) -> None:
            with users_span() as span:
                origins.append(ids(span))
                await table.put(f"k{n}", n)

        await asyncio.gather(*(put(n) for n in range(3)))
        append = Family(spans).one("append")
        assert append.parent is not None
        linked = [(link.context.trace_id, link.context.span_id) for link in append.links]
        assert {(append.parent.trace_id, append.parent.span_id), *linked} == {*origins}
        assert Family(spans).children(append)["consensus.compare_and_set"] == 1


async def test_a_snapshot_and_its_reading(spans: InMemorySpanExporter) -> None:
    async with opened(settings=SMALL) as client, client.writer("s", SCHEMA) as w:
        for n in range(2):
            await w.write([(f"k{n}", n)])
        async with client.reader("s", SCHEMA) as reader:
            for read in ("rows", "batches", "iterate"):
                spans.clear()
                client._stack.blob._data.clear()
                client._stack.blob._by_key.clear()
                with users_span():
                    async with reader.snapshot() as snapshot:
                        if read == "rows":
                            assert len(await snapshot.rows()) == 2
                        elif read == "batches":
                            assert sum([b.num_rows async for b in snapshot.batches()]) == 2
                        else:
                            assert len([row async for row in snapshot]) == 2
                found = Family(spans)
                assert found.children(found.one("snapshot")) == {"consensus.head": 1}
                assert found.children(found.one("snapshot.read")).total() >= 2, read


async def test_an_iteration_that_is_given_up_ends_its_span(spans: InMemorySpanExporter) -> None:
    async with opened(settings=SMALL) as client, client.writer("s", SCHEMA) as w:
        await w.write([(f"k{n}", n) for n in range(10)])
        async with client.reader("s", SCHEMA) as reader:
            spans.clear()
            async with reader.snapshot() as snapshot:
                async for _ in snapshot:
                    break
            await until(lambda: Family(spans).named("snapshot.read"))
            found = Family(spans).one("snapshot.read")
            assert found.status.status_code is StatusCode.UNSET


async def test_background_work_has_a_trace_of_its_own(spans: InMemorySpanExporter) -> None:
    """Goal: compaction that an append causes is no part of the append's trace; that on demand is."""
    async with opened(maintenance=True) as client, client.writer("s", SCHEMA) as w:
        await client.admin.retain("s", 1)
        with users_span() as mine:
            trace_id, _ = ids(mine)
            for n in range(APPENDS):
                await w.write([(f"k{n}", n)])
            await until(lambda: client.metrics().compactions.duration.count > 0)
        found = Family(spans)
        background = found.named("compaction")
        assert background
        assert all(span.context.trace_id != trace_id for span in background)
        assert all(span.parent is None for span in background)
        appends = [span for span in found.named("append") if span.context.trace_id == trace_id]
        assert len(appends) == APPENDS
    async with opened() as client, client.writer("s", SCHEMA) as w:
        for n in range(3):
            await w.write([(f"k{n}", n)])
        spans.clear()
        with users_span() as mine:
            await client.admin.force_compaction("s")
        compaction = Family(spans).one("compaction")
        assert compaction.context.trace_id == ids(mine)[0]
        assert Family(spans).children(compaction)["consensus.compare_and_set"] >= 1


async def test_a_request_outside_of_any_span_has_none(spans: InMemorySpanExporter) -> None:
    async with opened() as client:
        await client.list_shards()
        assert spans.get_finished_spans() == ()
        with users_span():
            await client.list_shards()
        assert len(Family(spans).named("consensus.list_keys")) == 1


async def test_a_trace_goes_along_with_what_is_transmitted(spans: InMemorySpanExporter) -> None:
    place = f"mem://{uuid.uuid4().hex}"
    async with opened(location=place) as driver, opened(location=place, settings=SMALL) as worker:
        async with driver.writer("s", SCHEMA) as w:
            with users_span("job") as job:
                lent = w.to_transmittable()
            spans.clear()
            async with worker.builder_from_transmittable(lent, 0) as builder:  # outside of any trace there
                await builder.extend([("k", 1, 0, 1)])
                batch = await builder.finish(1)
            built = Family(spans).one("batch")
            assert built.parent is not None
            assert (built.parent.trace_id, built.parent.span_id) == ids(job)
            with users_span("task") as task:
                sent = batch.to_transmittable()
            spans.clear()
            with users_span("commit") as committing:
                restored = await w.batch_from_transmittable(sent)
                await w.compare_and_append_batch([restored], 0, 1)
            append = Family(spans).one("append")
            assert append.context.trace_id == ids(committing)[0]
            assert [link.context.span_id for link in append.links] == [ids(task)[1]]


async def test_pieces_of_shared_work_continue_the_trace(spans: InMemorySpanExporter) -> None:
    place = f"mem://{uuid.uuid4().hex}"
    async with opened(location=place, settings=SMALL) as driver, opened(location=place) as worker:
        async with driver.writer("s", SCHEMA) as w:
            for n in range(3):
                await w.write([(f"k{n}", n)])
        with users_span("job") as job:
            async with driver.shared_read("s") as read:
                pieces = await read.pieces(1)
            shared = await driver.shared_compaction("s")
            work = await shared.pieces(1)
        spans.clear()
        async with shared:
            for piece in pieces:
                assert sum([b.num_rows async for b in worker.read_piece(piece)]) == 3
            await shared.apply([await worker.compact_piece(piece) for piece in work])
        for name in ("read.piece", "compaction.piece"):
            span = Family(spans).one(name)
            assert span.parent is not None
            assert (span.parent.trace_id, span.parent.span_id) == ids(job)
            assert Family(spans).children(span).total() > 0


def test_bytes_of_before_are_read_and_those_without_a_trace_are_as_they_were(
    spans: InMemorySpanExporter,
) -> None:
    """Goal: the format without a trace stays, bytes of both are read, and later ones are refused."""
    value = TransmittedWriter(shard="s1", writer="w1", schema_id=0)
    before = WRITER.encode(value)
    assert before.startswith(b"aiopersist-writer 1 ")
    assert before.count(b"\n") == 1
    assert WRITER.trace(before) == {}
    with users_span() as span:
        within = WRITER.encode(value)
    assert within.startswith(b"aiopersist-writer 2 ")
    assert set(WRITER.trace(within)) == {"traceparent"}
    assert f"{ids(span)[0]:032x}" in WRITER.trace(within)["traceparent"]
    assert WRITER.decode(before, TransmittedWriter) == value == WRITER.decode(within, TransmittedWriter)
    assert ENVELOPE.trace(within) == {} == WRITER.trace(b"") == WRITER.trace(within[:30])
    with pytest.raises(ap.InvalidUpdate, match="damaged"):
        WRITER.decode(within[:-9] + b"x" + within[-8:], TransmittedWriter)
    with pytest.raises(ap.InvalidUpdate, match="upgrade aiopersist"):
        WRITER.decode(Envelope("writer", format=3).encode(value), TransmittedWriter)


async def test_a_cancelled_call_ends_its_span_without_a_failure(spans: InMemorySpanExporter) -> None:
    async with opened() as client, client.writer("s", SCHEMA), client.reader("s", SCHEMA) as reader:
        spans.clear()
        waiting = asyncio.ensure_future(reader.snapshot(5).__aenter__())
        await until(lambda: client.metrics().queues.waiters)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert Family(spans).one("snapshot").status.status_code is StatusCode.UNSET
