"""Stores by obstore: their requests, their places, their clock."""

import asyncio
import os
from collections import Counter

import pytest

import aiopersist as ap
from aiopersist.base.errors import InvalidLocation, StorageUnavailable
from aiopersist.base.runtime import Runtime
from aiopersist.storage.clouds import bucket as bucket_module
from aiopersist.storage.clouds.blob import CloudBlob
from aiopersist.storage.clouds.client import PART_BYTES
from aiopersist.storage.clouds.date import date_of
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.objects.bucket import Tagged
from aiopersist.storage.urls import open_blob, open_consensus
from aiopersist.testing.storage.heads import grow
from tests.storage.answers_kit import answering
from tests.storage.gcs_stand_in import StandIn
from tests.storage.objects_kit import bucket_of
from tests.support.obstore_s3 import by_obstore

# --- requests ------------------------------------------------------------------------------------


async def test_requests_of_a_blob_store(google: StandIn) -> None:
    blob = open_blob(google.url("p"))
    await blob.set("k", b"x" * PART_BYTES)
    await blob.get("k")
    await blob.get_range("k", 5, 10)
    await blob.get("absent")
    assert [item async for item in blob.list("")] == [("k", PART_BYTES)]
    await blob.delete(["k", "l"])
    assert Counter(google.requests) == {
        "PUT object": 1,
        "GET object": 3,
        "GET bucket": 1,
        "DELETE object": 2,
    }
    google.requests.clear()
    await blob.set("big", b"x" * (2 * PART_BYTES + 1))
    assert Counter(google.requests) == {"POST object": 2, "PUT object": 3}
    await blob.aclose()


async def test_requests_of_consensus(google: StandIn) -> None:
    """Goal: as on S3: a commit is a creation and a list; a head is a list and a get."""
    one, other = open_consensus(google.url("p")), open_consensus(google.url("p"))
    await grow(one, "k", 3)
    google.requests.clear()
    assert await one.compare_and_set("k", 2, b"3")
    assert google.requests == ["PUT object", "GET bucket"]
    google.requests.clear()
    assert await other.head("k") == Versioned(3, b"3")
    assert google.requests == ["GET bucket", "GET object"]
    google.requests.clear()
    assert await one.compare_and_set("k", 3, b"4")
    google.requests.clear()
    assert await other.compare_and_set("k", 3, b"x") is False
    assert google.requests == ["PUT object", "GET object"]
    await one.aclose()
    await other.aclose()


async def test_heads_of_many_pass_nothing_else(google: StandIn) -> None:
    """Goal: a list for many keys ends behind them, however much follows."""
    one, other = (open_consensus(google.url("p")) for _ in range(2))
    keys = [f"name/{n}" for n in range(10)]
    for key in keys:
        assert await one.compare_and_set(key, None, b"0")
    for number in range(2500):
        google._written(f"p/kshard%2Fs/v/{number:016x}", b"")
    google.requests.clear()
    assert await other.heads(dict.fromkeys(keys, 0)) == {}
    assert google.requests == ["GET bucket"]
    await one.aclose()
    await other.aclose()


async def test_a_list_that_is_wanted_in_part_ends_early(google: StandIn) -> None:
    """Goal: the newest version costs one request, however long the log is."""
    consensus = open_consensus(google.url("p"))
    bucket = bucket_of(consensus)
    for number in range(2500):
        google._written(f"p/a/{number:04}", b"")
    assert [found.name for found in await bucket.find("a/", limit=2)] == ["a/0000", "a/0001"]
    assert google.requests == ["GET bucket"]
    google.requests.clear()
    assert len(await bucket.find("a/")) == 2500
    assert google.requests == ["GET bucket"] * 3
    assert [found.name for found in await bucket.find("a/", after="a/2498")] == ["a/2499"]
    await consensus.aclose()


