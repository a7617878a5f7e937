"""Helpers that the tests of the batch builder share."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob
from aiopersist.testing.faults import Faults
from tests.support.schemas import KIND, SCHEMA
from tests.support.shards import parts_in

RECORD, PARTS = ap.Added.RECORD, ap.Added.RECORD_AND_PARTS


EACH_ITS_OWN = {"blob_target_size": 0, "inline_writes_single_max_bytes": 0}


NEVER_INLINE = {"inline_writes_single_max_bytes": 0}


async def nothing_left(blob: MemoryBlob) -> None:
    """Deletions go on in the background: they end with no part in the store."""
    async with asyncio.timeout(50):
        while await parts_in(blob):
            await asyncio.sleep(0.002)


class Gate(Faults):
    """Every write of a blob waits until it is let through, one by one or all."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[asyncio.Event] = []
        self.open = False

    async def call(self, op: str, act: Any) -> Any:
        if op == "set" and not self.open:
            event = asyncio.Event()
            self.waiting.append(event)
            await event.wait()
        return await super().call(op, act)

    def let(self, number: int) -> None:
        """The write that arrived as the `number`th goes on."""
        self.waiting[number].set()

    def let_all(self) -> None:
        self.open = True
        for event in self.waiting:
            event.set()

    def heal(self) -> None:
        self.let_all()
        super().heal()


FORMS: dict[str, Callable[[list[Any]], Any]] = {}


def form(make: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    FORMS[make.__name__.removeprefix("as_")] = make
    return make


def as_table(updates: list[Any], schema: Any = SCHEMA) -> pa.Table:
    columns = list(zip(*updates, strict=True)) if updates else [[], [], [], []]
    return pa.table(
        [pa.array(c, t) for c, t in zip(columns, [pa.string(), *[pa.int64()] * 3], strict=True)],
        names=["key", "val", "time", "diff"],
    )


@form
def as_list(updates: list[Any]) -> Any:
    return updates


@form
def as_iterator(updates: list[Any]) -> Any:
    return iter(updates)


@form
def as_arrow(updates: list[Any]) -> Any:
    return as_table(updates)


@form
def as_reader(updates: list[Any]) -> Any:
    return as_table(updates).to_reader(max_chunksize=2)


@form
def as_tables(updates: list[Any]) -> Any:
    return iter([as_table(updates[:1]), as_table(updates[1:])])


@form
async def as_async_rows(updates: list[Any]) -> AsyncIterator[Any]:
    for update in updates:
        await asyncio.sleep(0)
        yield update


@form
async def as_async_mixed(updates: list[Any]) -> AsyncIterator[Any]:
    for n, update in enumerate(updates):
        yield as_table([update]) if n % 3 == 1 else update


async def assert_closed(builder: ap.BatchBuilder, kind: ap.UsageKind = KIND.CLOSED) -> None:
    for call in (
        lambda: builder.add("a", 1, 5, 1),
        lambda: builder.extend([]),
        lambda: builder.finish(9),
    ):
        with pytest.raises(ap.InvalidUsage) as caught:
            await call()
        assert caught.value.kind is kind
