"""The inspector as an ASGI application: its addresses, and what becomes of errors.

Every page lies one step below the place where the application is mounted, and all addresses in pages are
relative. So it works under any path, behind any proxy, and needs to know neither.
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
)
from aiopersist.client.client import Client
from aiopersist.storage.identity import location_key
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
from aiopersist.web.known import Known, StillReading
from aiopersist.web.location import WantedList, location_page
from aiopersist.web.metrics import CONTENT_TYPE, metrics_text
from aiopersist.web.render import FOLDER, link, rendered
from aiopersist.web.shard import WantedShard, shard_page
from aiopersist.web.work import UNITS, form_of, piece_of

log = logging.getLogger("aiopersist").getChild("web")

NOT_OWN = "The form did not come from these pages: open the page again. A proxy has to pass on the Host"
FORM_KEY = "forms of the inspector"

ClientOf = Callable[[Request], Client]
Page = Callable[[Request, Client, Known], Awaitable[Response]]

STATUS: tuple[tuple[type[Error], int], ...] = (
    (UnknownShard, 404),
    (SinceViolation, 410),
    (ShardFinalized, 410),
    (NotReadable, 425),
    (LeaseExpired, 409),
    (InvalidUsage, 400),
    (StorageUnavailable, 503),
    (Indeterminate, 503),
)


def inspector(client: Client | ClientOf, *, write: bool = False, token: str | None = None) -> ASGIApp:
    """Pages that show what a location has, as an ASGI application: to be served alone, or mounted at any path
    of another application.

    `client` is an open client, or a function that gives the client for a request. The pages read; a client
    that was opened with `readonly=True` writes nothing at all, another one registers as a reader while it
    shows contents. `write=True` adds compaction, collection, fsck and retention, each by a form that no other
    site can send; the client must be able to write.

    Whoever reaches the pages sees all contents of the location. `token`: only who knows it does: by a visit
    with `?token=...` in the address, which sets a cookie, or with `Authorization: Bearer ...`."""
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
    """What all pages of an inspector share."""

    def __init__(self, client_of: ClientOf, write: bool) -> None:
        self._client_of = client_of
        self._write = write
        self._known: WeakKeyDictionary[Client, Known] = WeakKeyDictionary()

    def of(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of a page."""
        return partial(self._answer, page)

    async def _answer(self, page: Page, request: Request) -> Response:
        client = self._client_of(request)
        request.state.write = self._write
        try:
            if (known := self._known.get(client)) is None:
                known = self._known[client] = Known(client)
            return await page(request, client, known)
        except StillReading:
            return HTMLResponse(rendered("reading.html", {}))
        except HTTPException as error:
            return await _refused(request, error)
        except Exception as error:  # one page fails, the others do not
            return failed(error)


async def _location(request: Request, client: Client, known: Known) -> Response:
    values = await location_page(client, known.census, WantedList.of(request.query_params))
    values |= {"usage": known.usage, "write": request.state.write}
    return HTMLResponse(rendered("location.html", values))


async def _count_usage(request: Request, client: Client, known: Known) -> Response:
    """Begin to count. It changes nothing, but it costs requests, so no other site may ask for it."""
    if not is_of_these_pages(request):
        raise HTTPException(403, NOT_OWN)
    known.usage.begin(client._stack.supervisor, client.admin.usage, "count the usage")
    return RedirectResponse("./#usage", 303)


async def _metrics(request: Request, client: Client, known: Known) -> Response:
    """For Prometheus."""
    return Response(metrics_text(client), media_type=CONTENT_TYPE)


async def _shard(request: Request, client: Client, known: Known) -> Response:
    wanted = WantedShard.of(request.query_params)
    shard = await known.shard_soon(client, wanted.name)
    cookie = form_cookie(request) if request.state.write else None
    secret = None if cookie is None else form_secret(await _form_key(client), cookie)
    wall = client._stack.runtime.wall()
    offered = {"form": secret, "works": known.works.of(shard.id), "units": UNITS, "wall": wall}
    values = await shard_page(client, shard, wanted) | offered
    page = HTMLResponse(await client._stack.compute(rendered, "shard.html", values))
    return page if cookie is None else with_form_cookie(page, request, cookie)


async def _form_key(client: Client) -> bytes:
    return await location_key(client._stack.blob, FORM_KEY)


async def _do(request: Request, client: Client, known: Known) -> Response:
    """Begin the work that a form asks for."""
    if not request.state.write:
        raise HTTPException(403, "This inspector only reads")
    form = await form_of(request)
    if not is_own_form(request, form.get(FORM_FIELD, ""), await _form_key(client)):
        raise HTTPException(403, NOT_OWN)
    title, piece = piece_of(form)
    name = form.get("name", "")
    shard = await known.shard(client, name)
    known.works.begin(client, shard.id, title, piece)
    return RedirectResponse(link("shard", "work", name=name), 303)


# --- errors ----------------------------------------------------------------------------------------------


def failed(error: Exception) -> Response:
    """The page of an error. The message of an error of the library is for people; of another one, which is a
    fault of the inspector, the log tells: nobody knows what it holds."""
    if not isinstance(error, Error):
        log.error("a page of the inspector failed", exc_info=error)
        text = "The page could not be made; the log of the server says why."
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
