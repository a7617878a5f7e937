"""Answers that are not the store's: what is concluded from them."""

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count, product
from typing import Any

import pytest

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.storage.blob import Blob
from aiopersist.storage.clouds.client import PAGE
from aiopersist.storage.identity import BLOB_KEY
from aiopersist.storage.objects import answers
from aiopersist.storage.urls import open_blob, open_consensus
from tests.storage.answers_kit import PAGES, Server, answering, failure, foreign
from tests.storage.gcs_stand_in import Answer, Request, StandIn
from tests.storage.objects_kit import bucket_of
from tests.support import obstore_s3 as obstore_s3  # the scheme

AT = {
    "s3": "s3://bucket/p?region=us-east-1&access_key=a&secret_key=b&endpoint={}",
    "obstore": "obstore://bucket/p?access_key=a&secret_key=b&endpoint={}",
    "gs": "gs://bucket/p?bearer_token=t&endpoint={}",
    "az": "az://container/p?account=a&account_key=a2V5&endpoint={}/a",
}
STATUSES = (400, 403, 404, 408, 409, 412, 416, 429, 500, 502, 503, 504)
BIG = b"x" * (8 * 1024 * 1024 + 1)
IN_PARTS = "set in parts"

Call = Callable[[Any], Awaitable[object]]


async def creates(consensus: Any) -> object:
    return await bucket_of(consensus).create("k", b"x")


async def finds(consensus: Any) -> object:
    return await bucket_of(consensus).find("kx/v/")


async def lists_keys(consensus: Any) -> object:
    return await consensus.list_keys("")


async def gets(consensus: Any) -> object:
    return await bucket_of(consensus).get("k")


async def lists(blob: Blob) -> object:
    return [item async for item in blob.list("")]


WRITES: dict[str, tuple[Any, Call]] = {
    "create": (open_consensus, creates),
    "set": (open_blob, lambda blob: blob.set("k", b"x")),
    IN_PARTS: (open_blob, lambda blob: blob.set("k", BIG)),
    "delete": (open_blob, lambda blob: blob.delete(["k", "l"])),
}
READS: dict[str, tuple[Any, Call]] = {
    "get": (open_blob, lambda blob: blob.get("k")),
    "range": (open_blob, lambda blob: blob.get_range("k", 1, 2)),
    "range of nothing": (open_blob, lambda blob: blob.get_range("k", 1, 0)),
    "get of consensus": (open_consensus, gets),
}
LISTS: dict[str, tuple[Any, Call]] = {
    "list": (open_blob, lists),
    "find": (open_consensus, finds),
    "keys": (open_consensus, lists_keys),
}


class Told:
    """Two stores of a scheme at a server that gives each answer that a test wants."""

    def __init__(self, scheme: str, at: str, served: Server) -> None:
        self.served = served
        self.stores: dict[Any, Any] = {
            opened: opened(AT[scheme].format(at)) for opened in (open_blob, open_consensus)
        }

    async def __call__(self, answer: bytes, opened: Any, call: Call) -> object:
        """What comes of a call."""
        self.served.answer = answer
        try:
            return await call(self.stores[opened])
        except (Indeterminate, StorageUnavailable) as error:
            return error


@pytest.fixture(params=AT)
async def told(request: pytest.FixtureRequest) -> AsyncIterator[Told]:
    async with answering(b"") as (at, served):
        told = Told(request.param, at, served)
        yield told
        for store in told.stores.values():
            await store.aclose()


def scheme_of(told: Told) -> str:
    return repr(told.stores[open_consensus]).partition("://")[0].rpartition(" ")[2]


async def test_an_error_of_something_between_decides_nothing(told: Told) -> None:
    """Goal: a write may have happened; a read is repeated, and nothing is taken for missing."""
    for number, (status, page) in enumerate(product(STATUSES, PAGES)):
        for name, (opened, call) in (WRITES | READS | LISTS).items():
            if name in IN_PARTS and number % 13:
                continue
            outcome = await told(foreign(status, page), opened, call)
            where = f"{name} {status} {page} {outcome!r}"
            if name in WRITES:
                assert isinstance(outcome, Indeterminate), where
            else:
                assert isinstance(outcome, StorageUnavailable) and outcome.retry, where


