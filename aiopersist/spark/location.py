"""A location as a value that travels in options, plans and closures, which Spark shows.

So it never contains a secret. Credentials come from the environment of the executors (the AWS chain,
`PGPASSWORD`, a `.pgpass`). Or the whole URL does: `env:NAME` stands for the value of a variable, on the
driver and on the executors.
"""

import json
import os
from typing import Any, NamedTuple

from aiopersist.base.errors import InvalidLocation
from aiopersist.base.resource import Opening
from aiopersist.base.settings import Settings
from aiopersist.client.client import Client
from aiopersist.client.open import open as open_client
from aiopersist.storage.address import has_secrets, scheme_of
from aiopersist.storage.urls import Location, parse_location

ENV = "env:"


class SparkLocation(NamedTuple):
    """URLs or `env:NAME`; without any of them, the variables `AIOPERSIST_LOCATION` and so on name the
    location. `settings` is JSON."""

    blob: str | None = None
    consensus: str | None = None
    location: str | None = None
    settings: str | None = None

    @classmethod
    def of(
        cls,
        location: "str | os.PathLike[str] | Location | None" = None,
        blob: Any = None,
        consensus: Any = None,
        settings: Settings | None = None,
    ) -> "SparkLocation":
        """`InvalidLocation` for stores that cannot travel: instances, stores in memory, URLs with secrets."""
        text = None if settings is None else json.dumps(settings.model_dump(mode="json", exclude_unset=True))
        if location is None and blob is None and consensus is None:
            return cls(settings=text)
        if isinstance(location, str) and location.startswith(ENV) and blob is consensus is None:
            return cls(location=location, settings=text)
        parsed = parse_location(location, blob, consensus)  # env:NAME passes as a URL
        return cls(_public(parsed.blob), _public(parsed.consensus), None, text)

    def open(self, *, maintenance: bool) -> Opening[Client]:
        """A client of the location, in this process."""
        blob, consensus, location = map(_looked_up, (self.blob, self.consensus, self.location))
        settings = None if self.settings is None else Settings(**json.loads(self.settings))
        return open_client(
            location, blob=blob, consensus=consensus, settings=settings, maintenance=maintenance
        )


def _public(store: Any) -> str:
    """The URL, if Spark may show it."""
    if not isinstance(store, str):
        raise InvalidLocation(f"Spark's workers cannot use a {type(store).__name__}: pass URLs")
    if store.startswith(ENV):
        return store
    if scheme_of(store) == "mem":
        raise InvalidLocation("mem: exists in one process only, and Spark's workers are other processes")
    if has_secrets(store):
        raise InvalidLocation(
            f"{scheme_of(store)}: this URL contains a secret, which Spark would show in plans and logs: "
            "put it into a variable of the executors' environment, and pass env:NAME"
        )
    return store


def _looked_up(store: str | None) -> str | None:
    if store is None or not store.startswith(ENV):
        return store
    name = store.removeprefix(ENV)
    url = os.environ.get(name)
    if not url:
        raise InvalidLocation(f"the environment of this process has no {name}, which {store} names: set it")
    return url
