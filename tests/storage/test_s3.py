"""S3: one request for a small value, the meaning of errors, damage told from absence."""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from urllib.parse import urlsplit

import pytest
from aiobotocore.session import AioSession

from aiopersist.base.errors import Corruption, Indeterminate, StorageUnavailable
from aiopersist.storage.s3 import client as s3_client
from aiopersist.storage.s3.blob import PART_BYTES, S3Blob
from aiopersist.storage.urls import open_blob
from aiopersist.testing import servers
from aiopersist.testing.proxy import TcpProxy
from tests.conftest import S3_LABELS
from tests.storage.answers_kit import failure, outcome_of


class Counting:
    """Counts the requests of a blob store to its driver."""

    def __init__(self, blob: S3Blob) -> None:
        self.calls: Counter[str] = Counter()
        self._real = blob._client.s3
        blob._client.s3 = self

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.calls[name] += 1
        method: Callable[..., object] = getattr(self._real, name)
        return method


@pytest.fixture
async def blob(best_s3_url: str) -> AsyncIterator[S3Blob]:
    blob = open_blob(best_s3_url)
    assert isinstance(blob, S3Blob)
    yield blob
    await blob.aclose()


@pytest.mark.parametrize("moment", ["loading", "making"])
async def test_a_client_that_is_made_while_the_store_closes_is_closed(
    best_s3_url: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: its connections would stay open, and nobody could close them."""
    blob, begun, goes_on = open_blob(best_s3_url), asyncio.Event(), asyncio.Event()
    assert isinstance(blob, S3Blob)
    made: Counter[str] = Counter()
    new_client, loop, load = blob._client._new_client, asyncio.get_running_loop(), s3_client._load

    @contextlib.asynccontextmanager
    async def counted(session: AioSession) -> AsyncIterator[object]:
        if moment == "making":
            begun.set()
            await goes_on.wait()
        async with new_client(session) as client:
            made["opened"] += 1
            yield client
            made["closed"] += 1

    def loads(session: AioSession) -> None:
        if moment == "loading":
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result()
        load(session)

    monkeypatch.setattr(blob._client, "_new_client", counted)
    monkeypatch.setattr(s3_client, "_load", loads)
    reading = asyncio.ensure_future(blob.get("k"))
    await begun.wait()
    closing = asyncio.ensure_future(blob.aclose())
    for _ in range(5):
        await asyncio.sleep(0)
    goes_on.set()
    await closing
    await asyncio.wait([reading])
    reading.exception()  # seen
    assert made["opened"] == made["closed"]
    assert made["opened"] == (moment == "making")


async def test_requests(blob: S3Blob) -> None:
    await blob.set("warm", b"x")
    counting = Counting(blob)
    await blob.set("k", b"x" * PART_BYTES)
    await blob.get("k")
    await blob.get_range("k", 5, 10)
    await blob.get("absent")
    await blob.delete(["k", "l", "m"])
    [item async for item in blob.list("")]
    assert counting.calls == {"put_object": 1, "get_object": 3, "delete_objects": 1, "list_objects_v2": 1}


async def test_a_large_value_goes_in_parts(blob: S3Blob) -> None:
    await blob.set("warm", b"x")
    counting = Counting(blob)
    await blob.set("big", b"x" * (2 * PART_BYTES + 1))
    assert counting.calls == {"create_multipart_upload": 1, "upload_part": 3, "complete_multipart_upload": 1}


async def test_an_upload_that_fails_is_aborted(blob: S3Blob, monkeypatch: pytest.MonkeyPatch) -> None:
    await blob.set("warm", b"x")
    real = blob._client.s3.upload_part
    reached: set[object] = set()

    async def upload_part(**request: object) -> object:
        if request["PartNumber"] == 2:
            reached.add(2)
            await asyncio.Event().wait()
        answer = await real(**request)
        reached.add(request["PartNumber"])
        return answer

    monkeypatch.setattr(blob._client.s3, "upload_part", upload_part)
    task = asyncio.create_task(blob.set("big", b"x" * (3 * PART_BYTES)))
    async with asyncio.timeout(50):
        while reached != {1, 2, 3}:
            await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.gather(*blob._aborting)
    found = await blob._client.s3.list_multipart_uploads(
        Bucket=blob._client.bucket, Prefix=blob._client.prefix
    )
    assert found.get("Uploads", []) == []
    assert await blob.get("big") is None


@pytest.mark.parametrize("completes", [False, True])
async def test_a_completion_whose_answer_is_empty(
    blob: S3Blob, monkeypatch: pytest.MonkeyPatch, completes: bool
) -> None:
    """Goal: a status of 200 alone does not say that an upload was completed."""
    await blob.set("warm", b"x")
    real = blob._client.s3.complete_multipart_upload

    async def complete(**request: object) -> object:
        return await real(**request) and {} if completes else {}

    monkeypatch.setattr(blob._client.s3, "complete_multipart_upload", complete)
    data = b"x" * (PART_BYTES + 1)
    if completes:
        await blob.set("big", data)
    else:
        with pytest.raises(Indeterminate):
            await blob.set("big", data)
    assert await blob.get("big") == (data if completes else None)


@pytest.mark.parametrize(
    "change",
    [
        lambda url: url.replace("s3://", "s3://no-such-", 1),
        lambda url: url + "&access_key=nobody&secret_key=hunter2",
    ],
    ids=["no such bucket", "forbidden"],
)
async def test_waiting_does_not_help(best_s3_url: str, change: Callable[[str], str]) -> None:
    blob = open_blob(change(best_s3_url))
    if "nobody" in change("") and not servers.is_real(S3_LABELS[0]):
        pytest.skip("a simulated server lets anybody in")
    calls = (
        partial(blob.get, "k"),
        partial(blob.get_range, "k", 0, 1),
        partial(blob.set, "k", b"x"),
        partial(blob.delete, ["k"]),
    )
    for call in calls:
        with pytest.raises(StorageUnavailable) as caught:
            await call()
        assert not caught.value.retry
        assert "hunter2" not in str(caught.value) + repr(blob)
    await blob.aclose()


async def test_no_server(unused_tcp_port: int) -> None:
    blob = open_blob(
        f"s3://b/p?endpoint=http://127.0.0.1:{unused_tcp_port}&region=us-east-1&access_key=a&secret_key=b"
    )
    for call in (blob.get("k"), blob.set("k", b"x"), blob.delete(["k"])):
        with pytest.raises(StorageUnavailable) as caught:
            await call
        assert caught.value.retry
    await blob.aclose()


async def test_a_write_whose_answer_is_lost(best_s3_url: str) -> None:
    """The connection is cut after the request: the driver repeats it if HTTP allows, or the outcome is
    unknown."""
    endpoint = urlsplit(best_s3_url.partition("endpoint=")[2].partition("&")[0])
    async with TcpProxy(str(endpoint.hostname), int(endpoint.port or 80)) as proxy:
        blob = open_blob(
            best_s3_url.replace(f"{endpoint.hostname}:{endpoint.port}", f"{proxy.host}:{proxy.port}")
        )
        await blob.set("warm", b"x")
        lost = proxy.swallow_answers_then_cut(lambda answer: b"HTTP/1.1 200" in answer)
        with contextlib.suppress(Indeterminate):
            await blob.set("k", b"x")
        with contextlib.suppress(asyncio.CancelledError):
            await lost
        assert await blob.get("k") == b"x"
        await blob.aclose()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: binary/octet-stream\r\n"


async def against(answer: bytes, call: Callable[[S3Blob], Awaitable[object]]) -> tuple[object, int]:
    """The outcome of a call to a server that always gives this answer, and the number of requests."""
    return await outcome_of(
        answer, lambda at: open_blob(f"s3://b?endpoint={at}&region=us-east-1&access_key=a&secret_key=b"), call
    )


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Content-Length: 5\r\nx-amz-checksum-crc32: AAAAAA==\r\n\r\nhello",
        HEAD + b"Content-Length: 9\r\nConnection: close\r\n\r\nhello",
    ],
    ids=["checksum", "length"],
)
async def test_damage_is_read_three_times(answer: bytes) -> None:
    outcome, requests = await against(answer, lambda blob: blob.get("k"))
    assert isinstance(outcome, Corruption)
    assert requests == 3


@pytest.mark.parametrize(
    ("status", "code", "read", "write"),
    [
        (b"404", b"NoSuchKey", None, (StorageUnavailable, False)),
        (b"404", b"NoSuchBucket", (StorageUnavailable, False), (StorageUnavailable, False)),
        (b"403", b"AccessDenied", (StorageUnavailable, False), (StorageUnavailable, False)),
        (b"507", b"InsufficientStorage", (StorageUnavailable, False), (StorageUnavailable, False)),
        (b"503", b"SlowDown", (StorageUnavailable, True), (StorageUnavailable, True)),
        (b"500", b"InternalError", (StorageUnavailable, True), (Indeterminate, None)),
        (b"400", b"RequestTimeout", (StorageUnavailable, True), (StorageUnavailable, True)),
        (b"400", b"InvalidRequest", (StorageUnavailable, False), (StorageUnavailable, False)),
    ],
    ids=str,
)
async def test_errors_by_what_they_mean(
    status: bytes, code: bytes, read: tuple[type, bool] | None, write: tuple[type, bool | None]
) -> None:
    for call, expected in ((lambda b: b.get("k"), read), (lambda b: b.set("k", b""), write)):
        outcome, requests = await against(failure(status, code), call)
        assert requests == 1
        if expected is None:
            assert outcome is None
        else:
            assert (type(outcome), getattr(outcome, "retry", None)) == expected
            assert re.match(rf"s3://\w+/.*: (get|set): {status.decode()} {code.decode()}$", str(outcome))


async def test_a_server_that_knows_no_ranges() -> None:
    whole = HEAD + b"Content-Length: 10\r\n\r\n0123456789"
    assert (await against(whole, lambda blob: blob.get_range("k", 2, 3)))[0] == b"234"


async def test_the_error_of_one_key_of_several() -> None:
    body = b"<DeleteResult><Error><Key>k</Key><Code>AccessDenied</Code></Error></DeleteResult>"
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    outcome, _ = await against(answer, lambda blob: blob.delete(["k"]))
    assert isinstance(outcome, StorageUnavailable) and not outcome.retry
    assert re.match(r"s3://\w+/.*: delete 'k': AccessDenied$", str(outcome))
