"""Goal: a location of 10,000 shards, a shard of 1,000 batches and its 10 million rows are a page at once: no
page loads more than it shows. It prints what each page takes, which says something on a quiet machine.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pyarrow as pa
import pytest

import aiopersist as ap
from tests.web.kit import pages, words
from tests.web.test_contents import rows_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800), pytest.mark.blocks_loop]

SHARDS = 10_000
BATCHES = 1_000
ROWS = 10_000  # of a batch
TWO_LOOKS = 40 + 40 + 12  # names and heads, some hundred in a request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    asyncio.run(_fill(folder))
    return folder


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        async with client.writer("events", ap.Schema(int, str)) as writer:
            vals = pa.array([f"value {number % 997}" for number in range(ROWS)])
            for batch in range(BATCHES):
                keys = np.arange(batch * ROWS, (batch + 1) * ROWS)
                columns = [keys, vals, np.full(ROWS, batch), np.ones(ROWS, np.int64)]
                table = pa.table(columns, ["key", "val", "time", "diff"])
                await writer.compare_and_append(table, batch, batch + 1)
        await client.admin.force_gc("events")  # a rollup, as maintenance writes them

        async def write(number: int) -> None:
            async with client.writer(f"shard/{number:05}", ap.Schema(str, int)) as writer:
                await writer.compare_and_append([("k", number, 0, 1)], 0, 1)

        for first in range(0, SHARDS, 100):
            await asyncio.gather(*(write(number) for number in range(first, first + 100)))


class Taken(NamedTuple):
    """What a page took."""

    page: httpx.Response
    requests: int
    seconds: float


class Measured:
    """Asks for pages, and counts."""

    def __init__(self, client: ap.Client, http: httpx.AsyncClient) -> None:
        self._client = client
        self._http = http

    async def get(self, address: str) -> Taken:
        before, began = self._requests(), time.perf_counter()
        page = await self._http.get(address)
        taken = Taken(page, self._requests() - before, time.perf_counter() - began)
        milliseconds, size = taken.seconds * 1000, len(page.content)
        print(f"{address}: {taken.requests} requests, {milliseconds:.0f} ms, {size:,} bytes")
        assert page.status_code == 200
        return taken

    def _requests(self) -> int:
        return sum(done.count for done in self._client.metrics().requests.values())


@pytest.fixture
async def measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Measured]:
    for module, seconds in (("census", 0.1), ("cache", 0.15), ("reads", 0.2)):  # as in production
        monkeypatch.setattr(f"aiopersist.web.{module}.WAIT_S", seconds)
    async with ap.open(folder, readonly=True) as client, pages(client) as http:
        yield Measured(client, http)


async def test_the_list_of_many_shards_is_there_before_they_are_read(measured: Measured) -> None:
    while "The names are being read" in (taken := await measured.get("/")).page.text:
        await asyncio.sleep(0.3)
    read = re.search(r"([\d,]+) of ([\d,]+) shards were read so far", words(taken.page))
    assert read
    assert int(read[1].replace(",", "")) < SHARDS
    assert taken.page.text.count("<tr>") <= 60 + 20
    for address in ("/?page=100", "/?q=0777", "/?sort=bytes", "/?sort=growth"):
        await measured.get(address)
    while "by now" in (taken := await measured.get("/?sort=updates")).page.text:
        await asyncio.sleep(2)
    assert taken.page.text.index("events") < taken.page.text.index("shard/")
    await asyncio.sleep(5)
    assert (await measured.get("/")).requests <= TWO_LOOKS


async def test_the_picture_of_many_batches(measured: Measured) -> None:
    while "Reading the state" in (await measured.get("/shard?name=events")).page.text:
        await asyncio.sleep(0.3)
    taken = await measured.get("/shard?name=events")
    assert taken.requests <= 8
    assert 500 <= taken.page.text.count('class="box') <= 1000
    assert len(taken.page.content) < 250_000


async def test_a_page_of_many_rows(measured: Measured) -> None:
    while not rows_of((await measured.get("/contents?name=events&at=1")).page):  # the state, and imports
        await asyncio.sleep(0.3)
    await asyncio.sleep(5)
    for query in ("", "&at=500", "&how=from&key=7654321", "&how=is&key=5000000", "&changes=1&since=990"):
        address, requests = f"/contents?name=events{query}", 0
        while "Reading, for" in (taken := await measured.get(address)).page.text:  # the machine is busy
            requests += taken.requests
            await asyncio.sleep(0.3)
        assert len(rows_of(taken.page)) == (1 if "is" in query.split("how=")[-1] else 50)
        assert requests + taken.requests <= 16
