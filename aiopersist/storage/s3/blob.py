"""Blobs in an S3 bucket, or in any store that speaks its protocol.

S3 itself promises what the contract demands: a PUT is atomic and durable when it returns, and reads and lists
see every completed write. So a value is one PUT, or above 8 MiB a multipart upload, which also appears as a
whole when it is completed, and is aborted when it fails.

The layer above repeats requests; here only the parts of an upload are retried. A body whose checksum or
length is wrong is read again at most twice, and then is `Corruption`.

The client of the driver is made in the event loop that first uses it. Loading its data takes a good part of a
second, and so happens in a worker thread.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Any, Self, TypeVar

from aiobotocore.config import AioConfig
from aiobotocore.session import AioSession, get_session
from anyio import to_thread

from aiopersist.errors import Corruption, Indeterminate, InvalidLocation, StorageUnavailable
from aiopersist.runtime import SYSTEM
from aiopersist.storage.address import Address, is_endpoint
from aiopersist.storage.blob import Blob
from aiopersist.storage.keys import check_blob_key, closed
from aiopersist.storage.s3 import errors as errors

T = TypeVar("T")

MIB = 1024 * 1024
PART_BYTES = 8 * MIB  # above it, parts in parallel are faster than one stream
PARTS_MAX = 10_000  # of one upload, S3's limit
PARTS_AT_ONCE = 4
PART_ATTEMPTS = 3
READ_ATTEMPTS = 3  # of a body that comes damaged
DELETE_MAX = 1000  # keys per request, S3's limit
CONNECTIONS = 32
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0

_OPTIONS = {"endpoint", "region", "access_key", "secret_key", "session_token"}


class S3Blob(Blob):
    """Blobs in `bucket`, below `prefix`. One request per read and per small write; a large write takes one
    per 8 MiB and two more; lists and deletes take one per 1000 keys."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        region: str | None = None,
        credentials: Mapping[str, str] | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix.strip("/") + "/" if prefix.strip("/") else ""
        self._endpoint = endpoint
        self._region = region
        self._credentials = dict(credentials or {})
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._s3: Any = None
        self._aborting: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    def from_url(cls, url: str) -> Self:
        """`s3://bucket/prefix?endpoint=&region=&access_key=&secret_key=&session_token=`."""
        address = Address.parse(url, _OPTIONS)
        if not address.host or ":" in address.host or address.user or address.password:
            raise InvalidLocation("s3: the URL names no bucket: s3://bucket/prefix")
        options = address.options
        endpoint = options.get("endpoint")
        if endpoint is not None and not is_endpoint(endpoint):
            raise InvalidLocation("s3: option 'endpoint' is http://host:port, without user or password")
        if ("access_key" in options) != ("secret_key" in options):
            raise InvalidLocation("s3: options 'access_key' and 'secret_key' go together")
        names = {
            "access_key": "aws_access_key_id",
            "secret_key": "aws_secret_access_key",
            "session_token": "aws_session_token",
        }
        credentials = {names[name]: value for name, value in options.items() if name in names}
        region = options.get("region")
        return cls(address.host, address.path, endpoint=endpoint, region=region, credentials=credentials)

    def __repr__(self) -> str:
        return f"<S3Blob s3://{self._bucket}/{self._prefix}>"

    async def get(self, key: str) -> bytes | None:
        return await self._read(key, None)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        if length > 0:
            return await self._read(key, (offset, length))
        target = self._object(key)
        head = await self._ask("get_range", lambda s3: s3.head_object(**target), none_if=errors.is_missing)
        return None if head is None else b""

    async def set(self, key: str, data: bytes | memoryview) -> None:
        target = self._object(key)
        view = memoryview(data).cast("B")
        if len(view) > PART_BYTES:
            await self._set_in_parts(target, view)
        else:
            body = bytes(view)
            await self._ask("set", lambda s3: s3.put_object(**target, Body=body), writing=True)

    async def delete(self, keys: Sequence[str]) -> None:
        names = [self._object(key)["Key"] for key in keys]
        for begin in range(0, len(names), DELETE_MAX):
            objects = [{"Key": name} for name in names[begin : begin + DELETE_MAX]]
            answer = await self._ask(
                "delete",
                lambda s3, wanted=objects: s3.delete_objects(  # type: ignore[misc]
                    Bucket=self._bucket, Delete={"Objects": wanted, "Quiet": True}
                ),
                writing=True,
            )
            for failure in answer.get("Errors", ()):
                if failure.get("Code") not in ("NoSuchKey", "404"):
                    raise errors.of_code(str(failure.get("Code")), f"delete {failure.get('Key')!r}")

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        wanted: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        while True:
            page = await self._ask("list", lambda s3: s3.list_objects_v2(**wanted))
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                if key and not key.endswith("/"):  # a folder that a tool made is no blob
                    yield key, found["Size"]
            if not page.get("IsTruncated"):
                return
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    async def facts(self) -> dict[str, str]:
        return {"store": f"S3 at {self._endpoint or 'AWS'}", "region": self._region or "the environment's"}

    async def probe(self) -> dict[str, str]:
        """Whether a put that must not replace a blob is refused where there is one: servers that know no
        conditions write it again."""
        target = self._object(f"probe/{SYSTEM.uuid()}")
        try:
            conditional = await self._put_if_absent(target) and not await self._put_if_absent(target)
        finally:
            await self._ask("delete", lambda s3: s3.delete_object(**target), writing=True)
        return {"conditional puts": "yes" if conditional else "no"}

    async def _put_if_absent(self, target: dict[str, str]) -> bool:
        """Whether the blob was written: `False` where it is there."""
        put = {**target, "Body": b"", "IfNoneMatch": "*"}
        answer = await self._ask(
            "set", lambda s3: s3.put_object(**put), none_if=errors.is_there, writing=True
        )
        return answer is not None

    async def aclose(self) -> None:
        self._closed = True
        try:
            if self._aborting:
                await asyncio.wait(self._aborting, timeout=CLOSE_TIMEOUT_S)
        finally:
            async with self._opening:  # a client that is being made is closed, too
                self._s3 = None
                await self._stack.aclose()

    # Reading

    async def _read(self, key: str, wanted: tuple[int, int] | None) -> bytes | None:
        request = self._object(key)
        if wanted is not None:
            request["Range"] = f"bytes={wanted[0]}-{wanted[0] + wanted[1] - 1}"
        for _ in range(READ_ATTEMPTS):
            try:
                return await self._ask(
                    "get", lambda s3: _body(s3, request, wanted), none_if=errors.is_missing
                )
            except _Damaged as error:
                damage = str(error)
        raise Corruption(f"s3: {key} came damaged {READ_ATTEMPTS} times: {damage}")

    # Writing in parts

    async def _set_in_parts(self, target: dict[str, Any], view: memoryview) -> None:
        upload_of = {**target, "ChecksumAlgorithm": "CRC32"}  # the driver computes it for each part
        created = await self._ask("set", lambda s3: s3.create_multipart_upload(**upload_of), writing=True)
        upload = {**target, "UploadId": created["UploadId"]}
        try:
            parts = await self._upload_parts(upload, view)
            done = await self._ask(
                "set",
                lambda s3: s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}),
                writing=True,
            )
            if not done.get("ETag"):
                await self._check_there(target, len(view))
        except BaseException:
            task = asyncio.create_task(self._abort(upload))  # goes on if the caller is cancelled
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
            raise

    async def _check_there(self, target: dict[str, Any], size: int) -> None:
        """`Indeterminate` unless the whole value is there. A server may answer 200 before it completes an
        upload, and tell the outcome in the body: one that was cut off, or is of a proxy, tells nothing."""
        there = await self._ask("set", lambda s3: s3.head_object(**target), none_if=errors.is_missing)
        if there is None or there["ContentLength"] != size:
            raise Indeterminate("s3: set: the answer does not tell whether the upload was completed")

    async def _upload_parts(self, upload: dict[str, Any], view: memoryview) -> Sequence[dict[str, Any]]:
        size = max(PART_BYTES, -(-len(view) // PARTS_MAX))
        gate = asyncio.Semaphore(PARTS_AT_ONCE)

        async def part(number: int) -> dict[str, Any]:
            async with gate:
                body = bytes(view[(number - 1) * size : number * size])
                return await self._upload_part({**upload, "PartNumber": number, "Body": body})

        tasks = [asyncio.create_task(part(number)) for number in range(1, -(-len(view) // size) + 1)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _upload_part(self, request: dict[str, Any]) -> dict[str, Any]:
        for attempt in range(1, PART_ATTEMPTS + 1):
            try:
                answer = await self._ask("set", lambda s3: s3.upload_part(**request), writing=True)
            except (Indeterminate, StorageUnavailable) as error:
                if attempt == PART_ATTEMPTS or not getattr(error, "retry", True):
                    raise
            else:
                break
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        checksums.pop("ChecksumType", None)
        return {"PartNumber": request["PartNumber"], "ETag": answer["ETag"], **checksums}

    async def _abort(self, upload: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._s3.abort_multipart_upload(**upload)
        except Exception:  # the parts stay until a rule of the bucket expires them
            return

    # Requests

    async def _ask(
        self,
        op: str,
        request: Callable[[Any], Awaitable[T]],
        *,
        writing: bool = False,
        none_if: Callable[[BaseException], bool] = lambda error: False,
    ) -> T | Any:
        try:
            s3 = self._s3 or await self._client()
            return await request(s3)
        except _Damaged:
            raise
        except Exception as error:
            if none_if(error):
                return None
            raise errors.mapped(error, op, writing=writing) from error

    async def _client(self) -> Any:
        async with self._opening:
            if self._closed:
                raise closed("blob store")
            if self._s3 is None:
                session = get_session()
                await to_thread.run_sync(_load, session)
                if self._closed:
                    raise closed("blob store")
                self._s3 = await self._stack.enter_async_context(self._new_client(session))
            return self._s3

    def _new_client(self, session: AioSession) -> Any:
        config = AioConfig(
            max_pool_connections=CONNECTIONS,
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            retries={"mode": "standard", "total_max_attempts": 1},
            s3={"addressing_style": "path" if self._endpoint else "auto"},
        )
        return session.create_client(
            "s3", endpoint_url=self._endpoint, region_name=self._region, config=config, **self._credentials
        )

    def _object(self, key: str) -> dict[str, Any]:
        if self._closed:
            raise closed("blob store")
        check_blob_key(key)
        return {"Bucket": self._bucket, "Key": self._prefix + key}


class _Damaged(Exception):
    """The body differs from its headers."""


async def _body(s3: Any, request: dict[str, Any], wanted: tuple[int, int] | None) -> bytes:
    try:
        answer = await s3.get_object(**request)
        async with answer["Body"] as stream:
            data: bytes = await stream.read()
    except Exception as error:
        if errors.is_beyond_the_end(error):
            return b""
        if errors.is_damaged(error):
            raise _Damaged(type(error).__name__) from error
        raise
    if len(data) != answer["ContentLength"]:
        raise _Damaged(f"{len(data)} bytes of {answer['ContentLength']}")
    if wanted is None:
        return data
    if "ContentRange" not in answer:  # a server without ranges sends the whole value
        return data[wanted[0] : wanted[0] + wanted[1]]
    if len(data) > wanted[1]:
        raise _Damaged(f"{len(data)} bytes instead of {wanted[1]}")
    return data


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
