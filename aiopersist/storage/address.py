"""The URL of a store, parsed by one rule for every scheme.

    scheme://user:password@host/path?option=value&...

Components are percent-decoded; `#` and `+` are characters like any other. An illegal URL is
`InvalidLocation`, which names the scheme or option at fault and never shows a value: it may be a secret.

*Torn secrets.* A `/` or `?` in a password that is not percent-encoded ends the authority, and a `&` in the
value of an option ends the value. The rest of the secret then stands where a host, a path or the name of an
option is expected. An `@` behind this rest gives it away: if an `@` stands further to the right than it
should, behind a colon, no part of the URL is shown. The name of an option is shown only if no secret stands
before it.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote

from aiopersist.base.errors import InvalidLocation

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_SERVER = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::(\d+))?")
_ENDPOINT = re.compile(r"https?://([^@/?#]+)(/[^@?#]*)?")
PORT_MAX = 65535
_PATHS = {"file", "mem", "sqlite"}  # URLs of files have no user: `:` and `@` are parts of names
_USER_IS_PUBLIC = {"postgres", "postgresql"}  # the user of another scheme may be a key or a token
# The value of another option may be a secret.
_PUBLIC_OPTIONS = {
    "account", "cache", "cache_bytes", "endpoint", "fsync", "poll_s", "region", "schema",
    "application_name", "channel_binding", "connect_timeout", "connections", "fallback_application_name",
    "gssencmode", "idle_connections", "keepalives", "keepalives_count", "keepalives_idle",
    "keepalives_interval", "pgbouncer", "sslmode", "sslrootcert", "target_session_attrs", "tcp_user_timeout",
}  # fmt: skip
_ESCAPES = "in a user, a password or an option write / as %2F, ? as %3F, @ as %40, & as %26"


def scheme_of(url: str) -> str | None:
    """The scheme in lower case, or `None` if the text is no URL."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


@dataclass(frozen=True, repr=False)
class Address:
    """The components of a URL. `host` may end in a port; `path` begins with a slash or is empty."""

    scheme: str
    user: str
    password: str
    host: str
    path: str
    options: Mapping[str, str]
    torn: bool
    """Whether a part of a secret may stand in any of these fields."""

    @classmethod
    def parse(cls, url: str, allowed: Collection[str] | None = ()) -> Self:
        """Parse `url`; an option that is not `allowed` is `InvalidLocation` (`None` allows all)."""
        scheme = scheme_of(url)
        if scheme is None:
            raise InvalidLocation("not a URL of a store: it has no scheme")
        rest, _, query = url.partition("://")[2].partition("?")
        authority, slash, path = rest.partition("/")
        userinfo, _, host = authority.rpartition("@")
        user, _, password = userinfo.partition(":")
        torn = False
        if scheme not in _PATHS:
            if "@" in path and _ends_a_password(rest):
                raise InvalidLocation(f"{scheme}: an '@' stands in the path: {_ESCAPES}")
            torn = ("@" in query and _ends_a_password(f"{rest}?{query}")) or not _are_servers(host)
        options = _options(scheme, query, allowed, torn)
        user, password, host, path = map(unquote, (user, password, host, slash + path))
        return cls(scheme, user, password, host, path, options, torn)

    @property
    def file_path(self) -> str:
        """The path in the file system: absolute with three slashes, relative with two."""
        if self.user or self.password:
            raise InvalidLocation(f"{self.scheme}: the URL has a user, which a path cannot have")
        path = ("" if self.host == "localhost" else self.host) + self.path
        if re.match(r"/[A-Za-z]:/", path):  # /C:/folder
            path = path[1:]
        if not path or "\0" in path:
            raise InvalidLocation(f"{self.scheme}: the URL names no path")
        return path

    def check_servers(self) -> None:
        """Raise `InvalidLocation` unless `host` is `host:port`, or several of these with commas between."""
        if not _are_servers(self.host):
            text = f"{self.scheme}: the port after the host is not a number from 1 to {PORT_MAX}; {_ESCAPES}"
            raise InvalidLocation(text)

    def check_bucket(self, what: str = "bucket") -> None:
        """Raise `InvalidLocation` unless the URL names a bucket, and its options go together."""
        if not self.host or ":" in self.host or self.user or self.password:
            raise InvalidLocation(f"{self.scheme}: the URL names no {what}: {self.scheme}://{what}/prefix")
        if "endpoint" in self.options and not is_endpoint(self.options["endpoint"]):
            text = f"{self.scheme}: option 'endpoint' is http://host:port, without user or password"
            raise InvalidLocation(text)
        if ("access_key" in self.options) != ("secret_key" in self.options):
            raise InvalidLocation(f"{self.scheme}: options 'access_key' and 'secret_key' go together")

    def __repr__(self) -> str:
        """The URL without anything that may be secret."""
        if self.torn:
            return f"{self.scheme}://***"
        user = self.user if self.scheme in _USER_IS_PUBLIC else "***"
        shown = [f"{k}={v}" for k, v in self.options.items() if _is_public(k, v)]
        shown += ["***"] if len(shown) < len(self.options) else []
        query = "?" + "&".join(shown) if shown else ""
        return f"{self.scheme}://{f'{user}@' if self.user else ''}{self.host}{self.path}{query}"


def without_secrets(url: str) -> str:
    """`url` as it may be shown."""
    try:
        return repr(Address.parse(url, allowed=None))
    except InvalidLocation:
        return f"{scheme_of(url) or ''}://***"


def has_secrets(url: str) -> bool:
    """Whether `url` may hold a secret: a password, or an option that is not known to be public."""
    address = Address.parse(url, allowed=None)
    user_is_public = not address.user or address.scheme in _USER_IS_PUBLIC
    options_are_public = all(_is_public(*option) for option in address.options.items())
    return bool(address.torn or address.password or not user_is_public or not options_are_public)


def is_port(text: str) -> bool:
    """Whether the text is a port number."""
    return text.isascii() and text.isdigit() and 0 < int(text) <= PORT_MAX


def is_endpoint(text: str) -> bool:
    """Whether the text is the URL of a server, `http://host:port/path`, without anything else."""
    match = _ENDPOINT.fullmatch(text)
    return match is not None and _are_servers(match[1])


def _is_public(option: str, value: str) -> bool:
    if option == "endpoint":
        return is_endpoint(value)
    return option in _PUBLIC_OPTIONS and "@" not in value


def _ends_a_password(text: str) -> bool:
    """Whether the text before the last `@` may be a user and a password."""
    return ":" in text.rpartition("@")[0]


def _are_servers(host: str) -> bool:
    matches = [_SERVER.fullmatch(server) for server in host.split(",")]
    return all(match is not None and (match[1] is None or is_port(match[1])) for match in matches)


def _options(scheme: str, query: str, allowed: Collection[str] | None, torn: bool) -> dict[str, str]:
    options: dict[str, str] = {}
    for option in filter(None, query.split("&")):
        name, equals, value = option.partition("=")
        name = unquote(name)
        if allowed is not None and name not in allowed:
            whole = equals and _NAME.fullmatch(name) and not torn and options.keys() <= _PUBLIC_OPTIONS
            raise InvalidLocation(f"{scheme}: unknown option {name!r}" if whole else _unknown(scheme))
        if allowed is not None and name in options:
            raise InvalidLocation(f"{scheme}: option {name!r} is given twice")
        options[name] = unquote(value)
    return options


def _unknown(scheme: str) -> str:
    return f"{scheme}: an option is unknown, or a value is cut: {_ESCAPES}"
