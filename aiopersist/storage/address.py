"""A store's URL, taken apart by one rule for every scheme.

    scheme://user:password@host/path?option=value&...

Components are percent-decoded, `#` is a character like any other. What is wrong with a URL is
`InvalidLocation`, which names the scheme or option at fault and never shows a value: it may be a secret.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, unquote

from aiopersist.errors import InvalidLocation

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PUBLIC_OPTIONS = {"endpoint", "fsync", "region", "schema"}  # any other's value may be a secret


def scheme_of(url: str) -> str | None:
    """The scheme in lower case, or `None` where the text is no URL."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


@dataclass(frozen=True, repr=False)
class Address:
    """The parts of a URL. `host` may end in a port; `path` begins with a slash or is empty."""

    scheme: str
    user: str
    password: str
    host: str
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str, allowed: Collection[str] | None = ()) -> Self:
        """Take `url` apart; an option that is not `allowed` is `InvalidLocation` (`None` allows all)."""
        scheme = scheme_of(url)
        if scheme is None:
            raise InvalidLocation("not a URL of a store: it has no scheme")
        rest, _, query = url.partition("://")[2].partition("?")
        authority, slash, path = rest.partition("/")
        userinfo, _, host = authority.rpartition("@")
        user, _, password = userinfo.partition(":")
        options = _options(scheme, query, allowed)
        return cls(scheme, unquote(user), unquote(password), unquote(host), unquote(slash + path), options)

    @property
    def file_path(self) -> str:
        """The path in the file system: absolute with three slashes, relative with two."""
        if self.user or self.password:
            raise InvalidLocation(f"{self.scheme}: a path has no user")
        path = ("" if self.host == "localhost" else self.host) + self.path
        if re.match(r"/[A-Za-z]:/", path):  # /C:/folder
            path = path[1:]
        if not path or "\0" in path:
            raise InvalidLocation(f"{self.scheme}: the URL names no path")
        return path

    def __repr__(self) -> str:
        """Without anything that may be secret."""
        user = f"{self.user}@" if self.user else ""
        shown = [
            f"{k}={v if k in _PUBLIC_OPTIONS and '@' not in v else '***'}" for k, v in self.options.items()
        ]
        return f"{self.scheme}://{user}{self.host}{self.path}" + ("?" + "&".join(shown) if shown else "")


def without_secrets(url: str) -> str:
    """`url` for people."""
    try:
        return repr(Address.parse(url, allowed=None))
    except InvalidLocation:
        return f"{scheme_of(url) or ''}://***"


def has_secrets(url: str) -> bool:
    """Whether it may hold one: a password, or an option that is not known to be public."""
    address = Address.parse(url, allowed=None)
    return bool(address.password) or not address.options.keys() <= _PUBLIC_OPTIONS


def _options(scheme: str, query: str, allowed: Collection[str] | None) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if allowed is not None and name not in allowed:
            raise InvalidLocation(f"{scheme}: unknown option {name!r}")
        if name in options:
            raise InvalidLocation(f"{scheme}: option {name!r} is given twice")
        options[name] = value
    return options
