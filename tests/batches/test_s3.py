"""Goal: batches of every shape come through a real S3 that is slow, fails every third request, or loses
answers: each update once, no blob without a name, none missing."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome
from aiopersist.testing.proxy import TcpProxy
from tests.support.schemas import SCHEMA

TINY = {"blob_target_size": 0, "batch_builder_max_outstanding_parts": 1, "inline_writes_single_max_bytes": 0}
SMALL = {"blob_target_size": 100, "batch_builder_max_outstanding_parts": 4}
UPDATES = [(f"k{n:02}", n, n % 4, 1) for n in range(12)]


class EveryThird(Faults):
    """Every third request of each kind ends so."""

    def __init__(self, bad: Outcome) -> None:
        super().__init__()
        self.bad = bad

    def outcome(self, op: str) -> Outcome:
        self.calls[op] += 1
        return self.bad if self.calls[op] % 3 == 0 else Outcome.DONE


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[tuple[TcpProxy, str]]:
    endpoint = urlsplit(url.partition("endpoint=")[2].partition("&")[0])
    async with TcpProxy(str(endpoint.hostname), int(endpoint.port or 80)) as proxy:
        there = f"{endpoint.hostname}:{endpoint.port}"
        yield proxy, url.replace(there, f"{proxy.host}:{proxy.port}")


async def losing(proxy: TcpProxy) -> None:
    """Lose every third answer: the server has done the work, and no client is told."""
    answers = itertools.count(1)
    while True:
        await proxy.swallow_answers_then_cut(lambda data: b"HTTP/1.1 200" in data and not next(answers) % 3)


@asynccontextmanager
async def bad_s3(how: str, url: str) -> AsyncIterator[ap.Blob]:
    if how in [outcome.value for outcome in Outcome]:
        inner = ap.open_blob(url)
        yield FaultyBlob(inner, EveryThird(Outcome(how)))
        await inner.aclose()
        return
    async with proxied(url) as (proxy, through):
        task = None
        if how == "slow":
            proxy.delay_s = 0.01
        else:
            task = asyncio.create_task(losing(proxy))
        blob = ap.open_blob(through)
        yield blob
        if task is not None:
            task.cancel()
            assert proxy.cuts
        await blob.aclose()


@pytest.mark.parametrize("limits", [TINY, SMALL], ids=["tiny", "small"])
@pytest.mark.parametrize("how", ["slow", "loses answers", "REFUSED", "DROPPED", "LOST"])
async def test_batches_come_through(
    how: str, limits: dict[str, int], best_s3_url: str, postgres_url: str
) -> None:
    async with bad_s3(how, best_s3_url) as blob:
        settings = ap.Settings(**limits, blob_cache_bytes=0)
        async with ap.open(blob=blob, consensus=postgres_url, settings=settings) as client:
            async with client.writer("t", SCHEMA) as w:
                async with w.builder(0) as builder:
                    for update in UPDATES[:6]:
                        await builder.add(*update)
                    await builder.extend(iter(UPDATES[6:]))
                    built = await builder.finish(4)
                wide = await w.batch([("wide", 0, 1, 1), ("wide", 0, 6, 1)], 0, 9)
                unwanted = await w.batch(UPDATES, 0, 4)
                await w.compare_and_append_batch([built, wide], 0, 4)
                copy = await w.batch_from_transmittable(unwanted.to_transmittable())
                await copy.delete()
                late = await w.batch([("late", 0, 0, 1)], 0, 1)
                late.rewrite_ts(4, 5)
                await late.flush_to_blob()
                await w.compare_and_append_batch([late], 4, 5)
            async with client.reader("t", SCHEMA) as r, r.snapshot(4) as s:
                expected = [*((key, val, 1) for key, val, _, _ in UPDATES), ("late", 0, 1), ("wide", 0, 1)]
                assert await s.rows() == expected
            named = {part.key for part in (*built.parts, *wide.parts, *late.parts)} - {None}
        honest = ap.open_blob(best_s3_url)
        listed = {key async for key, _ in honest.list("") if key.endswith(".parquet")}
        await honest.aclose()
        assert listed == named
