"""A read-only Iceberg REST catalog of the published tables of a location.

Engines that attach to it find the tables by name, and always at their newest version. It has six operations
of the specification; its configuration names them, so engines do not try to write. What is asked all the same
is refused with the specification's errors.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aiopersist.base.errors import StorageUnavailable
from aiopersist.client.client import Client
from aiopersist.fastapi.attached import attached
from aiopersist.fastapi.problems import RETRY_AFTER_S
from aiopersist.iceberg.published import newest_version, published_tables

T = TypeVar("T")

_SPACE = "/v1/{prefix}/namespaces/{namespace}"
ENDPOINTS = [
    "GET /v1/{prefix}/namespaces",
    *(f"{method} {_SPACE}" for method in ("GET", "HEAD")),
    f"GET {_SPACE}/tables",
    *(f"{method} {_SPACE}/tables/{{table}}" for method in ("GET", "HEAD")),
]
"""The operations, in the words of the specification: engines try no others."""


def iceberg_catalog(
    client: Client | None = None, *, prefix: str = "/iceberg", namespace: str = "aiopersist"
) -> APIRouter:
    """A router with a read-only Iceberg REST catalog under `prefix`:
    `app.include_router(apf.iceberg_catalog())`. It shows the tables that `client.publish` has published, in
    one `namespace`, under the names of their folders: those of the shards, if they have only ASCII letters,
    digits, `.`, `_` and `-`. `client=None`: the application's client.

    It gives no credentials: engines need their own for the bucket. Everybody who reaches it learns names,
    schemas and statistics of the tables; authentication is up to the application. A list or a load costs a
    listing of the files of all, or of one, and a load one read."""
    catalog = _Catalog(client, namespace)
    router = APIRouter(prefix=prefix)
    for path, methods, endpoint in catalog.routes():
        router.add_api_route(path, endpoint, methods=methods, include_in_schema=False, response_model=None)
    return router


class _Catalog:
    """The endpoints."""

    def __init__(self, client: Client | None, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def routes(self) -> list[tuple[str, list[str], Callable[..., Any]]]:
        space, table = "/v1/namespaces/{space}", "/v1/namespaces/{space}/tables/{name}"
        return [
            ("/v1/config", ["GET"], self.config),
            ("/v1/namespaces", ["GET"], self.namespaces),
            (space, ["GET"], self.one_namespace),
            (space, ["HEAD"], self.has_namespace),
            (f"{space}/tables", ["GET"], self.tables),
            (table, ["GET"], self.load),
            (table, ["HEAD"], self.has_table),
            ("/{rest:path}", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"], self.refused),
        ]

    async def config(self) -> Response:
        return JSONResponse({"defaults": {}, "overrides": {}, "endpoints": ENDPOINTS})

    async def namespaces(self, parent: str | None = None) -> Response:
        return JSONResponse({"namespaces": [] if parent else [[self._namespace]]})

    async def one_namespace(self, space: str) -> Response:
        if space != self._namespace:
            return _no_namespace(space)
        return JSONResponse({"namespace": [space], "properties": {}})

    async def has_namespace(self, space: str) -> Response:
        return Response(status_code=204 if space == self._namespace else 404)

    async def tables(self, request: Request, space: str) -> Response:
        if space != self._namespace:
            return _no_namespace(space)
        names = await self._read(request, published_tables)
        if isinstance(names, Response):
            return names
        return JSONResponse({"identifiers": [{"namespace": [space], "name": name} for name in names]})

    async def load(self, request: Request, space: str, name: str) -> Response:
        if space != self._namespace:
            return _no_table(space, name)
        newest = await self._read(request, newest_version, name)
        if newest is None or isinstance(newest, Response):
            return newest or _no_table(space, name)
        return JSONResponse({"metadata-location": newest.uri, "metadata": newest.table, "config": {}})

    async def has_table(self, request: Request, space: str, name: str) -> Response:
        return Response(
            status_code=204 if (await self.load(request, space, name)).status_code == 200 else 404
        )

    async def refused(self) -> Response:
        text = "this catalog is read-only: it loads tables, and lists them"
        return _error(406, "UnsupportedOperationException", text)

    async def _read(self, request: Request, read: Callable[..., Awaitable[T]], *args: Any) -> T | Response:
        """The result of `read` on the blob store, or the answer that it cannot be read now."""
        client = self._client or attached(request).client
        try:
            with client._calls.call():
                return await read(client._stack.blob.uncached, *args)
        except StorageUnavailable:
            answer = _error(503, "ServiceUnavailableException", "the store does not answer: try again later")
            answer.headers["Retry-After"] = str(RETRY_AFTER_S)
            return answer


def _no_namespace(name: str) -> Response:
    return _error(404, "NoSuchNamespaceException", f"there is no namespace {name}")


def _no_table(space: str, name: str) -> Response:
    namespace = space.replace("\x1f", ".")  # which joins its levels in a path
    text = f"there is no published table {name!r} in the namespace {namespace!r}"
    return _error(404, "NoSuchTableException", text)


def _error(status: int, kind: str, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)