async def test_all_answers_show_the_same_tag(azure_url: str, best_s3_url: str, gcs_url: str) -> None:
    """Goal: servers quote it in one and not in the other: a head would never be found, or always be read."""
    urls = best_s3_url, by_obstore(best_s3_url), azure_url, gcs_url
    for number, url in enumerate(urls):  # the first two are one place
        consensus = open_consensus(url)
        bucket, name = bucket_of(consensus), f"{number}/b"
        created = await bucket.create(name, b"x")
        assert await bucket.create(name, b"y") is None
        found = await bucket.get(name)
        assert found is not None and found.tag and found.tag == created
        assert await bucket.find(f"{number}/") == [Tagged(name, found.tag)]
        await consensus.aclose()


async def test_azurite_ignores_where_a_list_begins(azure_url: str) -> None:
    """Goal: what comes back is filtered."""
    consensus = open_consensus(azure_url)
    bucket = bucket_of(consensus)
    for name in ("a/1", "a/2", "a/3"):
        await bucket.create(name, b"")
    assert [found.name for found in await bucket.find("a/", after="a/1", limit=1)] == ["a/2"]
    assert [found.name for found in await bucket.find("a/", after="a/2")] == ["a/3"]
    await consensus.aclose()


# --- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("az://", "names no container"),
        ("az://c/p", "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://c/p?account=a&account_key=hunter2!", "not in base64"),
        ("az://c/p?account=a&region=x", "unknown option 'region'"),
        ("az://c/a//b?account=a", "the prefix"),
        ("gs://user:hunter2@b/p", "names no bucket"),
        ("gs://b/p?endpoint=hunter2", "endpoint"),
        ("gs://b/p?service_account=/nowhere/hunter2.json", "cannot be read"),
        ("obstore://b/p?access_key=hunter2", "go together"),
    ],
)
def test_urls_that_cannot_be_used(url: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE")]:
        monkeypatch.delenv(name)
    for opens in (open_blob, open_consensus):
        with pytest.raises(InvalidLocation, match=match) as caught:
            opens(url)
        assert "hunter2" not in str(caught.value)


async def test_no_secret_is_shown() -> None:
    for url in (
        "az://c/p?account=a&account_key=aHVudGVyMg==",
        "az://c/p?account=a&sas_token=sig=aHVudGVyMg",
        "gs://b/p?bearer_token=aHVudGVyMg",
        "obstore://b/p?access_key=aHVudGVyMg&secret_key=aHVudGVyMg",
    ):
        blob, consensus = open_blob(url), open_consensus(url)
        shown = f"{blob!r} {consensus!r} {await blob.facts()} {await consensus.facts()}"
        assert "aHVudGVyMg" not in shown and "://" in shown
        await blob.aclose()
        await consensus.aclose()


async def test_names_in_azure_keep_their_characters(azure_url: str) -> None:
    """Goal: the store takes a backslash for a slash, and `%5C` must not become one."""
    blob = open_blob(azure_url)
    keys = ["a/b", "a\\b", "a%5Cb", "a%255Cb", "a b#?&+~"]
    for key in keys:
        await blob.set(key, key.encode())
    assert sorted([key async for key, _ in blob.list("a")]) == sorted(keys)
    assert [await blob.get(key) for key in keys] == [key.encode() for key in keys]
    await blob.aclose()
    assert isinstance(blob, CloudBlob)


async def test_a_store_that_ignores_conditions_is_refused(google: StandIn) -> None:
    google.knows_conditions = False
    with pytest.raises(InvalidLocation, match="ignores"):
        await ap.open(google.url("p"))
    blob = f"{google.url('q')}"
    async with ap.open(blob=blob, consensus="mem://") as client:  # with another consensus store it will do
        await client.ping()
    assert (await open_blob(blob).probe()) == {"conditional puts": "no"}
    google.knows_conditions = True
    assert (await open_blob(blob).probe()) == {"conditional puts": "yes"}
    assert not [name for name in google.stored if "probe/" in name and name.startswith("q/")]


# --- the clock -----------------------------------------------------------------------------------


async def test_the_clock_is_asked_for_once_a_minute(google: StandIn) -> None:
    class Later(Runtime):
        ahead_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.ahead_s

    runtime = Later()
    consensus = open_consensus(google.url("p"), runtime=runtime)
    told = await asyncio.gather(*(consensus.now() for _ in range(5)))
    assert all(abs(now - Runtime().wall()) < 30 for now in told)
    await consensus.now()
    assert google.requests == ["GET bucket"]
    assert 0 < consensus.clock_error_s <= 15
    runtime.ahead_s = 61.0
    assert abs(await consensus.now() - Runtime().wall()) < 30, "the clock of a machine that slept stood still"
    assert google.requests == ["GET bucket"] * 4, "three answers have to agree that it was set"
    await consensus.clock()
    assert google.requests == ["GET bucket"] * 5
    await consensus.aclose()


async def test_a_clock_that_does_not_answer(google: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what was told before goes on for a while; without that it is an error."""

    async def fails(url: str, scheme: str) -> str:
        raise StorageUnavailable("no answer")

    known, unknown = open_consensus(google.url("p")), open_consensus(google.url("p"))
    now = await known.now()
    monkeypatch.setattr(bucket_module, "date_of", fails)
    monkeypatch.setattr(bucket_module, "CLOCK_FRESH_S", -1.0)
    assert abs(await known.now() - now) < 30
    for ask in (unknown.now(), unknown.clock(), known.clock()):
        with pytest.raises(StorageUnavailable):
            await ask
    await known.aclose()
    await unknown.aclose()


async def test_whose_date_counts(unused_tcp_port: int) -> None:
    """Goal: only the store's own: it has the id of a request, or what a store writes."""
    date = "Thu, 01 Jan 2026 00:00:00 GMT"

    def answer(status: int, body: str, *headers: str) -> bytes:
        told = "".join(f"{header}\r\n" for header in (f"Date: {date}", *headers))
        return f"HTTP/1.1 {status} x\r\n{told}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    refused, shown = "<Error><Code>AccessDenied</Code></Error>", "<?xml version='1.0'?><ListBucketResult>"
    for status in (200, 400, 403, 503):
        async with answering(b"") as (at, served):
            for own in (
                answer(status, "", "x-ms-request-id: 1"),
                answer(status, refused),
                answer(status, shown),
            ):
                served.answer = own
                assert await date_of(at, "az") == date
            for other in (answer(status, ""), answer(status, "<html>"), answer(status, refused[:-3])):
                served.answer = other
                with pytest.raises(StorageUnavailable, match="not the store's") as caught:
                    await date_of(at, "az")
                assert caught.value.retry
    undated = b"HTTP/1.1 200 x\r\nx-amz-request-id: 1\r\nContent-Length: 0\r\n\r\n"
    async with answering(undated) as (elsewhere, _):
        moved = answer(307, "", f"Location: {elsewhere}", "x-amz-request-id: 2")
        async with answering(moved) as (at_first, _):
            assert await date_of(at_first, "az") == date, "another server has another clock"
        with pytest.raises(StorageUnavailable, match="no Date") as caught:
            await date_of(elsewhere, "az")
        assert not caught.value.retry
    with pytest.raises(StorageUnavailable, match="clock") as caught:
        await date_of(f"http://127.0.0.1:{unused_tcp_port}", "az")
    assert caught.value.retry


async def test_the_clock_of_azurite(azure_url: str) -> None:
    consensus = open_consensus(azure_url)
    assert abs(await consensus.now() - Runtime().wall()) < 30
    await consensus.aclose()


# --- beside the other driver of S3 ---------------------------------------------------------------


async def test_both_drivers_of_s3_read_and_write_the_same_objects(best_s3_url: str) -> None:
    """Goal: a location may change its driver at any time."""
    one, two = open_blob(best_s3_url), open_blob(by_obstore(best_s3_url))
    keys = ["a/b", "a\\b", "a%5Cb", "a b#?&+~", "a/%2F"]
    for writes, reads in ((one, two), (two, one)):
        for key in keys:
            await writes.set(key, key.encode())
        assert [await reads.get(key) for key in keys] == [key.encode() for key in keys]
        assert sorted([key async for key, _ in reads.list("a")]) == sorted(keys)
        await reads.delete(keys)
    for store in (one, two):
        await store.aclose()
    for number, url in enumerate([best_s3_url, by_obstore(best_s3_url), best_s3_url]):
        async with ap.open(url) as client:
            table = client.table("größe/x", key=str, val=int)
            assert await table.get("k") == (number or None)
            await table.put("k", number + 1)
