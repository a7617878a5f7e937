"""The inspector as an ASGI application: its routes, and the pages of errors.

Every page lies directly below the path where the application is mounted, and all links are relative. So the
inspector works under any path and behind any proxy.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from aiopersist.base.errors import (
    Error,
    Indeterminate,
    InvalidUsage,
    LeaseExpired,
    NotReadable,
    ShardFinalized,
    SinceViolation,
    StorageUnavailable,
    UnknownShard,
    UnknownTag,
)
from aiopersist.client.client import Client
from aiopersist.storage.identity import location_key
from aiopersist.web.cache import ClientCache, StillReading
from aiopersist.web.contents_page import contents, live, value
from aiopersist.web.guard import (
    FORM_FIELD,
    TokenGate,
    WithHeaders,
    form_cookie,
    form_secret,
    is_of_these_pages,
    is_own_form,
    with_form_cookie,
)
from aiopersist.web.location import ListQuery, location_page
from aiopersist.web.metrics import CONTENT_TYPE, metrics_text
from aiopersist.web.render import FOLDER, link, rendered
from aiopersist.web.shard import ShardQuery, shard_page
from aiopersist.web.work import KEEP_UNITS, form_of, piece_of

log = logging.getLogger("aiopersist").getChild("web")

NOT_OWN = "The form was not sent by these pages: reload the page. A proxy must forward the Host header"
FORM_KEY = "forms of the inspector"

ClientOf = Callable[[Request], Client]
Page = Callable[[Request, Client, ClientCache], Awaitable[Response]]

STATUS: tuple[tuple[type[Error], int], ...] = (
    (UnknownShard, 404),
    (UnknownTag, 404),
    (SinceViolation, 410),
    (ShardFinalized, 410),
    (NotReadable, 425),
    (LeaseExpired, 409),
    (InvalidUsage, 400),
    (StorageUnavailable, 503),
    (Indeterminate, 503),
)


def inspector(client: Client | ClientOf, *, write: bool = False, token: str | None = None) -> ASGIApp:
    """Pages that show a location, as an ASGI application: serve it alone, or mount it at any path of another
    application.

    `client` is an open client, or a function that returns the client for a request. The pages only read. A
    client opened with `readonly=True` writes nothing; another one registers as a reader while it shows
    contents. `write=True` adds compaction, garbage collection, fsck, retention and tags, each by a form that
    no other site can send; the client must be able to write.

    Without `token`, everybody who reaches the pages sees all contents of the location. With `token`, a
    visitor opens the address with `?token=...`, which sets a cookie, or sends `Authorization: Bearer ...`."""
    client_of: ClientOf = client if not isinstance(client, Client) else lambda request: client
    site = _Site(client_of, write)
    app: ASGIApp = Starlette(
        routes=[
            Route("/", site.of(_location)),
            Route("/shard", site.of(_shard)),
            Route("/contents", site.of(contents)),
            Route("/value", site.of(value)),
            Route("/live", site.of(live)),
            Route("/usage", site.of(_count_usage), methods=["POST"]),
            Route("/metrics", site.of(_metrics)),
            Route("/do", site.of(_do), methods=["POST"]),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ],
        exception_handlers={HTTPException: _refused},
    )
    if token is not None:
        app = TokenGate(app, token)
    return WithHeaders(app)


class _Site:
    """State that all pages of an inspector share."""

    def __init__(self, client_of: ClientOf, write: bool) -> None:
        self._client_of = client_of
        self._write = write
        self._caches: WeakKeyDictionary[Client, ClientCache] = WeakKeyDictionary()

    def of(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a page."""
        return partial(self._answer, page)

    async def _answer(self, page: Page, request: Request) -> Response:
        client = self._client_of(request)
        request.state.write = self._write
        try:
            if (cache := self._caches.get(client)) is None:
                cache = self._caches[client] = ClientCache(client)
            return await page(request, client, cache)
        except StillReading:
            return HTMLResponse(rendered("reading.html", {}))
        except HTTPException as error:
            return await _refused(request, error)
        except Exception as error:  # only this page fails
            return failed(error)


async def _location(request: Request, client: Client, cache: ClientCache) -> Response:
    values = await location_page(client, cache.census, ListQuery.of(request.query_params))
    values |= {"usage": cache.usage, "write": request.state.write}
    return HTMLResponse(rendered("location.html", values))


async def _count_usage(request: Request, client: Client, cache: ClientCache) -> Response:
    """Start a count. It changes nothing but costs requests, so other sites must not start it."""
    if not is_of_these_pages(request):
        raise HTTPException(403, NOT_OWN)
    cache.usage.begin(client._stack.supervisor, client.admin.usage, "count the usage")
    return RedirectResponse("./#usage", 303)


async def _metrics(request: Request, client: Client, cache: ClientCache) -> Response:
    """For Prometheus."""
    return Response(metrics_text(client), media_type=CONTENT_TYPE)


async def _shard(request: Request, client: Client, cache: ClientCache) -> Response:
    query = ShardQuery.of(request.query_params)
    shard = await cache.shard_soon(client, query.name)
    cookie = form_cookie(request) if request.state.write else None
    secret = None if cookie is None else form_secret(await _form_key(client), cookie)
    wall = client._stack.runtime.wall()
    offered = {"form": secret, "works": cache.works.of(shard.id), "units": KEEP_UNITS, "wall": wall}
    values = await shard_page(client, shard, query) | offered
    page = HTMLResponse(await client._stack.compute(rendered, "shard.html", values))
    return page if cookie is None else with_form_cookie(page, request, cookie)


async def _form_key(client: Client) -> bytes:
    return await location_key(client._stack.blob, FORM_KEY)


async def _do(request: Request, client: Client, cache: ClientCache) -> Response:
    """Start the work that a form asks for."""
    if not request.state.write:
        raise HTTPException(403, "This inspector is read-only")
    form = await form_of(request)
    if not is_own_form(request, form.get(FORM_FIELD, ""), await _form_key(client)):
        raise HTTPException(403, NOT_OWN)
    title, piece = piece_of(form)
    name = form.get("name", "")
    shard = await cache.shard(client, name)
    cache.works.begin(client, shard.id, title, piece)
    return RedirectResponse(link("shard", "work", name=name), 303)


# --- errors ----------------------------------------------------------------------------------------------


def failed(error: Exception) -> Response:
    """The page of an error. It shows messages of the library's errors only. Any other error is a fault of the
    inspector, and its text may hold secrets, so it goes to the log."""
    if not isinstance(error, Error):
        log.error("a page of the inspector failed", exc_info=error)
        text = "The page failed; the log of the server has the error."
        return _page(500, type(error).__name__, text, None)
    status = next((status for kind, status in STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": "2"} if status == 503 else None
    return _page(status, type(error).__name__, str(error), headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _page(error.status_code, error.detail, "", None)


def _page(status: int, title: str, text: str, headers: dict[str, str] | None) -> Response:
    values: dict[str, Any] = {"status": status, "title": title, "text": text, "home": link("./")}
    return HTMLResponse(rendered("error.html", values), status, headers)
