"""The URL of a Postgres: its servers, the schema, and how it is reached.

If the URL names several servers, or a name that moves, only the primary is used. A standby answers, too, but
may lack commits that were acknowledged. A client that took its answers for the newest would see appends
vanish, and a sweep would delete their blobs as leaks.

The options are those of libpq. The driver knows some; others are set here, each with its meaning. One whose
meaning cannot be kept is refused. `channel_binding=require` says that nobody may stand between: the driver
cannot bind, so the certificate of the server is verified, with its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, urlencode

from aiopersist.base.errors import InvalidLocation
from aiopersist.storage.address import Address, is_port

SCHEMA_BYTES_MAX = 63  # Postgres cuts longer names
CONNECT_TIMEOUT_S = 10  # after it the retry layer takes over
IDLE_CONNECTIONS = 2
_DRIVER_OPTIONS = {  # passed to the driver as they are
    "host", "port", "user", "password", "passfile", "dbname", "database", "sslmode", "sslrootcert", "sslcert",
    "sslkey", "sslpassword", "sslcrl", "sslnegotiation", "ssl_min_protocol_version",
    "ssl_max_protocol_version", "target_session_attrs", "krbsrvname", "gsslib", "service", "servicefile",
}  # fmt: skip
_BOUND = "require"  # the driver has no channel binding; a certificate that is verified binds as well
_HARMLESS = {  # what the driver does anyway
    "channel_binding": ("disable", "prefer", _BOUND),
    "gssencmode": ("disable", "prefer"),
    "sslcompression": ("0",),
    "sslsni": ("1",),
    "client_encoding": ("utf8", "UTF8", "auto"),
    "load_balance_hosts": ("disable",),
    "pgbouncer": ("true",),
}
_INSTEAD = {
    "gssencmode": "the driver has none; use sslmode",
    "pgbouncer": "leave it out where there is none: a pooler is found by itself",
}
_NUMBERS = {  # by option, the least and the greatest
    "connect_timeout": (1, 3600),
    "connections": (1, 1000),
    "idle_connections": (0, 1000),
    "keepalives": (0, 1),
    "keepalives_idle": (0, 32767),
    "keepalives_interval": (0, 32767),
    "keepalives_count": (0, 127),
    "tcp_user_timeout": (0, 2**31 - 1),
}
_OWN_OPTIONS = {"schema", "application_name", "fallback_application_name", "options", *_HARMLESS, *_NUMBERS}
_SERVERS = "target_session_attrs"
_WRITABLE = ("primary", "read-write")
_SYSTEM = "system"


@dataclass(frozen=True, repr=False)
class PostgresAddress:
    """`arguments` are those of the driver; `shown` is the URL without secrets."""

    arguments: dict[str, str]
    schema: str
    shown: str
    may_lag: bool = False
    """Whether the URL allows a standby."""
    servers: str = _WRITABLE[0]
    """Which servers may be used, as `target_session_attrs` says it."""
    several: bool = False
    """Whether the URL names several servers."""
    startup: Mapping[str, str] = field(default_factory=dict)
    """Parameters that every pooler lets through."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """The options that are numbers, as far as they are given."""
    pooled: bool = False
    """Whether the URL says that there is a pooler."""
    trusts_system: bool = False
    """Whether the server's certificate is that of an authority that the system trusts."""

    @classmethod
    def parse(cls, url: str, *, schema: str) -> Self:
        """Parse `url`; `schema` is the default. Options are `schema`, `connections`, `idle_connections`,
        `pgbouncer`, and those of libpq."""
        address = Address.parse(url, _OWN_OPTIONS | _DRIVER_OPTIONS)
        address.check_servers()
        options = address.options
        if not all(map(is_port, filter(None, options.get("port", "").split(",")))):
            raise InvalidLocation("postgres: option 'port' is not a port number")
        name = options.get("schema", schema)
        if not 0 < len(name.encode()) <= SCHEMA_BYTES_MAX or "\0" in name:
            raise InvalidLocation(f"postgres: option 'schema' is not a name of 1 to {SCHEMA_BYTES_MAX} bytes")
        for option, values in _HARMLESS.items():
            if options.get(option, values[0]) not in values:
                instead = _INSTEAD.get(option, "it has another meaning")
                raise InvalidLocation(f"postgres: option {option!r} must be {' or '.join(values)}: {instead}")
        servers = options.get(_SERVERS, _WRITABLE[0])
        return cls(
            _driver_arguments(url, address),
            name,
            repr(address),
            servers not in _WRITABLE,
            servers,
            "," in address.host or "," in options.get("host", "") or "service" in options,
            _startup(options),
            {option: _number(option, options[option]) for option in _NUMBERS if option in options},
            "pgbouncer" in options,
            _trusts_system(options),
        )

    def check_newest(self) -> None:
        """Raise `InvalidLocation` if the URL allows a standby, which may lag behind."""
        if self.may_lag:
            raise InvalidLocation(f"postgres: option {_SERVERS!r} must be {' or '.join(_WRITABLE)}")


def _driver_arguments(url: str, address: Address) -> dict[str, str]:
    """The URL without our own options; the password beside it, so that no text of the driver shows it."""
    options = {_SERVERS: _WRITABLE[0]}
    options |= {name: value for name, value in address.options.items() if name in _DRIVER_OPTIONS}
    if address.options.get("channel_binding") == _BOUND:
        options["sslmode"] = "verify-full"
    if _trusts_system(address.options):
        options.pop("sslrootcert", None)
    host = url.partition("://")[2].partition("?")[0].partition("/")[0].rpartition("@")[2]
    password = options.pop("password", "") or address.password
    user = f"{quote(address.user, safe='')}@" if address.user else ""
    dsn = f"postgresql://{user}{host}{quote(address.path)}"
    arguments = {"dsn": f"{dsn}?{urlencode(options)}"}
    return arguments | ({"password": password} if password else {})


def _startup(options: Mapping[str, str]) -> dict[str, str]:
    name = options.get("application_name") or options.get("fallback_application_name") or "aiopersist"
    return {"application_name": name} | ({"options": options["options"]} if "options" in options else {})


def _number(option: str, text: str) -> int:
    least, greatest = _NUMBERS[option]
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= greatest):
        raise InvalidLocation(f"postgres: option {option!r} is a whole number from {least} to {greatest}")
    return int(text)


def _trusts_system(options: Mapping[str, str]) -> bool:
    root, mode = options.get("sslrootcert"), options.get("sslmode")
    bound = options.get("channel_binding") == _BOUND
    if bound and mode in ("disable", "allow", "prefer"):
        raise InvalidLocation(f"postgres: option 'channel_binding' = require contradicts sslmode={mode}")
    if root == _SYSTEM and not bound and mode not in (None, "verify-full"):
        raise InvalidLocation("postgres: option 'sslrootcert' = system needs sslmode=verify-full")
    return root == _SYSTEM or (bound and root is None)
