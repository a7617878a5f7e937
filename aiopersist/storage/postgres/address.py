"""The URL of a Postgres: its servers and the schema.

If the URL names several servers, or a name that moves, only the primary is used. A standby answers, too, but
may lack commits that were acknowledged. A client that took its answers for the newest would see appends
vanish, and a sweep would delete their blobs as leaks.
"""

from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, urlencode

from aiopersist.errors import InvalidLocation
from aiopersist.storage.address import Address, is_port

SCHEMA_BYTES_MAX = 63  # Postgres cuts longer names
_OWN_OPTIONS = {"schema"}
_DRIVER_OPTIONS = {  # passed to the driver as they are
    "host", "port", "user", "password", "passfile", "dbname", "database", "sslmode", "sslrootcert", "sslcert",
    "sslkey", "sslpassword", "sslcrl", "sslnegotiation", "target_session_attrs", "krbsrvname", "gsslib",
    "service", "servicefile",
}  # fmt: skip
_SERVERS = "target_session_attrs"
_WRITABLE = ("primary", "read-write")


@dataclass(frozen=True, repr=False)
class PostgresAddress:
    """`arguments` are those of the driver; `shown` is the URL without secrets."""

    arguments: dict[str, str]
    schema: str
    shown: str
    may_lag: bool = False
    """Whether the URL allows a standby."""

    @classmethod
    def parse(cls, url: str, *, schema: str) -> Self:
        """Parse `url`; `schema` is the default. Options are `schema` and those of libpq."""
        address = Address.parse(url, _OWN_OPTIONS | _DRIVER_OPTIONS)
        address.check_servers()
        if not all(map(is_port, filter(None, address.options.get("port", "").split(",")))):
            raise InvalidLocation("postgres: option 'port' is not a port number")
        name = address.options.get("schema", schema)
        if not 0 < len(name.encode()) <= SCHEMA_BYTES_MAX or "\0" in name:
            raise InvalidLocation(f"postgres: option 'schema' is not a name of 1 to {SCHEMA_BYTES_MAX} bytes")
        may_lag = address.options.get(_SERVERS, _WRITABLE[0]) not in _WRITABLE
        return cls(_driver_arguments(url, address), name, repr(address), may_lag)

    def check_newest(self) -> None:
        """Raise `InvalidLocation` if the URL allows a standby, which may lag behind."""
        if self.may_lag:
            raise InvalidLocation(f"postgres: option {_SERVERS!r} must be {' or '.join(_WRITABLE)}")


def _driver_arguments(url: str, address: Address) -> dict[str, str]:
    """The URL without our own options; the password beside it, so that no text of the driver shows it."""
    options = {_SERVERS: _WRITABLE[0]}
    options |= {name: value for name, value in address.options.items() if name in _DRIVER_OPTIONS}
    host = url.partition("://")[2].partition("?")[0].partition("/")[0].rpartition("@")[2]
    password = options.pop("password", "") or address.password
    user = f"{quote(address.user, safe='')}@" if address.user else ""
    dsn = f"postgresql://{user}{host}{quote(address.path)}"
    arguments = {"dsn": f"{dsn}?{urlencode(options)}"}
    return arguments | ({"password": password} if password else {})
