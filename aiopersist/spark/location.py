"""A location as a value that travels: into options, plans and closures, which Spark shows.

So the value never holds a secret. Credentials come from the environment of the executors (the AWS chain,
`PGPASSWORD`, a `.pgpass`); or the whole URL does: `env:NAME` stands for the value of that variable, on the
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
    """URLs, or `env:NAME`; without any of them the location comes from `AIOPERSIST_LOCATION` and its
    siblings. `settings` is JSON."""

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
        """`InvalidLocation` for stores that cannot travel: a store given as an instance, a store in the
        memory of this process, a URL with a secret in it."""
        told = None if settings is None else json.dumps(settings.model_dump(mode="json", exclude_unset=True))
        if location is None and blob is None and consensus is None:
            return cls(settings=told)
        if isinstance(location, str) and location.startswith(ENV) and blob is consensus is None:
            return cls(location=location, settings=told)
        found = parse_location(location, blob, consensus)  # takes env:NAME for a URL like any other
        return cls(_public(found.blob), _public(found.consensus), None, told)

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
        raise InvalidLocation(f"Spark's workers cannot use {type(store).__name__}: give URLs")
    if store.startswith(ENV):
        return store
    if scheme_of(store) == "mem":
        raise InvalidLocation("mem: lives in one process, and Spark's workers are other processes")
    if has_secrets(store):
        raise InvalidLocation(
            f"{scheme_of(store)}: this URL holds a secret, which Spark would show in plans and logs: "
            "put the URL into a variable of the executors' environment, and name that variable: env:NAME"
        )
    return store


def _looked_up(store: str | None) -> str | None:
    if store is None or not store.startswith(ENV):
        return store
    name = store.removeprefix(ENV)
    found = os.environ.get(name)
    if not found:
        raise InvalidLocation(f"the environment of this process has no {name}, which {store} names: set it")
    return found
