"""Something between this library and a real store answers in its place, or changes its answers."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from email.utils import formatdate
from itertools import cycle
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from tests.storage.answers_kit import PAGES, foreign
from tests.storage.http_proxy import Got, HttpProxy, Sent, http_proxy
from tests.support.obstore_s3 import by_obstore
from tests.support.schemas import SCHEMA

DAY = 86400
STATUSES = (403, 404, 408, 412, 429, 500, 502, 503, 504)


class Way(NamedTuple):
    """A proxy before a store, the URL through it, and the one around it."""

    proxy: HttpProxy
    url: str
    direct: str


KINDS = pytest.mark.parametrize("kind", ["s3", "obstore", "az", "gs"])


@pytest.fixture
def url(request: pytest.FixtureRequest, kind: str) -> str:
    """An empty place in a store of that kind."""
    fixture = {"az": "azure_url", "gs": "gcs_url"}.get(kind, "best_s3_url")
    found: str = request.getfixturevalue(fixture)
    return by_obstore(found) if kind == "obstore" else found


@pytest.fixture
async def way(url: str) -> AsyncIterator[Way]:
    async with http_proxy(url) as (proxy, through):
        yield Way(proxy, through, url)


def is_commit(sent: Sent) -> bool:
    return sent.method == "PUT" and "/v/" in sent.target


# --- answers -------------------------------------------------------------------------------------


@KINDS
async def test_an_answer_after_the_fact_costs_nothing(way: Way) -> None:
    """Goal: what was carried out is told as done, once, whatever something between says of it."""
    proxy, url, _ = way
    answers = [foreign(status, page) for status, page in zip(STATUSES, cycle(PAGES), strict=False)]
    left: list[bytes] = []

    def after(sent: Sent, got: Got) -> bytes:
        return left.pop() if left and is_commit(sent) and got.status in (200, 201) else got.head + got.body

    proxy.after = after
    async with ap.open(url, maintenance=False) as client, client.writer("w", SCHEMA) as w:
        table = client.table("t", key=str, val=int)
        await table.put("n", 0)
        for number, answer in enumerate(answers):
            left.append(answer)
            await table.insert(f"new {number}", number)
            left.append(answer)
            await client.transact(lambda tx: _one_more(tx, table))
            left.append(answer)
            await w.write([("a", number)])
            left.append(answer)
            await w.compare_and_append([("c", number, number * 2 + 1, 1)], number * 2 + 1, number * 2 + 2)
            assert not left
        assert await table.get("n") == len(answers)
    async with ap.open(url, maintenance=False) as client, client.reader("w") as r, r.snapshot() as s:
        rows = await s.rows()
    assert sorted(rows) == sorted((key, n, 1) for key in "ac" for n in range(len(answers)))


async def _one_more(tx: Any, table: Any) -> None:
    tx.put(table, "n", await tx.get(table, "n") + 1)


# --- tags ----------------------------------------------------------------------------------------


def with_tags(change: Callable[[bytes], bytes]) -> Callable[[Sent, Got], bytes]:
    """Change the ETag of each object that is read."""

    def after(sent: Sent, got: Got) -> bytes:
        is_object = sent.method == "GET" and b"<ListBucketResult" not in got.body
        head = re.sub(rb"(?i)(\r\netag: )([^\r]*)", lambda m: m[1] + change(m[2]), got.head)
        return (head if is_object else got.head) + got.body

    return after


@pytest.mark.parametrize("kind", ["s3", "obstore"])
async def test_weak_tags_are_those_of_lists(way: Way) -> None:
    """Goal: a proxy that compresses calls them weak, and no read would ever end."""
    proxy, through, around = way
    async with ap.open(around, maintenance=False) as client:
        await client.table("t", key=str, val=int).put("k", 1)
    proxy.after = with_tags(lambda tag: b"W/" + tag)
    async with ap.open(through, maintenance=False) as client:
        assert await client.table("t", key=str, val=int).get("k") == 1
        await client.table("t", key=str, val=int).put("k", 2)
        assert await client.table("t", key=str, val=int).get("k") == 2


@pytest.mark.parametrize("kind", ["s3", "obstore"])
async def test_tags_that_differ_for_good_are_an_error(way: Way) -> None:
    """Goal: it names the object and both tags, after `retry_timeout_s`; it asks as often as for any other
    failure, and not as fast as it can."""
    proxy, through, around = way
    async with ap.open(around, maintenance=False) as other, other.writer("w", SCHEMA) as w:
        settings = ap.Settings(retry_timeout_s=0.5)
        async with ap.open(through, maintenance=False, settings=settings) as client:
            await w.write([("k", 1)])
            proxy.after = with_tags(lambda tag: b'"other"')
            before = len(proxy.sent)
            with pytest.raises(ap.StorageUnavailable, match=r"/v/\w+ is listed with the ETag .*'other'"):
                async with asyncio.timeout(60):
                    await client.admin.inspect("w")
            assert len(proxy.sent) - before < 2000
            for ask in (client._stack.consensus.scan, client._stack.consensus.versions):
                with pytest.raises(ap.StorageUnavailable, match="is listed with the ETag"):
                    await ask(await _key_of(client), 0, 10)


async def _key_of(client: ap.Client) -> str:
    keys = await client._stack.consensus.list_keys("shard/")
    return keys[0]


# --- dates ---------------------------------------------------------------------------------------


def dated(got: Got, date: str) -> bytes:
    """The answer with another date."""
    return re.sub(rb"(?i)(\r\ndate: )[^\r]*", rb"\g<1>" + date.encode(), got.head) + got.body


@KINDS
async def test_the_date_of_a_foreign_answer_sets_no_clock(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: an error page dated a year ahead would move the times of tables there, for good."""
    proxy, url, _ = way
    ahead = formatdate(SYSTEM.wall() + 400 * DAY, usegmt=True)
    is_out = False
    proxy.instead = lambda sent: foreign(502, "page", f"Date: {ahead}") if is_out else None

    async def more(requests: int) -> None:
        while len(proxy.sent) < requests:
            await asyncio.sleep(0.01)

    async with ap.open(url, maintenance=False) as client, client.writer("w", SCHEMA) as w:
        table = client.table("t", key=str, val=int)
        first = await table.put("k", 1)
        await w.write([("a", 1)])
        is_out = True
        asked = asyncio.gather(client._stack.consensus.clock(), w.write([("a", 2)]))
        await more(len(proxy.sent) + 6)
        put = asyncio.ensure_future(table.put("k", 2))
        await more(len(proxy.sent) + 6)
        is_out = False
        second = await put
        await asked
        assert first < second < first + DAY * 1_000_000
        assert abs(client.clock()[0] - SYSTEM.wall()) < 60
        assert await table.get("k", as_of=second) == 2
    assert "the clock of the store was set" not in caplog.text


@pytest.mark.parametrize("kind", ["s3", "obstore"])
async def test_a_great_step_of_the_store_itself_is_not_believed(
    way: Way, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: also with the ids of the store in the answers, as a proxy passes them on with its own date."""
    proxy, url, _ = way
    async with ap.open(url, maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        first = await table.put("k", 1)
        dates = [formatdate(SYSTEM.wall() + 400 * DAY, usegmt=True), "Sat, 01 Jan 99999 00:00:00 GMT"]
        dates += ["Sat, 01 Jan 0000 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 GMT", "never"]
        for number, date in enumerate(dates):
            proxy.after = lambda sent, got, date=date: dated(got, date)
            for _ in range(4):
                second = await table.put("k", number)
                await client._stack.consensus.clock()
            assert second < first + DAY * 1_000_000
            assert abs(await client._stack.consensus.now() - SYSTEM.wall()) < 60
    refused = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert refused and all("not believed" in record.getMessage() for record in refused)
    assert len(refused) < 5
