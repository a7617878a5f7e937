"""One place in an S3 bucket, or in any store that speaks its protocol: its client, made when it is first
used, and what every request needs.

The client of the driver is made in the event loop that first uses it. Loading its data takes a good part of a
second, and so happens in a worker thread. The driver repeats no request: the layers above do (`session`).
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import cache, partial
from typing import Any, Self, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session
from anyio import to_thread

from aiopersist.base.errors import Corruption
from aiopersist.base.runtime import OwnProcess
from aiopersist.storage.address import Address
from aiopersist.storage.keys import closed
from aiopersist.storage.objects import answers
from aiopersist.storage.objects.clock import ServerClock
from aiopersist.storage.s3 import errors as errors
from aiopersist.storage.s3.session import OnceSession

T = TypeVar("T")

READ_ATTEMPTS = 3  # of a body that comes damaged
DELETE_MAX = 1000  # names per request, S3's limit
CONNECTIONS = 32
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0

OPTIONS = frozenset({"endpoint", "region", "access_key", "secret_key", "session_token"})


class S3Client:
    """Requests to `bucket`, below `prefix`. `what` names the store in errors; `clock` gets dates of
    answers."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Mapping[str, str] | None = None,
        what: str,
        clock: ServerClock | None = None,
    ) -> None:
        self.bucket = bucket
        self.prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self.endpoint = endpoint
        self.region = region
        self.closed = False
        self.s3: Any = None
        """The client of the driver, once it is made."""
        self._credentials = dict(credentials or {})
        self._what = what
        self._process = OwnProcess(what)
        self._clock = clock
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()

    @classmethod
    def at(cls, address: Address, what: str, clock: ServerClock | None = None) -> Self:
        """The client of `s3://bucket/prefix?endpoint=&region=&access_key=&secret_key=&session_token=`."""
        address.check_bucket()
        options = address.options
        names = {
            "access_key": "aws_access_key_id",
            "secret_key": "aws_secret_access_key",
            "session_token": "aws_session_token",
        }
        credentials = {names[name]: value for name, value in options.items() if name in names}
        server: dict[str, Any] = {"endpoint": options.get("endpoint"), "region": options.get("region")}
        return cls(address.host, address.path, **server, credentials=credentials, what=what, clock=clock)

    def __repr__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def facts(self) -> dict[str, str]:
        """Where it is, for a person."""
        return {"server": f"S3 at {self.endpoint or 'AWS'}", "region": self.region or "the environment's"}

    def target(self, name: str) -> dict[str, Any]:
        """The object of that name, as the driver's calls take it."""
        return {"Bucket": self.bucket, "Key": self.prefix + name}

    def check_open(self) -> None:
        self._process.check()
        if self.closed:
            raise closed(self._what)

    async def ask(
        self,
        op: str,
        request: Callable[[Any], Awaitable[T]],
        *,
        writing: bool = False,
        none_if: Callable[[BaseException], bool] = lambda error: False,
    ) -> T | Any:
        """Make one request; its errors become those of this library. `None` for errors that are `none_if`."""
        self._process.check()
        try:
            s3 = self.s3 or await self._client()
            return await request(s3)
        except Damaged:
            raise
        except Exception as error:
            if none_if(error):
                return None
            raise errors.mapped(error, repr(self), op, writing=writing) from error

    async def get(
        self, name: str, span: tuple[int, int] | None = None
    ) -> tuple[bytes, Mapping[str, Any]] | None:
        """The object, or the `span` of it (its offset and length), and the driver's answer; `None` if it is
        not there. A body whose checksum or length is wrong is read again, and then is `Corruption`."""
        request = self.target(name)
        if span is not None:
            request["Range"] = f"bytes={span[0]}-{span[0] + span[1] - 1}"
        for _ in range(READ_ATTEMPTS):
            try:
                answer: tuple[bytes, Mapping[str, Any]] | None = await self.ask(
                    "get", lambda s3: _body(s3, request, span), none_if=errors.is_missing
                )
            except Damaged as error:
                damage = str(error)
            else:
                return answer
        raise Corruption(f"{self!r}: {name} came damaged {READ_ATTEMPTS} times: {damage}")

    async def put(self, name: str, data: bytes) -> None:
        """Write an object in one request."""
        put = {**self.target(name), "Body": data}
        await self.ask("set", lambda s3: _put(s3, put), writing=True)

    async def create(self, name: str, data: bytes) -> str | None:
        """Write an object that is not there; its tag, `None` if it is there. Servers that know no conditions
        write it again."""
        put = {**self.target(name), "Body": data, "IfNoneMatch": "*"}
        answer = await self.ask("set", lambda s3: _put(s3, put), none_if=errors.is_there, writing=True)
        return None if answer is None else answers.tag_of(answer["ETag"])

    async def pages(self, prefix: str, **options: Any) -> AsyncGenerator[Mapping[str, Any], None]:
        """The driver's answers to a list of the names that begin with `prefix`, until there are no more."""
        options = {"Bucket": self.bucket, "Prefix": self.prefix + prefix, **options}
        while True:
            page = await self.ask("list", lambda s3: _page(s3, options))
            yield page
            if not page.get("IsTruncated"):
                return
            options["ContinuationToken"] = page["NextContinuationToken"]

    async def delete(self, names: list[str]) -> None:
        """Delete these objects; those that are absent are fine."""
        for begin in range(0, len(names), DELETE_MAX):
            objects = [{"Key": self.prefix + name} for name in names[begin : begin + DELETE_MAX]]
            request = {"Bucket": self.bucket, "Delete": {"Objects": objects, "Quiet": False}}
            answer = await self.ask("delete", partial(_deleted, request), writing=True)
            for failure in answer.get("Errors", ()):
                if failure.get("Code") not in ("NoSuchKey", "404"):
                    op = f"delete {failure.get('Key')!r}"
                    raise errors.of_code(str(failure.get("Code")), repr(self), op)

    async def aclose(self) -> None:
        self._process.check()
        self.closed = True
        async with self._opening:  # a client that is being made is closed, too
            self.s3 = None
            await self._stack.aclose()

    async def _client(self) -> Any:
        async with self._opening:
            self.check_open()
            if self.s3 is None:
                session = get_session()
                await to_thread.run_sync(_load, session)
                self.check_open()
                s3 = await self._stack.enter_async_context(self._new_client(session))
                if self._clock is not None:
                    _hear_dates(s3, self._clock)
                self.s3 = s3
            return self.s3

    def _new_client(self, session: AioSession) -> Any:
        config = AioConfig(
            max_pool_connections=CONNECTIONS,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 1},
            http_session_cls=OnceSession,
            s3={"addressing_style": "path" if self.endpoint else "auto"},
        )
        return session.create_client(
            "s3", endpoint_url=self.endpoint, region_name=self.region, config=config, **self._credentials
        )