async def test_neither_does_a_redirect_nor_a_lost_answer(told: Told) -> None:
    for answer in (foreign(304, "nothing"), foreign(307, "page", "Location: /login"), b""):
        for name, (opened, call) in (WRITES | READS | LISTS).items():
            outcome = await told(answer, opened, call)
            expected = Indeterminate if name in WRITES else StorageUnavailable
            assert isinstance(outcome, expected), f"{name} {outcome!r}"


async def test_a_success_of_something_between(told: Told) -> None:
    """Goal: the login page of a network is no acknowledgement, no value, and no list of nothing."""
    apart = {("gs", "delete"): "believed: the blob is left, and a sweep finds it"}
    for scheme in ("gs", "obstore"):  # whose driver takes any page for a list: see below
        apart |= {(scheme, "find"): "", (scheme, "keys"): ""}
    for page in ("page", "words", "nothing"):
        for name, (opened, call) in (WRITES | READS | LISTS).items():
            has_checksum = opened is open_blob and name in READS and page != "page"
            if has_checksum or (scheme_of(told), name) in apart:
                continue
            outcome = await told(foreign(200, page), opened, call)
            expected = Indeterminate if name in WRITES else StorageUnavailable
            assert isinstance(outcome, expected) and getattr(outcome, "retry", True), (
                f"{name} {page} {outcome!r}"
            )


async def test_a_page_with_an_etag_acknowledges_no_put(told: Told) -> None:
    """Goal: pages of servers have one, too; the store's answer has no body, or the number of the put."""
    page = foreign(200, "page", 'ETag: "5f1"', "Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT")
    if scheme_of(told) in ("s3", "gs"):
        assert isinstance(await told(page, open_consensus, creates), Indeterminate)
    assert isinstance(await told(page, open_consensus, gets), StorageUnavailable)


async def test_what_the_store_itself_says_decides(told: Told) -> None:
    is_azure = scheme_of(told) == "az"
    there = failure(b"409", b"BlobAlreadyExists") if is_azure else failure(b"412", b"PreconditionFailed")
    assert await told(there, open_consensus, creates) is None
    missing = failure(b"404", b"BlobNotFound" if is_azure else b"NoSuchKey")
    for opened, call in READS.values():
        assert await told(missing, opened, call) is None
    slow = failure(b"503", b"ServerBusy" if is_azure else b"SlowDown")
    for name in ("create", "set"):
        outcome = await told(slow, *WRITES[name])
        assert isinstance(outcome, StorageUnavailable) and outcome.retry
    denied = failure(b"403", b"AuthorizationFailure" if is_azure else b"AccessDenied")
    for opened, call in (WRITES | READS).values():
        outcome = await told(denied, opened, call)
        assert isinstance(outcome, StorageUnavailable) and not outcome.retry, outcome


async def test_a_request_is_sent_once(told: Told) -> None:
    """Goal: the second answer would say nothing about what the first copy has done. One driver's HTTP client
    sends a put again whose connection ends."""
    for name in ("create", "set"):
        before = told.served.requests
        assert isinstance(await told(b"", *WRITES[name]), Indeterminate)
        assert told.served.requests == before + 1


async def test_a_put_follows_no_redirect(told: Told) -> None:
    """Goal: its data go to nobody else, and the answer of whoever is there is not the store's."""
    ok = b'HTTP/1.1 200 x\r\nETag: "5f1"\r\nContent-Length: 0\r\n\r\n'
    async with answering(ok) as (elsewhere, served):
        moved = foreign(307, "nothing", f"Location: {elsewhere}/login")
        assert isinstance(await told(moved, open_consensus, creates), Indeterminate)
        assert served.requests == 0


# --- lists, where the driver takes every document for one ----------------------------------------


