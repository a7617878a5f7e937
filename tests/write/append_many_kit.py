"""Helpers that the tests of appends to several shards share."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults
from tests.support import rigs
from tests.support.rigs import Rig, sums
from tests.support.schemas import Writer

MANY = "compare_and_set_many"


NAMES = ["a", "b", "c"]


def rig(**options: Any) -> AbstractAsyncContextManager[Rig]:
    """With sound blobs: an upload that is late would leave a blob after its deletion."""
    return rigs.rig(blob_faults=Faults(), **options)


async def writers(r: Rig, names: Sequence[str] = NAMES[:2], client: ap.Client | None = None) -> list[Writer]:
    return [await r.writer(client, name) for name in names]


async def contents(r: Rig, names: Sequence[str] = NAMES[:2]) -> list[dict[str, int]]:
    return [await sums(r.honest, name) for name in names]


def rows(key: str, at: int = 0) -> list[tuple[str, int, int, int]]:
    return [(key, 1, at, 1)]


def one_each(writers: Sequence[Writer], key: str = "k", at: int = 0) -> list[ap.Append]:
    """The same row for each."""
    return [ap.Append(w, rows(key, at), at, at + 1) for w in writers]
