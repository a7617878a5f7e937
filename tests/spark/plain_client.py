"""Calls of a plain asyncio client on the shards beside Spark, for tests that are not asyncio."""

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def steady_writer(place: str, name: str, schema: ap.Schema[str, Any, int]) -> Iterator[None]:
    """Beside the body, another client appends 16 rows of keys `k0` to `k37` to a shard, in 8 commits; the end
    waits for it."""

    async def append(client: ap.Client) -> None:
        async with client.writer(name, schema) as writer:
            for n in range(8):
                await writer.write([(f"k{n}", 1000 + n), (f"k{n + 30}", 2000 + n)])
                await asyncio.sleep(0.1)

    other = threading.Thread(target=lambda: at(place, append))
    other.start()
    try:
        yield
    finally:
        other.join()


def upper(place: str, name: str) -> ap.Antichain:
    return at(place, lambda client: client.upper(name))


def counted(df: Any) -> Counter[Row]:
    return Counter(map(tuple, df.collect()))


def rows_of(df: Any) -> list[Row]:
    """Sorted."""
    return sorted(map(tuple, df.collect()))