async def test_a_page_is_no_list_of_nothing(google: StandIn) -> None:
    """Goal: a key would have no versions, or no floor, and a sweep would see no shards."""
    consensus = open_consensus(google.url("p"))
    await consensus.check()
    assert await consensus.head("a") is None and await consensus.list_keys("") == []
    assert await consensus.compare_and_set("k", None, b"0")
    assert await consensus.list_keys("") == ["k"]
    pages: list[Callable[[Request], bool]] = [
        lambda request: not request.name,
        lambda request: not request.name and request.query.get("prefix") == "p/kk/",
        lambda request: not request.name and "delimiter" in request.query,
    ]
    for is_page in pages:
        with instead(google, is_page):
            if is_page is not pages[2]:
                with pytest.raises(StorageUnavailable, match="not the store's"):
                    await consensus.head("k")
                other = open_consensus(google.url("p"))
                with pytest.raises(StorageUnavailable, match="not the store's"):
                    await other.compare_and_set("k", 0, b"1")
                await other.aclose()
            if is_page is not pages[1]:
                with pytest.raises(StorageUnavailable, match="not the store's"):
                    await consensus.list_keys("")
    with instead(google, lambda request: not request.name), pytest.raises(Indeterminate):
        await consensus.compare_and_set("k", 0, b"1")  # nothing tells whether it was truncated
    assert (await consensus.head("k")) is not None
    await consensus.aclose()


async def test_a_page_is_no_end_of_a_list_of_blobs(google: StandIn) -> None:
    """Goal: neither where lists alone are answered so, nor where a list has whole pages of the store before:
    an erasure would find nothing, and a sweep would leave what leaks."""
    blob = open_blob(google.url("p"))
    assert [item async for item in blob.list("s1/")] == []  # before there is a location
    await blob.set(BLOB_KEY, b"the id")
    assert [item async for item in blob.list("s1/")] == []
    with instead(google, lambda request: not request.name):
        with pytest.raises(StorageUnavailable, match="not the store's"):
            [item async for item in blob.list("s1/")]
    for number in range(PAGE + 1):
        google._written(f"p/s1/w/{number:04}.parquet", b"x")

    async def listed(*pages: int) -> list[str]:
        """What is listed if something between answers those lists."""
        begun, found = count(1), list[str]()
        with instead(google, lambda request: not request.name and next(begun) in pages):
            async for key, _ in blob.list("s1/"):
                found.append(key)
        return found

    every = await listed()
    assert len({*every}) == len(every) == PAGE + 1
    for pages in ((1,), (2,)):
        assert await listed(*pages) == every
    for pages in ((1, 2), (2, 3)):
        with pytest.raises(StorageUnavailable, match="not the store's"):
            await listed(*pages)
    await blob.aclose()


class instead:  # noqa: N801  # read as a word
    """Within, something between answers those requests with a page."""

    def __init__(self, google: StandIn, which: Callable[[Request], bool]) -> None:
        self.google, self.which, self.real = google, which, google.answer

    def __enter__(self) -> None:
        page = Answer(200, b"<html><body>log in</body></html>", {"Content-Type": "text/html"})
        self.google.answer = lambda r: page if self.which(r) else self.real(r)  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        self.google.answer = self.real  # type: ignore[method-assign]


# --- the body of an error ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("<Error><Code>SlowDown</Code></Error>", "SlowDown"),
        (
            '\ufeff<?xml version="1.0"?>\n<Error>\n<Code>ServerBusy</Code><Message>m</Message></Error>\n',
            "ServerBusy",
        ),
        ("<Error xmlns='x'><Message>a</Message><Code>SlowDown</Code></Error>", "SlowDown"),
        ("<html><Code>SlowDown</Code></html>", ""),
        ("<Error><Code>SlowDown</Code>", ""),
        ("<html><Error><Code>SlowDown</Code></Error></html>", ""),
        ("<Errors><Code>SlowDown</Code></Errors>", ""),
        ("503", ""),
        ("", ""),
    ],
)
def test_a_code_is_one_of_a_whole_body(body: str, code: str) -> None:
    assert answers.code_in(body) == code


@pytest.mark.parametrize("shown", ['"a-1"', 'W/"a-1"', "a-1"])
def test_a_tag_is_the_same_in_every_answer(shown: str) -> None:
    assert answers.tag_of(shown) == "a-1"
