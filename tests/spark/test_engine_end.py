"""The end, asyncio; see `test_engine.py`."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import httpx
import pytest
from fastapi import FastAPI

import aiopersist as ap
from aiopersist.spark import connect
from tests.spark.engine_kit import USAGE, appended
from tests.spark.faults import until
from tests.spark.plain_client import at
from tests.spark.schemas import PLAIN


def readers(place: str, name: str) -> int:
    return len(at(place, lambda client: client.admin.inspect(name)).readers)


def sleeping(batches: Any) -> Any:
    for batch in batches:
        time.sleep(100)
        yield batch


async def active(spark: Any) -> list[int]:
    return list(await asyncio.to_thread(lambda: spark.sparkContext.statusTracker().getActiveJobsIds()))


async def until_idle(spark: Any) -> None:
    """Spark ends the tasks of a job that was cancelled at its own pace."""
    async with asyncio.timeout(50):
        while await active(spark):
            await asyncio.sleep(0.05)


async def in_scope(scope: anyio.CancelScope, call: Any) -> None:
    with scope:
        await call
    assert scope.cancelled_caught


# --- the end ------------------------------------------------------------------------------------------


def test_release_and_close(spark: Any, place: str, name: str) -> None:
    """Goal: leases end with the DataFrames that need them; a closed client says so, and a second close does
    nothing."""
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    sc = connect(spark, place)
    df = sc.snapshot_df(name)
    sc.changes_df(name, 0)
    assert readers(place, name) == 2
    assert df.count() == 1
    sc.release()
    assert readers(place, name) == 0
    kept, let_go = sc.snapshot_df(name), sc.snapshot_df(name)
    sc.release(let_go)
    assert readers(place, name) == 1
    assert kept.count() == 1
    for not_held in (let_go, kept.where("val = 1")):
        with pytest.raises(ap.InvalidUsage, match="released before"):
            sc.release(kept, not_held)
    assert readers(place, name) == 1
    sc.close()
    sc.close()
    assert readers(place, name) == 0
    for call in (lambda: sc.snapshot_df(name), lambda: sc.write_df(df, name), lambda: sc.compact(name)):
        with pytest.raises(ap.InvalidUsage) as found:
            call()
        assert found.value.kind == USAGE.CLOSED
    with connect(spark, place) as again:
        assert again.snapshot_df(name).count() == 1


def test_a_read_that_is_opened_while_it_closes(spark: Any, place: str, name: str) -> None:
    """Goal: it ends with an error, and leaves no lease, though others keep the place open."""
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    with connect(spark, place), ThreadPoolExecutor() as threads:
        mine = connect(spark, place)
        waiting = threads.submit(mine.snapshot_df, name, 1)
        until(lambda: readers(place, name) == 1, "the lease of the waiting call")
        mine.close()
        appended(place, name, PLAIN, ([], 1, 2))
        with pytest.raises(ap.InvalidUsage) as found:
            waiting.result(60)
        assert found.value.kind == USAGE.CLOSED
        assert readers(place, name) == 0


def test_one_closing_is_nothing_to_another(spark: Any, place: str, name: str) -> None:
    appended(place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    with connect(spark, place) as mine:
        mine.snapshot_df(name)
        with connect(spark, place) as other:
            other.snapshot_df(name)
        assert readers(place, name) == 1


# --- asyncio ------------------------------------------------------------------------------------------


@pytest.mark.blocks_loop  # threads that import for the first time hold the interpreter
async def test_a_backend_that_drives_spark(spark: Any, place: str, name: str) -> None:
    """Goal: requests are answered by jobs, several at once."""
    app = FastAPI()
    async with await asyncio.to_thread(connect, spark, place) as sc:

        @app.post("/rows/{n}")
        async def rows(n: int) -> int:
            df = await asyncio.to_thread(
                spark.createDataFrame, [(f"k{n}", i) for i in range(n)], "key string, val long"
            )
            return await sc.awrite_df(df, name, keys=["key"], txn=("http", n))

        @app.get("/count")
        async def count() -> dict[str, int]:
            contents, changes = await asyncio.gather(sc.asnapshot_df(name), sc.achanges_df(name, 0))
            return {
                "contents": await asyncio.to_thread(contents.count),
                "changes": await asyncio.to_thread(changes.count),
            }

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert [(await http.post(f"/rows/{n}")).json() for n in (3, 4, 4)] == [0, 1, 1]
            assert (await http.get("/count")).json() == {"contents": 7, "changes": 7}
        assert await sc.acompact(name) is True
        with pytest.raises(ap.UnknownShard):
            await sc.asnapshot_df("other")


@pytest.mark.blocks_loop
async def test_a_job_tells_how_far_it_is(spark: Any, place: str, name: str) -> None:
    """Goal: the coroutines of a Spark client report their tasks to who watches."""
    async with await asyncio.to_thread(connect, spark, place) as sc:
        df = await asyncio.to_thread(
            lambda: spark.range(1_000, numPartitions=4).selectExpr("id as key", "1L as val")
        )
        work = ap.track(sc.awrite_df(df, name, keys=["key"]))
        seen = [done async for done in work]
        await work
        assert {(done.step, done.unit) for done in seen} == {("spark", "tasks")}
        assert seen[-1].done == seen[-1].total == 4


@pytest.mark.blocks_loop
async def test_jobs_leave_the_threads_of_the_loop_to_others(spark: Any, place: str, name: str) -> None:
    """Goal: while more jobs wait than the loop has threads, other work still gets one."""
    async with await asyncio.to_thread(connect, spark, place) as sc:
        await asyncio.to_thread(appended, place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
        waiting = [asyncio.create_task(sc.asnapshot_df(name, 9)) for _ in range((os.cpu_count() or 1) + 5)]
        await asyncio.sleep(0.5)
        async with asyncio.timeout(50):
            await asyncio.to_thread(appended, place, name, PLAIN, ([], 1, 10))
            for df in await asyncio.gather(*waiting):
                assert df is not None


@pytest.mark.blocks_loop
async def test_a_client_that_is_closed_in_a_cancelled_scope(spark: Any, place: str, name: str) -> None:
    """Goal: its leases end all the same, also where others keep the place open."""
    await asyncio.to_thread(appended, place, name, PLAIN, ([("a", 1, 0, 1)], 0, 1))
    async with await asyncio.to_thread(connect, spark, place):
        sc = await asyncio.to_thread(connect, spark, place)
        for _ in range(3):
            await sc.asnapshot_df(name)
        assert await asyncio.to_thread(readers, place, name) == 3
        with anyio.CancelScope() as scope:
            scope.cancel()
            await sc.aclose()
        async with asyncio.timeout(50):
            while await asyncio.to_thread(readers, place, name):
                await asyncio.sleep(0.05)


@pytest.mark.blocks_loop
@pytest.mark.parametrize("how", ["scope", pytest.param("task, again and again", marks=pytest.mark.long)])
async def test_a_cancelled_write_ends_its_job(spark: Any, place: str, name: str, how: str) -> None:
    """Goal: within seconds no task of it runs; nothing is written; the next write is as ever. A scope of
    anyio, as FastAPI has, cancels every wait of its task."""
    df = await asyncio.to_thread(spark.createDataFrame, [("a", 1)], "key string, val long")
    async with await asyncio.to_thread(connect, spark, place) as sc:
        assert await sc.awrite_df(df, name, keys=["key"]) == 0
        slow = await asyncio.to_thread(df.mapInArrow, sleeping, df.schema)
        scope = anyio.CancelScope()
        task = asyncio.create_task(in_scope(scope, sc.awrite_df(slow, name, txn=("a", 1))))
        async with asyncio.timeout(50):
            while not await active(spark):
                assert not task.done()
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        if how == "scope":
            scope.cancel()
        else:
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.001)
        done, _ = await asyncio.wait([task], timeout=50)
        assert done
        assert task.cancelled() is (how != "scope")
        await until_idle(spark)
        async with ap.open(place, maintenance=False) as client:
            assert (await client.admin.inspect(name)).upper == ap.Antichain(1)
            assert await client.txn_number(name, "a") is None
        assert await sc.awrite_df(df, name, txn=("a", 1)) == 1


@pytest.mark.blocks_loop
async def test_a_cancelled_read_that_waits_ends(spark: Any, place: str, name: str) -> None:
    """Goal: `asnapshot_df` of a time to come is waited for no longer than its caller waits."""
    async with ap.open(place) as client, client.writer(name, PLAIN) as writer:
        await writer.compare_and_append([], 0, 1)
        async with await asyncio.to_thread(connect, spark, place) as sc:
            task = asyncio.create_task(sc.asnapshot_df(name, 5))
            await asyncio.sleep(0.5)
            task.cancel()
            try:
                done, _ = await asyncio.wait([task], timeout=50)
            finally:
                await writer.compare_and_append([], 1, 6)  # so that it ends in any case
            await asyncio.wait([task], timeout=10)
            assert done
