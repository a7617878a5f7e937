"""Stores by obstore: the meaning of errors, lost answers, cancellation."""

import asyncio
import gc
import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from urllib.parse import urlsplit

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.storage.clouds import places
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.objects.bucket import Bucket
from aiopersist.storage.urls import open_blob, open_consensus
from aiopersist.testing.azure import AzureServer
from aiopersist.testing.proxy import TcpProxy
from aiopersist.testing.storage.heads import grow
from tests.storage.answers_kit import failure, outcome_of
from tests.storage.gcs_stand_in import StandIn
from tests.storage.objects_kit import bucket_of
from tests.support import obstore_s3 as obstore_s3  # the scheme

AT = {
    "az": "az://container/p?account=a&account_key=a2V5&endpoint={}/a",
    "gs": "gs://bucket/p?bearer_token=t&endpoint={}",
    "obstore": "obstore://bucket/p?access_key=a&secret_key=b&endpoint={}",
}
SCHEMES = pytest.mark.parametrize("scheme", AT)


GONE, LATER, UNKNOWN = (StorageUnavailable, False), (StorageUnavailable, True), (Indeterminate, None)


@SCHEMES
@pytest.mark.parametrize(
    ("status", "code", "read", "write"),
    [
        (b"404", b"NoSuchKey", None, GONE),
        (b"404", b"NoSuchBucket", GONE, GONE),
        (b"404", b"ContainerNotFound", GONE, GONE),
        (b"401", b"InvalidAuthenticationInfo", GONE, GONE),
        (b"403", b"AccessDenied", GONE, GONE),
        (b"409", b"ContainerBeingDeleted", LATER, LATER),
        (b"409", b"ExistingObjectIsDirectory", LATER, LATER),
        (b"429", b"TooManyRequests", LATER, LATER),
        (b"500", b"InternalError", LATER, UNKNOWN),
        (b"503", b"ServerBusy", LATER, LATER),
        (b"507", b"InsufficientStorage", GONE, GONE),
        (b"400", b"RequestTimeout", LATER, LATER),
        (b"400", b"InvalidRequest", GONE, GONE),
    ],
    ids=str,
)
async def test_errors_by_what_they_mean(
    scheme: str,
    status: bytes,
    code: bytes,
    read: tuple[type, bool] | None,
    write: tuple[type, bool | None],
) -> None:
    """Goal: and nothing is sent twice."""
    for call, expected in ((lambda b: b.get("k"), read), (lambda b: b.set("k", b""), write)):
        outcome, requests = await outcome_of(
            failure(status, code), lambda at: open_blob(AT[scheme].format(at)), call
        )
        assert requests == 1
        if expected is None:
            assert outcome is None
        else:
            assert (type(outcome), getattr(outcome, "retry", None)) == expected, outcome
            told = rf"{re.escape(scheme)}://\w+/.*: \w+: {status.decode()} {code.decode()}$"
            assert re.match(told, str(outcome))
            assert "127.0.0.1" not in str(outcome)


async def is_created(bucket: Bucket) -> bool:
    return await bucket.create("k", b"x") is not None


@SCHEMES
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (b"412", b"PreconditionFailed", False),
        (b"409", b"BlobAlreadyExists", False),
        (b"409", b"ConditionalRequestConflict", LATER),
        (b"409", b"ContainerBeingDeleted", LATER),
        (b"500", b"InternalError", UNKNOWN),
    ],
    ids=str,
)
async def test_what_a_refused_creation_means(
    scheme: str, status: bytes, code: bytes, expected: object
) -> None:
    """Goal: the driver takes each conflict for an object that is there, and some say nothing about it."""
    outcome, requests = await outcome_of(
        failure(status, code),
        lambda at: open_consensus(AT[scheme].format(at)),
        lambda consensus: is_created(bucket_of(consensus)),
    )
    found = outcome if isinstance(outcome, bool) else (type(outcome), getattr(outcome, "retry", None))
    assert (found, requests) == (expected, 1)


