"""`ap.open`: from a location to a client."""

import os
from functools import partial

from aiopersist.base.ending import both
from aiopersist.base.resource import Opening
from aiopersist.base.runtime import SYSTEM, Runtime
from aiopersist.base.settings import Settings, settings_or_environment
from aiopersist.client.client import Client
from aiopersist.data.lazy import arrow_is_imported, import_arrow
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.urls import Location, open_stores, parse_location


def open(  # noqa: A001  # `ap.open`
    location: str | os.PathLike[str] | Location | None = None,
    *,
    blob: str | Blob | None = None,
    consensus: str | Consensus | None = None,
    settings: Settings | None = None,
    maintenance: bool = True,
    readonly: bool = False,
    runtime: Runtime = SYSTEM,
) -> Opening[Client]:
    """A client of a location: a directory, `mem://`, or two stores as URLs or instances. Without arguments
    the environment names the location: `AIOPERSIST_LOCATION`, or `AIOPERSIST_BLOB` and
    `AIOPERSIST_CONSENSUS`. `~` and `$HOME` in a path are not expanded.

    `InvalidLocation` at once for a location that cannot be used, `StorageUnavailable` after
    `settings.open_timeout_s` for a store that cannot be reached. Costs two requests.
    `maintenance=False`: no maintenance, except for the heartbeats of its own handles.

    `readonly=True` needs no right to write to a directory, role or bucket, and creates no location
    (`InvalidLocation` if there is none). It takes no leases and does no maintenance. Snapshots and listens
    read the history that other clients retain: `LeaseExpired` or `SinceViolation` if it is gone. Every call
    that writes, and `transact`, raises `Unsupported`; `maintain` reports that as failures.
    """
    parsed = parse_location(location, blob, consensus)
    return _opening(parsed, settings, maintenance, readonly, runtime)


def open_to_list(
    location: str | None, blob: str | None, consensus: str | None, settings: Settings | None = None
) -> Opening[Client]:
    """A client that writes nothing, for `overview` and `list_shards`, without the import of pyarrow, which
    takes longer than they do."""
    parsed = parse_location(location, blob, consensus)
    return _opening(parsed, settings, False, True, SYSTEM, needs_arrow=False)


def _opening(
    location: Location,
    settings: Settings | None,
    maintenance: bool,
    readonly: bool,
    runtime: Runtime,
    needs_arrow: bool = True,
) -> Opening[Client]:
    chosen = settings_or_environment(settings)
    stores = open_stores(location, runtime=runtime, readonly=readonly)

    async def connect() -> Client:
        client = Client(stores, chosen, runtime, maintenance)
        try:
            if arrow_is_imported() or not needs_arrow:
                await client.ping()
            else:
                await both(client.ping, partial(client._stack.compute, import_arrow))
        except BaseException:
            await client.aclose()
            raise
        client._tasks = client._stack.supervisor
        return client

    return Opening(connect, "aiopersist.open(...)")
