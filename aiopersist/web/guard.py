"""What stands before every page: who may see it, and what a browser may do with it.

- *Headers*: nothing is loaded from other hosts, no script or style stands in a page, no other site frames it.
- *A token*, if there is one: a visit with `?token=` in its address sets a cookie and goes on without it in
  the address; programs send it as `Authorization: Bearer`. Tokens are compared in constant time.
- *The name of the host*, on a loopback address: a web site whose name was made to point here would otherwise
  be the same origin as these pages, and could read them (DNS rebinding).
- *A secret of the form*: a page that changes something gives the browser a cookie, and its form has what a
  key of the location makes of that cookie. Other sites cannot read it, and who plants a cookie of his own, as
  a page of another port can, does not know what belongs to it.
- *The origin of a form*: where the browser tells it, by `Sec-Fetch-Site` or by `Origin`, it is these pages.

Each is an ASGI application around another one, so that streams pass through them as they are.
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
    """Adds the headers to every response; what a page says itself stays. Pages are not kept by caches."""

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
    """Refuses requests whose `Host` is none of `names`, whatever its port."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = frozenset(names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and host_name(Headers(scope=scope).get("host", "")) not in self._names:
            names = ", ".join(sorted(self._names))
            refusal = PlainTextResponse(f"This server answers to the names {names} alone.\n", 421)
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def host_name(host: str) -> str:
    """The name in a `Host` header, in lower case, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


class TokenGate:
    """Lets those pass who know the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token
        digest = hashlib.sha256(b"aiopersist inspector\0" + token.encode()).hexdigest()
        # Cookies do not know ports: each server of a host has a name of its own.
        self._name, self._value = f"aiopersist_{digest[:8]}", digest[8:]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_known(scope):
            await self._app(scope, receive, send)
        else:
            await self._answer(scope)(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and same(given.strip(), self._token):
            return True
        return same(_cookie(headers, self._name), self._value)

    def _answer(self, scope: Scope) -> Response:
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if not any(name == "token" and same(value, self._token) for name, value in pairs):
            return PlainTextResponse("Open the address with ?token=... that the server printed.\n", 401)
        rest = urlencode([(name, value) for name, value in pairs if name != "token"])
        path = "./" + quote(scope["path"].rpartition("/")[2], errors="replace")
        response = Response(status_code=303, headers={"Location": path + ("?" + rest if rest else "")})
        return _with_cookie(response, scope, self._name, self._value)


def same(given: str, wanted: str) -> bool:
    """Whether both are the same, in a time that does not tell how much of them is."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


def _with_cookie(response: Response, scope: Scope, name: str, value: str) -> Response:
    """The response, which lets the browser keep the cookie, for these pages alone."""
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
    except ValueError:  # of other servers of the host
        return ""
    return cookies[name].value if name in cookies else ""


# --- forms -----------------------------------------------------------------------------------------------


def form_cookie(request: Request) -> str:
    """What the cookie of this browser says; something new for its first form."""
    return request.cookies.get(FORM_COOKIE) or SYSTEM.token()


def form_secret(key: bytes, cookie: str) -> str:
    """What the forms of a browser with that cookie have."""
    return hmac.digest(key, cookie.encode("utf-8", "surrogateescape"), hashlib.sha256).hex()


def with_form_cookie(response: Response, request: Request, cookie: str) -> Response:
    """The response, which lets the browser keep the cookie."""
    return _with_cookie(response, request.scope, FORM_COOKIE, cookie)


def is_own_form(request: Request, given: str, key: bytes) -> bool:
    """Whether a form that came was made by these pages, for this browser."""
    cookie = request.cookies.get(FORM_COOKIE, "")
    return bool(cookie) and same(given, form_secret(key, cookie)) and is_of_these_pages(request)


def is_of_these_pages(request: Request) -> bool:
    """Whether the browser says that a form lies on these pages, or says nothing. `Sec-Fetch-Site` comes
    first: no page can set it, and a proxy may have changed `Host`. Browsers leave it out on plain HTTP."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2].lower() == request.headers.get("host", "").lower()