@SCHEMES
async def test_no_server(scheme: str, unused_tcp_port: int) -> None:
    blob = open_blob(AT[scheme].format(f"http://127.0.0.1:{unused_tcp_port}"))
    calls: list[Callable[[], Awaitable[object]]] = [
        partial(blob.get, "k"),
        partial(blob.set, "k", b"x"),
        partial(blob.delete, ["k"]),
    ]
    for call in calls:
        with pytest.raises(StorageUnavailable) as caught:
            await call()
        assert caught.value.retry
    await blob.aclose()


@SCHEMES
@pytest.mark.parametrize("how", ["cut", "slow"])
async def test_an_answer_that_does_not_come(scheme: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "READ_TIMEOUT", timedelta(seconds=0.2))

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if how == "slow":
            await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = AT[scheme].format(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    consensus, blob = open_consensus(url), open_blob(url)
    with pytest.raises(Indeterminate):
        await bucket_of(consensus).create("k", b"x")
    with pytest.raises(Indeterminate):
        await blob.delete(["k"])
    for read in (blob.get("k"), bucket_of(consensus).find("a/")):
        with pytest.raises(StorageUnavailable) as caught:
            await read
        assert caught.value.retry
    await consensus.aclose()
    await blob.aclose()
    server.close()


async def test_a_creation_whose_answer_is_lost(azure_server: AzureServer, azure_url: str) -> None:
    """Goal: it is told that its outcome is unknown, and a look tells it."""
    there = urlsplit(azure_server.endpoint)
    async with TcpProxy(str(there.hostname), int(there.port or 80)) as proxy:
        consensus = open_consensus(azure_url.replace(there.netloc, f"{proxy.host}:{proxy.port}"))
        await grow(consensus, "k", 1)
        lost = proxy.swallow_answers_then_cut(lambda answer: b"HTTP/1.1 201" in answer)
        with pytest.raises(Indeterminate):
            await consensus.compare_and_set("k", 0, b"1")
        await lost
        assert await consensus.head("k") == Versioned(1, b"1")
        await consensus.aclose()


async def test_writes_whose_answers_are_lost(azure_server: AzureServer, azure_url: str) -> None:
    """Goal: each is settled, and is there once."""
    there, schema = urlsplit(azure_server.endpoint), ap.Schema(key=str, val=int)
    async with TcpProxy(str(there.hostname), int(there.port or 80)) as proxy:
        way = azure_url.replace(there.netloc, f"{proxy.host}:{proxy.port}")
        async with ap.open(way) as client, client.writer("t", schema) as w:
            for number in range(5):
                lost = proxy.swallow_answers_then_cut(lambda answer: b"HTTP/1.1 201" in answer)
                await w.write([("k", number)])
                await lost
    async with ap.open(azure_url) as client, client.reader("t", schema) as r, r.snapshot() as s:
        assert sorted(val for _, val, _ in await s.rows()) == list(range(5))


async def test_a_cancelled_list_ends_by_itself(google: StandIn, capfd: pytest.CaptureFixture[str]) -> None:
    """Goal: the driver panics where a list is dropped whose answer has come and was not read."""
    for number in range(10):
        bucket = bucket_of(consensus := open_consensus(google.url("p")))
        google.answers.clear()
        looking = asyncio.ensure_future(bucket.find("a/"))
        while len(google.requests) <= number:
            await asyncio.sleep(0.001)
        looking.cancel()
        try:
            await looking
        except asyncio.CancelledError as error:
            kept: BaseException | None = error  # and what its frames know: the list
        google.answers.set()
        await asyncio.sleep(0.02)
        del looking
        kept = None
        gc.collect()
        await consensus.aclose()
        assert kept is None and not bucket._client._abandoned
    assert "panicked" not in capfd.readouterr().err
