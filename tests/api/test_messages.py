"""Goal: whoever reads an error knows which shard it is about, by the name that they gave it, what is wrong,
and what to do."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap

SCHEMA = ap.Schema(key=str, val=int)


@pytest.fixture
async def mem() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://") as client:
        yield client


async def _used_after_close(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer:
        pass
    await writer.write([("a", 1)])


async def _late_snapshot(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer, client.reader(shard) as reader:
        for n in range(3):
            await writer.write([("a", n)])
        await client.retain(shard, 1)
        await client.force_compaction(shard)
        await reader.snapshot(0)


async def _wrong_upper(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer:
        await writer.compare_and_append([("a", 1, 50, 1)], 50, 60)


async def _many(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer:
        await client.compare_and_append_many([ap.Append(writer, [], 70, 80)])


async def _bad_row(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer:
        await writer.write([("a", 1), ("b", "2")])


async def _dropped(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer:
        await client.drop(shard)
        await writer.write([("a", 1)])


async def _finalized_too_early(client: ap.Client, shard: str) -> None:
    await client.writer(shard, SCHEMA)
    await client.finalize(shard)


async def _another_schema(client: ap.Client, shard: str) -> None:
    await client.writer(shard, SCHEMA)
    await client.writer(shard, ap.Schema(key=str, val=str))


async def _read_elsewhere(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA):
        await client.shared_read(shard, wait=False)


CASES: dict[str, tuple[Callable[[ap.Client, str], Awaitable[Any]], type[ap.Error]]] = {
    "after close": (_used_after_close, ap.InvalidUsage),
    "since": (_late_snapshot, ap.SinceViolation),
    "upper": (_wrong_upper, ap.UpperMismatch),
    "several shards": (_many, ap.UpperMismatch),
    "bad data": (_bad_row, ap.InvalidUpdate),
    "dropped": (_dropped, ap.ShardFinalized),
    "finalize": (_finalized_too_early, ap.InvalidUsage),
    "schema": (_another_schema, ap.CodecMismatch),
    "nothing there": (_read_elsewhere, ap.NotReadable),
}


@pytest.mark.parametrize("by_id", [False, True], ids=["by name", "by id"])
@pytest.mark.parametrize(("fail", "kind"), CASES.values(), ids=CASES)
async def test_an_error_names_the_shard_as_it_was_opened(
    mem: ap.Client, fail: Callable[[ap.Client, str], Awaitable[Any]], kind: type[ap.Error], by_id: bool
) -> None:
    shard = str(ap.ShardId.new()) if by_id else "orders"
    label = f"shard {shard}" if by_id else "shard 'orders'"
    with pytest.raises(kind) as caught:
        await fail(mem, shard)
    assert str(caught.value).count(label) == 1
    if not by_id:
        assert caught.value.shard_id is not None
        assert caught.value.shard_id not in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


async def test_a_handle_that_waits_names_its_shard_too(mem: ap.Client) -> None:
    """Goal: what is dropped or closed meanwhile."""
    reader = await mem.reader("orders", SCHEMA, create=True)
    listen = await reader.listen()
    step = asyncio.create_task(anext(aiter(listen.steps())))
    snapshot = asyncio.ensure_future(reader.snapshot(5).__aenter__())
    await asyncio.sleep(0)
    await mem.drop("orders")
    for waiting in (step, snapshot):
        with pytest.raises(ap.ShardFinalized, match="shard 'orders'"):
            await waiting


async def test_an_indexed_is_called_by_its_name(mem: ap.Client) -> None:
    ix = await mem.indexed("catalog")
    await mem.indexed("catalog")
    with pytest.raises(ap.Error, match=r"^Indexed 'catalog': "):
        await ix.register("numbers", str, int)
