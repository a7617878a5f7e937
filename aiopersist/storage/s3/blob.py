"""Blobs in an S3 bucket, or in any store that speaks its protocol.

S3 itself promises what the contract demands: a PUT is atomic and durable when it returns, and reads and lists
see every completed write. So a value is one PUT, or above 8 MiB a multipart upload, which also appears as a
whole when it is completed, and is aborted when it fails.

The layer above repeats requests; here only the parts of an upload are retried. A body whose checksum or
length is wrong is read again at most twice, and then is `Corruption`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.base.settings import MIB
from aiopersist.storage.address import Address
from aiopersist.storage.keys import check_blob_key
from aiopersist.storage.objects.served import ServedBlob
from aiopersist.storage.s3 import errors as errors
from aiopersist.storage.s3.client import S3Client

PART_BYTES = 8 * MIB  # above it, parts in parallel are faster than one stream
PARTS_MAX = 10_000  # of one upload, S3's limit
PARTS_AT_ONCE = 4
PART_ATTEMPTS = 3
CLOSE_TIMEOUT_S = 5.0


class S3Blob(ServedBlob[S3Client]):
    """Blobs below the prefix of a client. One request per read and per small write; a large write takes one
    per 8 MiB and two more; lists and deletes take one per 1000 keys."""

    def __init__(self, client: S3Client) -> None:
        super().__init__(client)
        self._aborting: set[asyncio.Task[None]] = set()

    @classmethod
    def at(cls, address: Address) -> Self:
        """See `S3Client.at`."""
        return cls(S3Client.at(address, "blob store"))

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        answer = await self._client.get(self._name(key), (offset, max(length, 1)))
        return None if answer is None else answer[0][:length]

    async def set(self, key: str, data: bytes | memoryview) -> None:
        name, view = self._name(key), memoryview(data).cast("B")
        if len(view) > PART_BYTES:
            await self._set_in_parts(name, view)
        else:
            await self._client.put(name, data if isinstance(data, bytes) else bytes(view))

    @property
    def uri(self) -> str:
        return repr(self._client).rstrip("/")

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        async for page in self._client.pages(prefix):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._client.prefix)
                if key and not key.endswith("/"):  # a folder that a tool made is no blob
                    yield key, item["Size"]

    async def aclose(self) -> None:
        self._client.closed = True
        try:
            if self._aborting:
                await asyncio.wait(self._aborting, timeout=CLOSE_TIMEOUT_S)
        finally:
            await super().aclose()

    # Writing in parts

    async def _set_in_parts(self, name: str, view: memoryview) -> None:
        target = self._client.target(name)
        upload_of = {**target, "ChecksumAlgorithm": "CRC32"}  # the driver computes it for each part
        created = await self._client.ask("set", lambda s3: _begun(s3, upload_of), writing=True)
        upload = {**target, "UploadId": created["UploadId"]}
        try:
            parts = await self._upload_parts(upload, view)
            done = await self._client.ask(
                "set",
                lambda s3: s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}),
                writing=True,
            )
            if not done.get("ETag"):
                await self._check_there(name, len(view))
        except BaseException:
            task = asyncio.create_task(self._abort(upload))  # goes on if the caller is cancelled
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
            raise

    async def _check_there(self, name: str, size: int) -> None:
        """`Indeterminate` unless the whole value is there. A server may answer 200 before it completes an
        upload, and tell the outcome in the body: one that was cut off, or is of a proxy, tells nothing."""
        try:
            first_byte = await self._client.get(name, (0, 1))
        except StorageUnavailable as error:
            raise Indeterminate(f"s3: set: an upload may have been completed: {error}") from error
        answer = {} if first_byte is None else first_byte[1]
        length = answer.get("ContentRange", "").rpartition("/")[2] or answer.get("ContentLength")
        if length is None or int(length) != size:
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
                answer = await self._client.ask("set", lambda s3: _part(s3, request), writing=True)
            except (Indeterminate, StorageUnavailable) as error:
                if attempt == PART_ATTEMPTS or not getattr(error, "retry", True):
                    raise
            else:
                break
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        checksums.pop("ChecksumType", None)
        return {"PartNumber": request["PartNumber"], "ETag": answer["ETag"], **checksums}

    async def _abort(self, upload: dict[str, Any]) -> None:
        with suppress(Exception):  # else the parts stay until a rule of the bucket expires them
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._client.s3.abort_multipart_upload(**upload)

    def _name(self, key: str) -> str:
        self._client.check_open()
        check_blob_key(key)
        return key


async def _begun(s3: Any, request: dict[str, Any]) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = await s3.create_multipart_upload(**request)
    errors.check_own(answer, "UploadId")
    return answer


async def _part(s3: Any, request: dict[str, Any]) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = await s3.upload_part(**request)
    errors.check_own(answer, "ETag", is_empty=True)
    return answer
