"""Helpers that the tests of Spark streams share."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.spark.plain_client import Row, at
from tests.spark.schemas import PLAIN


def append(place: str, name: str, times: list[list[Row]], start: int, *, finish: bool = False) -> None:
    """One append per time, of `(key, val, diff)`."""

    async def work(client: ap.Client) -> None:
        async with client.writer(name, PLAIN) as writer:
            for t, rows in enumerate(times, start):
                last = finish and t == start + len(times) - 1
                updates = [(key, val, t, diff) for key, val, diff in rows]
                await writer.compare_and_append(updates, t, ap.Antichain() if last else t + 1)

    at(place, work)


def updates(place: str, name: str) -> Counter[Row]:
    """All that is in the shard, by time."""

    async def work(client: ap.Client) -> Counter[Row]:
        found: Counter[Row] = Counter()
        async with client.workers.shared_read(name, start=0) as read:
            for piece in await read.pieces(1):
                async for batch in client.workers.read_piece(piece):
                    for row in batch.to_pylist():
                        found[row["key"], row["val"], row["time"]] += row["diff"]
        return Counter({row: n for row, n in found.items() if n})

    return at(place, work)


def history(n: int, width: int = 3) -> list[list[Row]]:
    return [[(f"k{t}-{i}", t, 1) for i in range(width)] for t in range(n)]


def rows(times: list[list[Row]], start: int = 0) -> Counter[Row]:
    """As a stream with `_time` and `_diff` shows them."""
    return Counter((key, val, t, diff) for t, part in enumerate(times, start) for key, val, diff in part)


class Batches:
    """What `foreachBatch` was given, batch by batch."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Counter[Row]]] = []

    def __call__(self, df: Any, number: int) -> None:
        self.found.append((number, Counter(map(tuple, df.collect()))))

    @property
    def all(self) -> Counter[Row]:
        return sum((rows for _, rows in self.found), Counter())

    @property
    def times(self) -> list[set[int]]:
        return [{row[2] for row in rows} for _, rows in self.found if rows]


def stream(spark: Any, place: str, name: str, **options: Any) -> Any:
    return spark.readStream.format("aiopersist").option("location", place).options(**options).load(name)


def drained(df: Any, checkpoint: Path) -> Batches:
    """The batches of a run that takes what is available now."""
    found = Batches()
    writer = df.writeStream.foreachBatch(found).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(100)
    finally:
        query.stop()
    return found


@pytest.fixture(autouse=True)
def _registered(spark: Any) -> Iterator[None]:
    from aiopersist.spark import register

    register(spark)
    yield
    for query in spark.streams.active:
        query.stop()


def move_since(place: str, name: str, since: int) -> None:
    async def work(client: ap.Client) -> None:
        async with client.critical_since(name, "c") as held:
            await held.compare_and_downgrade_since(0, 0, since)
        await client.admin.force_compaction(name)

    at(place, work)
