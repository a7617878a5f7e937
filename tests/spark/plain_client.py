"""Calls of a plain asyncio client on the shards beside Spark, for tests that are not asyncio."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiopersist as ap

T = TypeVar("T")
Row = tuple[Any, ...]


def at(place: str, work: Callable[..., Awaitable[T]], *args: Any, **settings: Any) -> T:
    """`work(client, *args)`, in a loop and with a client of its own."""

    async def run() -> T:
        async with ap.open(place, maintenance=False, settings=ap.Settings(**settings)) as client:
            return await work(client, *args)

    return asyncio.run(run())


def upper(place: str, name: str) -> ap.Antichain:
    return at(place, lambda client: client.upper(name))


def counted(df: Any) -> Counter[Row]:
    return Counter(map(tuple, df.collect()))


def rows_of(df: Any) -> list[Row]:
    """Sorted."""
    return sorted(map(tuple, df.collect()))
