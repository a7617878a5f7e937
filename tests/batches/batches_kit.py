"""Helpers that the tests of staged batches share."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob

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
