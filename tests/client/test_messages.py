"""Goal: an error tells its reader which shard it is about, by the name that the caller gave, what is
wrong, and what to do."""

import asyncio
import pickle
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import aiopersist as ap
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA


async def _used_after_close(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer:
        pass
    await writer.write([("a", 1)])


async def _late_snapshot(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA) as writer, client.reader(shard) as reader:
        for n in range(3):
            await writer.write([("a", n)])
        await client.admin.retain(shard, 1)
        await client.admin.force_compaction(shard)
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
        await client.admin.drop(shard)
        await writer.write([("a", 1)])


async def _finalized_too_early(client: ap.Client, shard: str) -> None:
    await client.writer(shard, SCHEMA)
    await client.admin.finalize(shard)


async def _another_schema(client: ap.Client, shard: str) -> None:
    await client.writer(shard, SCHEMA)
    await client.writer(shard, ap.Schema(key=str, val=str))


async def _read_elsewhere(client: ap.Client, shard: str) -> None:
    async with client.writer(shard, SCHEMA):
        await client.workers.shared_read(shard, wait=False)


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


# --- what differs, and what to do ---------------------------------------------------------------------


class Inner(BaseModel):
    n: int


class Stored(BaseModel):
    x: int
    y: str
    inner: list[Inner] = []


class Added(Stored):
    z: int | None = None


class Asked(BaseModel):
    x: str
    inner: list[Added] = []
    new: int


ADD = "add these fields with client.compare_and_evolve_schema"
NOTHING_ELSE = "client.compare_and_evolve_schema adds optional fields, and nothing else"
MISMATCHES: dict[str, tuple[Any, list[str]]] = {
    "a key": (ap.Schema(int, Stored), ["key is stored as string not null, asked for as int64", NOTHING_ELSE]),
    "no model": (ap.Schema(str, int), ["val is stored as struct<", NOTHING_ELSE]),
    "times": (ap.Schema(str, Stored, time=2), ["times are stored with length 1, asked for with 2"]),
    "an optional field": (ap.Schema(str, Added), ["val.z is asked for as int64, and not stored", ADD]),
    "fields": (
        ap.Schema(str, Asked),
        [
            "val.x is stored as int64 not null, asked for as string not null",
            "val.y is stored as string not null, and not asked for",
            "val.inner.element.n is stored as int64 not null, and not asked for",
            "val.inner.element.z is asked for as int64, and not stored",
            "val.new is asked for as int64 not null, and not stored",
            NOTHING_ELSE,
        ],
    ),
}


@pytest.mark.parametrize(("schema", "told"), MISMATCHES.values(), ids=MISMATCHES)
async def test_a_codec_mismatch_says_what_differs(mem: ap.Client, schema: Any, told: list[str]) -> None:
    stored = ap.Schema(str, Stored)
    await mem.writer("orders", stored)
    with pytest.raises(ap.CodecMismatch) as caught:
        await mem.writer("orders", schema)
    missing = [text for text in ("shard 'orders'", *told) if text not in str(caught.value)]
    assert not missing, str(caught.value)
    assert (caught.value.requested, caught.value.actual) == (schema, stored)


async def test_a_stream_of_another_schema(mem: ap.Client) -> None:
    async with mem.indexed("catalog") as ix:
        await ix.register("numbers", str, int)
        with pytest.raises(ap.CodecMismatch) as caught:
            await ix.load("numbers", str, str)
    for text in ("Indexed 'catalog'", "stream 'numbers'", "val is stored as int64"):
        assert text in str(caught.value)


# --- settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        ("AIOPERSIST_ROLLUP_EVRY", "hush", "is it AIOPERSIST_ROLLUP_EVERY?"),
        ("AIOPERSIST_NO_SUCH_THING_AT_ALL", "hush", "there is no such setting"),
        ("AIOPERSIST_ROLLUP_EVERY", "-1", "greater than 0"),
        ("AIOPERSIST_READER_LEASE_S", "soon", "'soon'"),
    ],
)
def test_a_variable_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, told: str
) -> None:
    """Goal: as it is spelled there; the text of what is no setting is not told, it may be a secret. An opener
    says so by an error of this library."""
    monkeypatch.setenv(variable, text)
    for kind, call in (
        (ValidationError, lambda: ap.Settings()),
        (ap.InvalidUsage, lambda: ap.open("mem://")),
        (ap.InvalidUsage, lambda: ap.stash.open("mem://")),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert variable in str(caught.value)
        assert told in str(caught.value)
        assert "hush" not in str(caught.value)
    with pytest.raises(ValidationError, match="is it blob_target_size"):
        ap.Settings(blob_target_sise=3)  # type: ignore[call-arg]  # that is the test


# --- values in messages -------------------------------------------------------------------------------


async def test_a_value_that_is_cut_has_its_last_quote(mem: ap.Client) -> None:
    reader = await mem.reader("orders", SCHEMA, create=True)
    with pytest.raises(ap.InvalidUsage) as caught:
        await reader.listen(cursor="x" * 200)
    assert re.search(r"'x+\.\.\.' is no cursor", str(caught.value))
    with pytest.raises(ap.InvalidUsage, match=r"'y+\.\.\.' is no name"):
        await mem.writer("y" * 600, SCHEMA)
    with pytest.raises(TypeError, match=r"\[1, 2, .*\.\.\.\] is not an aiopersist.Schema"):
        await mem.writer("orders", list(range(1, 99)))  # type: ignore[arg-type]  # that is the test


async def test_a_part_that_is_gone(mem: ap.Client) -> None:
    """Goal: a caller can name the error's type in order to catch it."""
    assert issubclass(ap.MissingPart, ap.Corruption)
    writer, reader = await mem.writer("orders", SCHEMA), await mem.reader("orders", SCHEMA)
    batch = await writer.batch([("a", 1, 0, 1)], 0, 1)
    await batch.flush_to_blob()
    keys = [part.key for part in batch.parts if part.key is not None]
    await writer.append_batch(batch, 0, 1)
    await stack_of(mem).blob.delete(keys)
    with pytest.raises(ap.MissingPart, match="shard 'orders'"):
        async with reader.snapshot() as snapshot:
            await snapshot.rows()
