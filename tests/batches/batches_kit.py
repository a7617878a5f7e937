"""Helpers that the tests of staged batches share."""

import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus
from tests.support.schemas import SCHEMA
from tests.support.shards import honest_and_faulty

BLOB, INLINE = {"inline_writes_single_max_bytes": 0}, {"inline_writes_single_max_bytes": 16384}


PARTS = {"inline_writes_single_max_bytes": 0, "blob_target_size": 0}


STAGED = pytest.mark.parametrize("limits", [INLINE, BLOB, PARTS], ids=["inline", "blob", "parts"])


BOTH = pytest.mark.parametrize("limits", [INLINE, BLOB], ids=["inline", "blob"])


EVERYWHERE = pytest.mark.parametrize(
    ("location", "limits"),
    [
        pytest.param("mem", INLINE, id="mem-inline"),
        pytest.param("mem", BLOB, id="mem-blob"),
        pytest.param("mem", PARTS, id="mem-parts"),
        pytest.param("files+sqlite", INLINE, id="files+sqlite-inline"),
        pytest.param("files+sqlite", PARTS, id="files+sqlite-parts"),
        pytest.param("s3+postgres", PARTS, id="s3+postgres-parts"),
    ],
    indirect=["location"],
)


async def history(client: ap.Client, since: Any = 0, schema: Any = SCHEMA) -> dict[Any, int]:
    """All updates of the shard, summed, as a listen gives them; those at `since` are there too."""
    sums: dict[Any, int] = {}
    async with client.reader("t", schema) as r:
        upper = await r.fetch_recent_upper()
        async with r.subscribe(since) as updates:
            async for step in updates.steps():
                for key, val, time, diff in step.updates:
                    sums[key, val, time] = sums.get((key, val, time), 0) + diff
                if upper <= step.upper:
                    break
    return {update: diff for update, diff in sums.items() if diff}


def summed_at(updates: Iterable[Sequence[Any]], as_of: int) -> list[Any]:
    """The oracle of a snapshot."""
    sums: dict[Any, int] = {}
    for key, val, time, diff in updates:
        if time <= as_of:
            sums[key, val] = sums.get((key, val), 0) + diff
    return [(*kv, diff) for kv, diff in sorted(sums.items()) if diff]


async def refused(call: Any, kind: ap.UsageKind, **values: Any) -> ap.InvalidUsage:
    """`call` is an awaitable, or a function that does not wait."""
    with pytest.raises(ap.InvalidUsage) as caught:
        if callable(call):
            call()
        else:
            await call
    assert caught.value.kind is kind
    assert {name: getattr(caught.value, name) for name in values} == values
    return caught.value


class Recorded(MemoryBlob):
    """Remembers what it was asked to delete."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deleted: list[str] = []

    async def delete(self, keys: Sequence[str]) -> None:
        self.deleted += keys
        await super().delete(keys)


@dataclass
class Rig:
    """One place in memory: `client` reaches it through `faults`, `honest` directly."""

    client: ap.Client
    honest: ap.Client
    faults: Faults
    blob: Recorded

    async def parquet(self) -> list[str]:
        return sorted([key async for key, _ in self.blob.list("") if key.endswith(".parquet")])


@asynccontextmanager
async def rig(**limits: Any) -> AsyncIterator[Rig]:
    place, faults = uuid.uuid4().hex, Faults()
    blob, consensus = Recorded(place), MemoryConsensus(place)
    url = f"mem://{place}"
    stores = FaultyBlob(blob, faults), FaultyConsensus(consensus, faults)
    async with honest_and_faulty(url, *stores, **limits) as (honest, client):
        try:
            yield Rig(client, honest, faults, blob)
        finally:
            faults.heal()
    await blob.aclose()
    await consensus.aclose()
