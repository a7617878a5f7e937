"""Goal: what is one sorted run of one time is read as it lies; what only looks like it is summed."""

from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

import aiopersist as ap
from aiopersist.parts.runs import are_contents


class Narrow(NamedTuple):
    a: int


class Wide(NamedTuple):
    a: int
    b: int | None


SCHEMA: ap.Schema[str, int, int] = ap.Schema(key=str, val=int)
SETTINGS = ap.Settings(inline_writes_single_max_bytes=0)


@pytest.fixture
async def client() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://", settings=SETTINGS, maintenance=False) as opened:
        yield opened


async def contents(client: ap.Client, schema: ap.Schema = SCHEMA) -> tuple[list[tuple], bool]:  # type: ignore[type-arg]
    """The rows of a snapshot, and whether its parts are contents as they lie."""
    async with client.reader("t", schema) as r, r.snapshot() as s:
        return await s.rows(), are_contents(s._parts, s._fetch.schema_id)


async def test_one_append_of_one_time(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("b", 1, 0, 1), ("a", 2, 0, 3), ("b", 1, 0, 1)], 0, 1)
    assert await contents(client) == ([("a", 2, 3), ("b", 1, 2)], True)


async def test_one_append_of_two_times(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 2, 0, 3), ("a", 2, 1, -1), ("b", 1, 0, 1), ("b", 1, 1, -1)], 0, 2)
    assert await contents(client) == ([("a", 2, 2)], False)


async def test_a_compaction_that_advanced_all_times(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        for t in range(3):
            await w.compare_and_append([("a", 2, t, 1), (f"b{t}", 1, t, 1)], t, t + 1)
        await client.admin.retain("t", 1)
        await client.admin.force_compaction("t")
    assert await contents(client) == ([("a", 2, 3), ("b0", 1, 1), ("b1", 1, 1), ("b2", 1, 1)], True)


async def test_a_compaction_that_kept_times(client: ap.Client) -> None:
    async with client.writer("t", SCHEMA) as w:
        for t in range(3):
            await w.compare_and_append([("a", 2, t, 1)], t, t + 1)
        async with client.reader("t", SCHEMA):  # holds since
            await client.admin.force_compaction("t")
            assert await contents(client) == ([("a", 2, 3)], False)


async def test_times_that_were_rewritten_to_one(client: ap.Client) -> None:
    """A batch of two times that becomes one of one: a key and val come twice."""
    async with client.writer("t", SCHEMA) as w:
        batch = await w.batch([("a", 2, 0, 1), ("a", 2, 1, 1), ("b", 1, 1, 1)], 0, 2)
        batch.rewrite_ts(5, 6)
        await w.compare_and_append([], 0, 5)
        await w.compare_and_append_batch([batch], 5, 6)
    assert await contents(client) == ([("a", 2, 2), ("b", 1, 1)], False)


async def test_a_reader_of_fewer_fields(client: ap.Client) -> None:
    """Rows that differ in a field that the reader does not have are one row to it."""
    async with client.writer("t", ap.Schema(key=str, val=Narrow)):
        pass
    await client.compare_and_evolve_schema("t", 0, ap.Schema(key=str, val=Wide))
    async with client.writer("t", ap.Schema(key=str, val=Wide)) as w:
        await w.compare_and_append([("a", Wide(1, 1), 0, 1), ("a", Wide(1, 2), 0, 1)], 0, 1)
    assert await contents(client, ap.Schema(key=str, val=Narrow)) == ([("a", Narrow(1), 2)], False)


async def test_several_runs_of_one_append() -> None:
    """Rows that come as an iterator, and are cut into parts as they come: each part is a run."""
    settings = ap.Settings(inline_writes_single_max_bytes=0, blob_target_size=1000)
    keys = [f"{n * 7919 % 1000:04}" for n in range(1000)]
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        async with client.writer("t", SCHEMA) as w:
            await w.compare_and_append(((key, 1, 0, 1) for key in keys), 0, 1)
        assert await contents(client) == ([(key, 1, 1) for key in sorted(keys)], False)


async def test_a_sum_that_64_bits_do_not_hold(client: ap.Client) -> None:
    """It lies in several rows: that is told, not read as it lies."""
    most = 2**63 - 1
    async with client.writer("t", SCHEMA) as w:
        await w.compare_and_append([("a", 1, 0, most), ("a", 1, 0, most), ("b", 1, 0, 1)], 0, 1)
    with pytest.raises(ap.DiffOverflow):
        await contents(client)
