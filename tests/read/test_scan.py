"""Goal: polars, DuckDB and readers of Arrow streams see the exact contents, in any thread and also in that of
the event loop; a scan that outlives its snapshot is an error in words; no thread and no lease stays."""

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.data.updates import codes
from aiopersist.read import scan as module
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.conftest import StoreUrls
from tests.support.forked import forked
from tests.support.internals import shards_of
from tests.support.shards import open_at

pytestmark = pytest.mark.usefixtures("started_postgres")

ROWS = 3000
SEVERAL = {"blob_target_size": 65536, "row_group_bytes": 16384, "inline_writes_single_max_bytes": 0}


class Order(BaseModel):
    id: int
    team: str
    amount: float | None
    price: Decimal
    tags: list[str]


def order(number: int) -> Order:
    amount = None if number % 10 == 0 else number / 4
    price, tags = Decimal(number) / 100, ["x"] * (number % 3)
    return Order(id=number, team=f"t{number % 7}", amount=amount, price=price, tags=tags)


ORDERS = {f"k{number:05}": order(number) for number in range(ROWS)}


async def orders(client: ap.Client) -> ap.Table[str, Order]:
    table = client.table("orders", str, Order)
    await table.put_many(dict(list(ORDERS.items())[: ROWS // 2]))
    await table.put_many(ORDERS)
    await table.delete("k00007")
    return table


def scans() -> list[threading.Thread]:
    """The threads of portals."""
    return [thread for thread in threading.enumerate() if thread.name == "aiopersist"]


def sql(query: str, scan: Any) -> list[Any]:
    """The rows of a query of DuckDB over `scan`."""
    with duckdb.connect() as database:
        return database.execute(query).fetchall()


def kind_of(call: Callable[[], object]) -> ap.UsageKind:
    with pytest.raises(ap.InvalidUsage) as caught:
        call()
    return caught.value.kind


async def test_everybody_sees_the_contents(location: StoreUrls) -> None:
    async with open_at(location, **SEVERAL) as client:
        table = await orders(client)
        want = await table.to_polars()
        flat = want.select("key", pl.col("val").struct.unnest())
        frame = await table.scan()
        assert frame.collect_schema() == flat.schema
        for engine in ("in-memory", "streaming"):
            got = await asyncio.to_thread(frame.collect, engine=engine)  # type: ignore[arg-type]
            assert got.equals(flat)
        assert (await asyncio.to_thread((await table.scan(flat=False)).collect)).equals(want)
        sums = "select team, sum(amount), count(*) from scan where id >= 100 group by team order by team"
        expected = flat.filter(pl.col("id") >= 100).group_by("team", maintain_order=True)
        teams = expected.agg(pl.sum("amount"), pl.len()).sort("team").rows()
        assert await asyncio.to_thread(sql, sums, frame) == teams
        async with client.reader("orders") as reader, reader.snapshot() as snapshot:
            whole = await snapshot.to_arrow()
            assert (await asyncio.to_thread(pa.table, snapshot)).equals(whole)
            count = "select count(*), max(val.id), sum(diff) from scan"
            assert await asyncio.to_thread(sql, count, snapshot) == [(ROWS - 1,) * 3]
            with_diff = await (await snapshot.scan()).collect_async()
            assert with_diff.drop("diff").equals(flat) and with_diff["diff"].sum() == ROWS - 1
    assert not scans()


@pytest.mark.blocks_loop
async def test_a_collect_in_the_loop_works(location: StoreUrls) -> None:
    async with open_at(location) as client:
        table = await orders(client)
        frame = await table.scan()
        assert frame.select(pl.len()).collect().item() == ROWS - 1
        assert frame.filter(pl.col("id") == 8).collect()["team"].to_list() == ["t1"]
        assert frame.join(frame, on="key", how="semi").select(pl.len()).collect().item() == ROWS - 1
        async with client.reader("orders") as reader, reader.snapshot() as snapshot:
            assert pa.table(snapshot).num_rows == ROWS - 1
            assert sql("select sum(diff) from scan", await snapshot.scan()) == [(ROWS - 1,)]


async def test_several_threads_at_once(quiet: ap.Client) -> None:
    frame = await (await orders(quiet)).scan()

    def largest(team: int) -> int:
        return int(frame.filter(pl.col("team") == f"t{team % 7}").select(pl.max("id")).collect().item())

    def all_largest() -> list[int]:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(largest, range(28)))

    expected = [max(o.id for o in ORDERS.values() if o.team == f"t{n % 7}") for n in range(28)]
    assert await asyncio.to_thread(all_largest) == expected


async def test_history(quiet: ap.Client) -> None:
    table = quiet.table("orders", str, Order)
    first = await table.put("a", order(1))
    await table.put("a", order(2))
    then, now = await table.scan(first), await table.scan()
    assert [(await frame.collect_async())["id"].to_list() for frame in (then, now)] == [[1], [2]]


async def test_a_tag(quiet: ap.Client) -> None:
    """Goal: a scan of a tag has its contents when their history is gone."""
    table = quiet.table("orders", str, Order)
    with pytest.raises(ap.UnknownTag):
        await table.scan(tag="first")
    await table.put("a", order(1))
    await quiet.tag(table, "first")
    await table.put("a", order(2))
    await quiet.admin.retain("orders", timedelta(0))
    await quiet.admin.force_compaction("orders")
    await quiet.admin.force_gc("orders")
    then, now = await table.scan(tag="first"), await table.scan()
    assert [(await frame.collect_async())["id"].to_list() for frame in (then, now)] == [[1], [2]]
    with pytest.raises(ap.InvalidUsage, match="not both"):
        await table.scan(3, tag="first")


async def test_a_table_that_does_not_exist_yet(quiet: ap.Client) -> None:
    frame = await quiet.table("orders", str, Order).scan()
    assert frame.collect_schema().names() == ["key", "id", "team", "amount", "price", "tags"]
    assert (await frame.filter(pl.col("id") > 1).collect_async()).is_empty()
    assert await quiet.list_shards() == {}


# --- names --------------------------------------------------------------------------------------------


class Pair(BaseModel, frozen=True):
    id: int
    part: str


class Named(BaseModel):
    id: int
    diff: int
    name: str | None


async def test_names_that_occur_twice_get_their_half(quiet: ap.Client) -> None:
    async with quiet.writer("s", ap.Schema(Pair, Named)) as writer:
        await writer.append([(Pair(id=1, part="a"), Named(id=2, diff=3, name=None), 0, 7)], 0, 1)
    async with quiet.reader("s") as reader, reader.snapshot() as snapshot:
        frame = await snapshot.scan()
        row = {"key_id": 1, "part": "a", "val_id": 2, "val_diff": 3, "name": None, "diff": 7}
        assert (await frame.collect_async()).rows(named=True) == [row]
        found = frame.filter(pl.col("val_id") == 2, pl.col("key_id") < 2, pl.col("diff") > 6)
        assert (await found.collect_async()).height == 1
        nested = (await snapshot.scan(flat=False)).filter(pl.col("val").struct.field("id") == 2)
        assert (await nested.collect_async()).columns == ["key", "val", "diff"]


async def test_names_that_prefixes_do_not_tell_apart(quiet: ap.Client) -> None:
    t = pa.struct([pa.field("key", pa.int64(), False), pa.field("val_key", pa.int64(), False)])
    async with quiet.writer("s", ap.Schema(int, pa.field("val", t, False))) as writer:
        await writer.append([(1, {"key": 2, "val_key": 3}, 0, 1)], 0, 1)
    async with quiet.reader("s") as reader, reader.snapshot() as snapshot:
        with pytest.raises(ap.InvalidUsage, match="'val_key'"):
            await snapshot.scan()
        assert (await (await snapshot.scan(flat=False)).collect_async()).height == 1


# --- life ---------------------------------------------------------------------------------------------


async def test_a_scan_does_not_outlive_its_snapshot(quiet: ap.Client) -> None:
    await orders(quiet)
    async with quiet.reader("orders") as reader, reader.snapshot() as snapshot:
        frame = await snapshot.scan()
        rows = snapshot.__arrow_c_stream__
        running = pa.RecordBatchReader.from_stream(snapshot)
    assert kind_of(frame.collect) == kind_of(rows) == ap.UsageKind.CLOSED
    with pytest.raises(pa.ArrowInvalid, match="the snapshot is closed"):
        running.read_all()
    with pytest.raises(Exception, match="the snapshot is closed"):
        sql("select count(*) from scan", frame)


async def test_nor_its_client(location: StoreUrls) -> None:
    async with open_at(location, **SEVERAL) as client:
        frame = await (await orders(client)).scan()
        items = client_reads(frame)
        assert await asyncio.to_thread(next, items) is not None
        assert scans()
    assert not scans()
    assert kind_of(frame.collect) == ap.UsageKind.CLOSED
    assert kind_of(lambda: list(items)) == ap.UsageKind.CLOSED


def client_reads(frame: pl.LazyFrame) -> Any:
    """The batches of a query, read one by one."""
    return frame.collect_batches(chunk_size=100, maintain_order=True)


async def test_the_last_frame_closes_the_snapshot_of_a_table(quiet: ap.Client) -> None:
    """Goal: a version stays as long as a frame may read it, and no longer."""
    table = await orders(quiet)
    pins = shards_of(quiet).at(await quiet.shard_id("orders")).register.pins
    assert not pins
    frame = await table.scan()
    made_of_it = frame.filter(pl.col("id") > 0).select("id")
    del frame
    gc.collect()
    await table.delete(*ORDERS)
    await quiet.admin.maintain()
    assert pins and (await made_of_it.collect_async()).height == ROWS - 2
    del made_of_it
    gc.collect()
    while pins:
        await asyncio.sleep(0)


async def test_a_limit_ends_the_read_early(quiet: ap.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 0
    whole = module.leased_batches

    async def counted(*args: Any) -> Any:
        nonlocal rows
        async for batch in whole(*args):
            for part in range(0, batch.num_rows, 100):
                rows += min(batch.num_rows - part, 100)
                yield batch.slice(part, 100)

    monkeypatch.setattr(module, "leased_batches", counted)
    frame = await (await orders(quiet)).scan()
    assert (await frame.head(10).collect_async())["key"].to_list() == list(ORDERS)[:7] + list(ORDERS)[8:11]
    assert rows <= 400


async def test_stores_that_another_loop_cannot_use() -> None:
    blob = FaultyBlob(ap.open_blob("mem://"), Faults())
    async with ap.open(blob=blob, consensus="mem://") as client:
        table = client.table("orders", str, Order)
        await table.put("a", order(1))
        with pytest.raises(ap.Unsupported, match=r"FaultyBlob.*give a URL"):
            await table.scan()
        async with client.reader("orders") as reader, reader.snapshot() as snapshot:
            with pytest.raises(ap.Unsupported):
                snapshot.__arrow_c_stream__()
    await blob.aclose()


async def test_a_readonly_client(tmp_path: Any) -> None:
    async with ap.open(tmp_path) as client:
        await orders(client)
    async with ap.open(tmp_path, readonly=True) as client:
        frame = await client.table("orders", str, Order).scan()
        assert (await frame.select(pl.len()).collect_async()).item() == ROWS - 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_fork_is_refused_in_words(quiet: ap.Client) -> None:
    await orders(quiet)
    async with quiet.reader("orders") as reader, reader.snapshot() as snapshot:
        await asyncio.to_thread(pa.table, snapshot)

        async def within() -> object:
            return next(snapshot._leased().batches())

        name, kind, text = forked(within)
        assert (name, kind) == ("InvalidUsage", "WRONG_LOOP") and "before a fork" in text


async def test_without_the_function_of_polars(quiet: ap.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    table = await orders(quiet)
    monkeypatch.delattr("polars.io.plugins.register_io_source")
    with pytest.raises(ap.Unsupported, match=f"polars {pl.__version__}"):
        await table.scan()


async def test_threads_that_serve_polars_do_not_call_it(
    quiet: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads of polars may wait for a scan: with some versions it would wait for ever."""
    async with quiet.writer("s", ap.Schema(list[int], str)) as writer:
        for time in range(3):
            await writer.append([([n % 50, n], str(n), time, 1) for n in range(2000)], time, time + 1)
    async with quiet.reader("s") as reader, reader.snapshot() as snapshot:
        want = await snapshot.to_polars()
        monkeypatch.setattr(codes, "pl", None)
        frame = await snapshot.scan()
        assert (await frame.collect_async()).equals(want)
