"""Edges of the interface: values at the ends of their ranges, arguments of the wrong kind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from tests.support.schemas import SCHEMA

LAST = 2**63 - 1


@pytest.fixture
async def client() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://") as opened:
        yield opened


async def test_a_store_of_ones_own_that_cannot_be_reached_is_unavailable() -> None:
    """Goal: opening and reading have no outcome in doubt, for any error of the store."""

    class Unreachable(MemoryBlob):
        async def get(self, key: str) -> bytes | None:
            raise ConnectionError("no route")

    hasty, impatient = ap.Settings(open_timeout_s=0.1), ap.Settings(retry_timeout_s=0.1)
    with pytest.raises(ap.StorageUnavailable):
        await ap.open(blob=Unreachable(""), consensus=MemoryConsensus(""), settings=hasty)

    class Failing(MemoryConsensus):
        failing = False

        async def head(self, key: str) -> ap.Versioned | None:
            if self.failing:
                raise OSError("gone")
            return await super().head(key)

    consensus = Failing("")
    async with ap.open(blob=MemoryBlob(""), consensus=consensus, settings=impatient) as client:
        writer = await client.writer("shard", SCHEMA)
        consensus.failing = True
        with pytest.raises(ap.StorageUnavailable) as told:
            await writer.fetch_recent_upper()
        assert told.value.shard_id == writer.shard_id
        consensus.failing = False


@pytest.mark.parametrize("lease_s", [0, -5, "x", float("inf"), float("nan")])
async def test_a_lease_is_a_positive_number_of_seconds(client: ap.Client, lease_s: Any) -> None:
    await client.writer("shard", SCHEMA)
    with pytest.raises(ValueError, match="lease_s"):
        await client.reader("shard", hold=0, lease_s=lease_s)


@pytest.mark.parametrize("diff", [2**63, "x", True, 1.5], ids=repr)
@pytest.mark.parametrize("form", ["rows", "arrow"])
async def test_a_diff_that_is_none_is_refused_in_every_form(client: ap.Client, diff: Any, form: str) -> None:
    writer = await client.writer("shard", SCHEMA)
    rows: Any = [("a", 1)] if form == "rows" else pa.table({"key": ["a"], "val": [1]})
    with pytest.raises(ap.InvalidUpdate) as told:
        await writer.write(rows, diff=diff)
    assert told.value.shard_id == writer.shard_id
    assert await writer.fetch_recent_upper() == ap.Antichain(0)


async def test_the_last_time_can_be_written_and_is_the_last(client: ap.Client) -> None:
    writer = await client.writer("shard", SCHEMA)
    await writer.compare_and_append([], 0, LAST)
    assert await writer.write([("a", 1)]) == LAST
    assert writer.upper == ap.Antichain()
    with pytest.raises(ap.UpperMismatch):
        await writer.write([("a", 1)])
    reader = await client.reader("shard", SCHEMA)
    async with reader.snapshot() as snapshot:
        assert (snapshot.as_of, await snapshot.rows()) == (LAST, [("a", 1, 1)])


@pytest.mark.parametrize("schema", [None, str, {"key": str}])
async def test_what_is_no_schema_creates_nothing(client: ap.Client, schema: Any) -> None:
    with pytest.raises(TypeError, match="Schema"):
        await client.writer("shard", schema)
    assert await client.list_shards() == {}


async def test_errors_name_their_shard(client: ap.Client) -> None:
    writer, reader = await client.writer("shard", SCHEMA), await client.reader("shard")
    other = ap.Schema(key=int, val=int)
    calls = [
        (ap.InvalidUsage, lambda: writer.compare_and_append([("a", 1, 5, 1)], 0, 1)),
        (ap.InvalidUpdate, lambda: writer.compare_and_append([("a", "b", 0, 1)], 0, 1)),
        (ap.InvalidUsage, lambda: writer.compare_and_append([], 0, 1, txn=("", 1))),
        (ap.InvalidUsage, lambda: writer.compare_and_append([], (0, 0), (1, 1))),
        (ap.InvalidUsage, lambda: reader.listen(cursor="garbage")),
        (ap.InvalidUsage, lambda: reader.snapshot((1, 2))),
        (ap.IncompatibleSchema, lambda: client.compare_and_evolve_schema("shard", 0, other)),
        (ap.UpperMismatch, lambda: writer.compare_and_append([], 3, 4)),
    ]
    for kind, call in calls:
        with pytest.raises(kind) as told:
            await call()
        assert told.value.shard_id == writer.shard_id, told.value
    await writer.aclose()
    with pytest.raises(ap.InvalidUsage) as closed:
        await writer.write([("a", 1)])
    assert closed.value.shard_id == writer.shard_id


async def test_write_takes_iterators_of_every_kind(client: ap.Client) -> None:
    writer = await client.writer("shard", SCHEMA)
    table = pa.table({"key": ["c"], "val": [3]})

    async def later() -> AsyncIterator[Any]:
        yield ("d", 4)
        yield table

    await writer.write(iter([("a", 1), ("b", 2), table]))
    await writer.write(later())
    reader = await client.reader("shard", SCHEMA)
    async with reader.snapshot() as snapshot:
        assert await snapshot.rows() == [("a", 1, 1), ("b", 2, 1), ("c", 3, 2), ("d", 4, 1)]

    async def bad() -> AsyncIterator[Any]:
        yield table
        yield ("e", "five")

    with pytest.raises(ap.InvalidUpdate) as told:
        await writer.write(bad())
    assert told.value.row == 1


async def test_columns_are_checked_without_rows_too(client: ap.Client) -> None:
    writer = await client.writer("shard", SCHEMA)
    empty = pa.table({"nonsense": pa.array([], pa.int64())})
    for call in (lambda: writer.compare_and_append(empty, 0, 1), lambda: writer.write(empty)):
        with pytest.raises(ap.InvalidUpdate) as told:
            await call()
        assert told.value.row is None
    assert await writer.fetch_recent_upper() == ap.Antichain(0)


async def test_nothing_waits_for_what_cannot_come(client: ap.Client) -> None:
    writer = await client.writer("shard", SCHEMA)
    async with asyncio.timeout(50):
        with pytest.raises(ap.InvalidUsage) as told:
            await writer.wait_for_upper_past(ap.Antichain())
    assert told.value.kind == ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize("text", [None, 5, "", "s", "s" + "0" * 36])
def test_what_is_no_shard_id_is_an_invalid_name(text: Any) -> None:
    with pytest.raises(ap.InvalidUsage) as told:
        ap.ShardId.parse(text)
    assert told.value.kind == ap.UsageKind.INVALID_NAME


async def test_what_was_awaited_can_be_entered(client: ap.Client) -> None:
    writer = await client.writer("shard", SCHEMA)
    async with writer:
        await writer.write([("a", 1)])
    with pytest.raises(ap.InvalidUsage):
        await writer.write([("a", 1)])
    reader = await client.reader("shard")
    snapshot = await reader.snapshot()
    async with reader, snapshot:
        assert await snapshot.rows() == [("a", 1, 1)]
    with pytest.raises(ap.InvalidUsage):
        await snapshot.rows()


async def test_settings_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"\{'rollup_every': 5\} is not an aiopersist.Settings"):
        ap.open("mem://", settings={"rollup_every": 5})  # type: ignore[arg-type]


async def test_a_finished_shard_says_that_it_is(client: ap.Client) -> None:
    """Goal: who hears of another upper tries again at that; there is none here."""
    async with client.writer("t", SCHEMA) as writer:
        await writer.compare_and_append([], 0, ap.Antichain())
        for call in (writer.write([("a", 1)]), writer.compare_and_append([("a", 1, 3, 1)], 3, 4)):
            with pytest.raises(ap.UpperMismatch, match="the shard is finished") as caught:
                await call
            assert caught.value.current == ap.Antichain()