class Damaged(Exception):
    """The body differs from its headers."""


async def _put(s3: Any, request: dict[str, Any]) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = await s3.put_object(**request)
    errors.check_own(answer, "ETag", is_empty=True)
    return answer


async def _page(s3: Any, request: dict[str, Any]) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = await s3.list_objects_v2(**request)
    errors.check_own(answer, "IsTruncated")  # any other document, or none, reads as an empty list
    if answer["IsTruncated"]:
        errors.check_own(answer, "NextContinuationToken")
    return answer


async def _deleted(request: dict[str, Any], s3: Any) -> Mapping[str, Any]:
    """The answer to a request that deletes, which names each object: another document names none."""
    answer: Mapping[str, Any] = await s3.delete_objects(**request)
    if len(answer.get("Deleted", ())) + len(answer.get("Errors", ())) < len(request["Delete"]["Objects"]):
        raise answers.ForeignAnswer
    return answer


async def _body(
    s3: Any, request: dict[str, Any], span: tuple[int, int] | None
) -> tuple[bytes, Mapping[str, Any]]:
    try:
        answer = await s3.get_object(**request)
        async with answer["Body"] as stream:
            data: bytes = await stream.read()
    except Exception as error:
        if errors.is_beyond_the_end(error):
            return b"", {}
        if errors.is_damaged(error):
            raise Damaged(type(error).__name__) from error
        raise
    if answers.is_page(answer.get("ContentType")):
        raise answers.ForeignAnswer
    if len(data) != answer["ContentLength"]:
        raise Damaged(f"{len(data)} bytes of {answer['ContentLength']}")
    if span is None:
        return data, answer
    if "ContentRange" not in answer:  # a server without ranges sends the whole value
        return data[span[0] : span[0] + span[1]], answer
    if len(data) > span[1]:
        raise Damaged(f"{len(data)} bytes instead of {span[1]}")
    return data, answer


def _hear_dates(s3: Any, clock: ServerClock) -> None:
    """Let the clock hear the date of each answer that is the store's own, errors included."""

    def sends(context: dict[str, Any], **_: Any) -> None:
        context["aiopersist_sent"] = clock.sent()

    def answered(parsed: Mapping[str, Any], context: dict[str, Any], **_: Any) -> None:
        headers = parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        clock.heard(headers, str(parsed.get("Error", {}).get("Code", "")), context["aiopersist_sent"])

    s3.meta.events.register("before-call.s3", sends)
    s3.meta.events.register("after-call.s3", answered)


def _load(session: AioSession) -> None:
    session.register_component("data_loader", _loader())


@cache
def _loader() -> Any:
    """The driver's descriptions of S3, read from its files once per process."""
    loader = get_session().get_component("data_loader")
    for kind in ("service-2", "endpoint-rule-set-1", "paginators-1", "waiters-2"):
        loader.load_service_model("s3", kind)
    for name in ("endpoints", "partitions", "sdk-default-configuration", "_retry"):
        loader.load_data(name)
    return loader
