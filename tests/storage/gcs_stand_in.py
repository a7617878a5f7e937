"""A stand-in for Google Cloud Storage: the requests of its XML API that the driver makes, on a dict.

It is no real server, and proves nothing about one: only that the driver's requests for `gs://` mean what the
code takes them for. It checks no credentials.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 1000


class Request(NamedTuple):
    method: str
    name: str
    """Of the object; empty for the bucket."""
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


class Stored(NamedTuple):
    data: bytes
    generation: int

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class Answer(NamedTuple):
    status: int
    body: bytes = b""
    headers: Mapping[str, str] = {}


def refused(status: int, code: str) -> Answer:
    return Answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code></Error>".encode())


class StandIn:
    """See the header. `knows_conditions`: whether it obeys them."""

    def __init__(self, bucket: str = "bucket") -> None:
        self.bucket = bucket
        self.stored: dict[str, Stored] = {}
        self.knows_conditions = True
        self.requests: list[str] = []
        self.answers = asyncio.Event()  # nothing is answered while it is not set
        self.answers.set()
        self.endpoint = ""
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = 0

    def url(self, prefix: str) -> str:
        return f"gs://{self.bucket}/{prefix}?endpoint={self.endpoint}&bearer_token=none"

    def answer(self, request: Request) -> Answer:
        if not request.name:
            return self._list(request.query)
        if "uploads" in request.query or "uploadId" in request.query:
            return self._multipart(request)
        return {"PUT": self._put, "GET": self._get, "HEAD": self._get, "DELETE": self._delete}[
            request.method
        ](request)

    def _put(self, request: Request) -> Answer:
        condition = request.headers.get("x-goog-if-generation-match")
        there = self.stored.get(request.name, Stored(b"", 0))
        if self.knows_conditions and condition is not None and int(condition) != there.generation:
            return refused(412, "PreconditionFailed")
        return self._written(request.name, request.body)

    def _written(self, name: str, data: bytes) -> Answer:
        self._numbers += 1
        self.stored[name] = Stored(data, self._numbers)
        tag = self.stored[name].tag
        return Answer(200, headers={"ETag": tag, "x-goog-generation": str(self._numbers)})

    def _get(self, request: Request) -> Answer:
        found = self.stored.get(request.name)
        if found is None:
            return refused(404, "NoSuchKey")
        headers = {
            "ETag": found.tag,
            "x-goog-generation": str(found.generation),
            "Last-Modified": formatdate(usegmt=True),
        }
        wanted = request.headers.get("range")
        if wanted is None:
            return Answer(200, found.data, headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(found.data)) + 1, len(found.data))
        if begin >= len(found.data):
            return refused(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(found.data)}"
        return Answer(206, found.data[begin:end], headers)

    def _delete(self, request: Request) -> Answer:
        return refused(404, "NoSuchKey") if self.stored.pop(request.name, None) is None else Answer(204)

    def _list(self, query: Mapping[str, str]) -> Answer:
        prefix, after = (
            query.get("prefix", ""),
            query.get("continuation-token") or query.get("start-after", ""),
        )
        found, folders = list[str](), list[str]()
        for name in sorted(self.stored):
            if not name.startswith(prefix):
                continue
            rest, slash, _ = name.removeprefix(prefix).partition(query.get("delimiter", "\0"))
            shown = prefix + rest + slash
            if shown > after and not (slash and shown in folders):
                (folders if slash else found).append(shown)
        shown_first = set(sorted([*found, *folders])[:PAGE])
        cut = len(shown_first) < len(found) + len(folders)
        objects = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.stored[name].data)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{self.stored[name].tag}</ETag>"
            "</Contents>"
            for name in found
            if name in shown_first
        )
        inner = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in folders
            if name in shown_first
        )
        token = f"<NextContinuationToken>{escape(max(shown_first))}</NextContinuationToken>" if cut else ""
        text = f"<ListBucketResult><IsTruncated>{str(cut).lower()}</IsTruncated>{token}{objects}{inner}"
        return Answer(200, f"{text}</ListBucketResult>".encode())

    def _multipart(self, request: Request) -> Answer:
        if "uploads" in request.query:
            self._numbers += 1
            self._uploads[str(self._numbers)] = {}
            text = f"<UploadId>{self._numbers}</UploadId>"
            return Answer(
                200, f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode()
            )
        parts = self._uploads.get(request.query["uploadId"])
        if parts is None:
            return refused(404, "NoSuchUpload")
        if request.method == "PUT":
            parts[int(request.query["partNumber"])] = request.body
            return Answer(200, headers={"ETag": Stored(request.body, 0).tag})
        del self._uploads[request.query["uploadId"]]
        if request.method == "DELETE":
            return Answer(204)
        written = self._written(request.name, b"".join(parts[number] for number in sorted(parts)))
        tag = f"<ETag>{escape(written.headers['ETag'])}</ETag>"
        text = f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>"
        return Answer(200, text.encode(), {"x-goog-generation": written.headers["x-goog-generation"]})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, target, _ = lines[0].split()
                headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:-2])}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                url = urlsplit(target)
                query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
                name = unquote(url.path.removeprefix(f"/{self.bucket}").removeprefix("/"))
                self.requests.append(f"{method} {'object' if name else 'bucket'}")
                await self.answers.wait()
                status, data, more = self.answer(Request(method, name, query, headers, body))
                sent = {"Content-Length": str(len(data)), "Date": formatdate(usegmt=True), **more}
                head = "".join(f"{k}: {v}\r\n" for k, v in sent.items())
                writer.write(f"HTTP/1.1 {status} x\r\n{head}\r\n".encode())
                writer.write(b"" if method == "HEAD" else data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def gcs_stand_in() -> AsyncIterator[StandIn]:
    stand_in = StandIn()
    server = await asyncio.start_server(stand_in._serve, "127.0.0.1", 0)
    stand_in.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield stand_in
    server.close()
