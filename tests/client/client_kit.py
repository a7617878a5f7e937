"""Helpers that the tests of the client share."""

import aiopersist as ap
from tests.support.schemas import SCHEMA


async def is_used(client: ap.Client) -> None:
    """It can be written and read."""
    async with client.writer("used", SCHEMA) as w:
        await w.write([("a", 1)])
    async with client.reader("used", SCHEMA) as r, r.snapshot() as s:
        assert await s.rows() == [("a", 1, 1)]
