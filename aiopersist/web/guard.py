"""Protects every page: who may see it, and what a browser may do with it.

- *Headers*: pages load nothing from other hosts, contain no inline script or style, and cannot be framed.
- *A token*, if there is one. A visit with `?token=` in the address sets a cookie and redirects to the address
  without it; programs send `Authorization: Bearer`. Tokens are compared in constant time.
- *The name of the host*, on a loopback address. Otherwise another site could let its name point here, become
  the same origin as these pages, and read them (DNS rebinding).
- *The secret of a form*. The page gives the browser a cookie, and its form contains an HMAC of that cookie
  with a key that is kept in the location (`storage/identity.py`). Other sites cannot read the form. A page on
  another port may plant a cookie, but cannot compute the HMAC.
- *The origin of a form*: if the browser sends `Sec-Fetch-Site` or `Origin`, it must name these pages.

Each protection is an ASGI application around another one, so streams pass through.
"""

import hashlib
import hmac
from collections.abc import Collection
from http.cookies import SimpleCookie
from urllib.parse import parse_qsl, quote, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aiopersist.base.runtime import SYSTEM

POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'"
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
FORM_COOKIE = "aiopersist_form"
FORM_FIELD = "form"
COOKIE_S = 12 * 3600


class WithHeaders:
    """Adds the headers to every response, unless the page sets them itself. Caches do not store pages."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if "etag" not in headers:
                    headers.setdefault("Cache-Control", "no-store")
            await send(message)

        await self._app(scope, receive, send_with_headers)


class HostCheck:
    """Refuses requests whose `Host` is none of `names`, on any port."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and host_name(Headers(scope=scope).get("host", "")) not in self._names:
            names = ", ".join(sorted(self._names))
            refusal = PlainTextResponse(f"This server answers only to the names {names}.\n", 421)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def host_name(host: str) -> str:
    """The name in a `Host` header, in lower case, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


class TokenGate:
    """Passes on requests with the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        digest = hashlib.sha256(b"aiopersist inspector\0" + token.encode()).hexdigest()
        # Cookies ignore ports, so each server of a host needs its own name.
        self._name, self._value = f"aiopersist_{digest[:8]}", digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._has_token(scope):
            await self._app(scope, receive, send)
        else:
            await self._answer(scope)(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, credentials = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and are_equal(credentials.strip(), self._token):
            return True
        return are_equal(_cookie(headers, self._name), self._value)

    def _answer(self, scope: Scope) -> Response:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(name == "token" and are_equal(value, self._token) for name, value in pairs):
            return PlainTextResponse("Open the address that the server printed, with ?token=...\n", 401)
        rest = urlencode([(name, value) for name, value in pairs if name != "token"])
        path = "./" + quote(scope["path"].rpartition("/")[2], errors="replace")
        response = Response(status_code=303, headers={"Location": path + ("?" + rest if rest else "")})
        return _with_cookie(response, scope, self._name, self._value)


def are_equal(candidate: str, secret: str) -> bool:
    """Whether both are equal, in constant time."""
    return hmac.compare_digest(candidate.encode("utf-8", "surrogateescape"), secret.encode())


def _with_cookie(response: Response, scope: Scope, name: str, value: str) -> Response:
    """The response; it sets the cookie, for these pages only."""
    response.set_cookie(
        name,
        value,
        max_age=COOKIE_S,
        path=scope.get("root_path", "") or "/",
        secure=scope.get("scheme") == "https",
        httponly=True,
        samesite="strict",
    )
    return response


def _cookie(headers: Headers, name: str) -> str:
    cookies: SimpleCookie = SimpleCookie()
    try:
        cookies.load(headers.get("cookie", ""))
    except ValueError:  # another server of the host set it
        return ""
    return cookies[name].value if name in cookies else ""


# --- forms -----------------------------------------------------------------------------------------------


def form_cookie(request: Request) -> str:
    """The cookie of this browser; a new value for its first form."""
    return request.cookies.get(FORM_COOKIE) or SYSTEM.token()


def form_secret(key: bytes, cookie: str) -> str:
    """The secret in the forms of a browser with this cookie."""
    return hmac.digest(key, cookie.encode("utf-8", "surrogateescape"), hashlib.sha256).hex()


def with_form_cookie(response: Response, request: Request, cookie: str) -> Response:
    """The response; it sets the cookie."""
    return _with_cookie(response, request.scope, FORM_COOKIE, cookie)


def is_own_form(request: Request, secret: str, key: bytes) -> bool:
    """Whether these pages made the form, for this browser."""
    cookie = request.cookies.get(FORM_COOKIE, "")
    return bool(cookie) and are_equal(secret, form_secret(key, cookie)) and is_of_these_pages(request)


def is_of_these_pages(request: Request) -> bool:
    """Whether the browser says that the form is on these pages, or says nothing. `Sec-Fetch-Site` is checked
    first: no page can set it, and a proxy may change `Host`. Browsers leave it out on plain HTTP."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
