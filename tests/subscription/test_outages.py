"""Goal: a store that does not answer ends a wait with `StorageUnavailable`, and the next wait goes on:
whoever reads on gets everything once."""

from collections.abc import Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.subscription.test_steps import SMALL
from tests.support.schemas import SCHEMA

KEYS = 60
MORE = 20


class Broken:
    """A client whose stores often refuse, and how often a call was."""

    def __init__(self) -> None:
        self.faults = Faults(seed=7)
        self.count = 0
        blob, consensus = ap.open_blob("mem://"), ap.open_consensus("mem://")
        self.honest = {"blob": blob, "consensus": consensus}
        self.stores = {
            "blob": FaultyBlob(blob, self.faults),
            "consensus": FaultyConsensus(consensus, self.faults),
        }

    async def until(self, call: Callable[[], Any]) -> Any:
        """What `call` answers in the end."""
        while True:
            try:
                return await call()
            except ap.StorageUnavailable:
                self.count += 1


async def write(broken: Broken, first: int, count: int) -> None:
    settings = ap.Settings(**SMALL)
    async with ap.open(**broken.honest, settings=settings, maintenance=False) as client:
        async with client.writer("s", SCHEMA) as writer:
            for number in range(first, first + count, 10):
                await writer.write([(f"k{n:03}", n) for n in range(number, number + 10)])


def rows_of(step: Any) -> list[Any]:
    updates = step.updates if hasattr(step, "updates") else step
    return [update.val for update in updates for _ in range(update.diff)]


@pytest.mark.parametrize("kind", ["items", "steps", "subscription", "feed"])
async def test_whoever_reads_on_gets_everything_once(kind: str) -> None:
    broken = Broken()
    if kind == "feed":
        async with ap.open(**broken.honest, settings=ap.Settings(**SMALL), maintenance=False) as client:
            await client.table("s", str, int).put_many({f"k{n:03}": n for n in range(KEYS)})
    else:
        await write(broken, 0, KEYS)
    settings = ap.Settings(**SMALL, retry_timeout_s=0.0, watch_timeout_s=0.02, blob_cache_bytes=0)
    async with ap.open(**broken.stores, settings=settings, maintenance=False) as client:
        expected = list(range(KEYS + MORE))
        reader = await client.reader("s", SCHEMA) if kind in ("items", "steps") else None
        if reader is not None:
            stream: Any = await reader.listen()
            expected = list(range(KEYS, KEYS + MORE))
        elif kind == "subscription":
            stream = await client.subscription("s", SCHEMA, name="sub")
        else:
            stream = client.table("s", str, int).changes()
            await stream.__aenter__()
        source = stream.steps() if kind == "steps" else stream
        broken.faults.rates = {Outcome.REFUSED: 0.3}
        if kind == "feed":
            async with ap.open(**broken.honest, settings=ap.Settings(**SMALL), maintenance=False) as other:
                for n in range(KEYS, KEYS + MORE):
                    await other.table("s", str, int).put(f"k{n:03}", n)
        else:
            await write(broken, KEYS, MORE)
        found: list[Any] = []
        while len(found) < len(expected):
            item = await broken.until(lambda: anext(source))
            if kind == "feed":
                found += [change.new for change in item.changes]
            elif not isinstance(item, ap.Progress):
                found += rows_of(item)
        broken.faults.heal()
        await stream.aclose()
    assert sorted(found) == expected
    assert broken.count > 0
