"""Helpers that the tests of the Spark engine share."""

from typing import Any

import aiopersist as ap
from tests.spark.plain_client import at


def appended(place: str, name: str, schema: Any, *appends: Any, since: Any = None) -> None:
    """Appends of `(updates, lower, upper)`; then since is moved, for good."""

    async def work(client: ap.Client) -> None:
        async with client.writer(name, schema) as writer:
            for updates, lower, upper in appends:
                await writer.compare_and_append(updates, lower, upper)
        if since is not None:
            async with client.critical_since(name, "c") as held:
                await held.compare_and_downgrade_since(0, 0, since)

    at(place, work)


USAGE = ap.UsageKind
