"""Goal: a policy keeps as much history as it says, and what a shard holds now stays readable."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from tests.maintenance.maintenance_kit import grown, opened, state_of, until
from tests.support.schemas import SCHEMA


async def test_retention_by_times(location: Any) -> None:
    """Goal: never nearer than `keep`, at rest within twice that, no further than holds allow."""
    async with opened(location) as client:
        async with client.writer("t", SCHEMA) as w:
            await client.admin.retain("t", 5)
            await grown(w, 40)

            async def near() -> Any:
                since: Any = (await client.admin.inspect("t")).since.time
                assert since <= 35
                return since >= 30

            await until(near)
            async with client.reader("t", SCHEMA, hold=36):
                await w.compare_and_append([], 40, 80)
                await client.admin.force_compaction("t")
                assert (await client.admin.inspect("t")).since == ap.Antichain(36)
            await client.admin.force_compaction("t")
            assert (await client.admin.inspect("t")).since == ap.Antichain(75)
            await client.admin.retain("t", None)
            await w.compare_and_append([], 80, 200)
            await client.admin.force_compaction("t")
            assert (await client.admin.inspect("t")).since == ap.Antichain(75)


async def test_retention_by_age(location: Any) -> None:
    async with opened(location) as client, client.writer("t", SCHEMA) as w:
        await client.admin.retain("t", timedelta(hours=1))
        await grown(w, 10)
        assert (await client.admin.inspect("t")).since == ap.Antichain(0)
        await client.admin.retain("t", timedelta(seconds=1))

        async def moved() -> Any:
            return (await client.admin.inspect("t")).since == ap.Antichain(9)

        await until(moved)


@pytest.mark.parametrize("keep", [0, 1, timedelta(0), timedelta(milliseconds=10)], ids=str)
@pytest.mark.parametrize("path", ["background", "maintain", "force_compaction"])
async def test_the_current_contents_stay_readable(path: str, keep: Any) -> None:
    """Goal: however long a shard rests, what it holds now can be read, without any append."""
    settings = ap.Settings(compaction_idle_s=0.02)
    async with ap.open("mem://", settings=settings, maintenance=path == "background") as client:
        async with client.writer("t", SCHEMA) as w, client.reader("t", SCHEMA) as r:
            await client.admin.retain("t", keep)
            for time in range(3):
                await w.write([(f"k{time}", time)])

            async def moved() -> Any:
                if path != "background":
                    await (
                        client.admin.maintain() if path == "maintain" else client.admin.force_compaction("t")
                    )
                return (await client.admin.inspect("t")).since == ap.Antichain(2)

            await until(moved)
            await asyncio.sleep(0.05)
            await moved()
            assert (await client.admin.inspect("t")).since == ap.Antichain(2)
            async with r.snapshot() as s:
                assert await s.rows() == [("k0", 0, 1), ("k1", 1, 1), ("k2", 2, 1)]
            async with r.subscribe() as told:
                assert len((await anext(aiter(told.steps()))).updates) == 3


async def test_product_times_stay_readable() -> None:
    """Goal: some time is complete and held, at an upper of several elements and at one that was appended to
    the last."""
    schema = ap.Schema(key=str, val=int, time=2)
    async with ap.open("mem://", maintenance=False) as client:
        async with client.writer("t", schema) as w, client.reader("t", schema) as r:
            await client.admin.retain("t", timedelta(0))
            upper = ap.Antichain((0, 0))
            for new, at in ((ap.Antichain((0, 3), (3, 0)), (2, 2)), (ap.Antichain((5, 5)), (9, 4))):
                await w.compare_and_append([("a", 1, upper.elements[0], 1)], upper, new)
                upper = new
                for _ in range(2):  # the first sees the upper, the next one finds it old
                    await client.admin.force_compaction("t")
                since = (await client.admin.inspect("t")).since
                assert since.less_equal(at) and not upper.less_equal(at)
                async with r.snapshot(at) as s:
                    assert await s.rows()


async def test_a_finished_shard_stays_readable() -> None:
    async with ap.open("mem://", maintenance=False) as client:
        async with client.writer("t", SCHEMA) as w, client.reader("t", SCHEMA) as r:
            await client.admin.retain("t", timedelta(0))
            await w.compare_and_append([("a", 1, 3, 1)], 0, 9)
            await client.admin.force_compaction("t")
            await w.compare_and_append([("b", 1, 10, 1)], 9, ap.Antichain())
            for _ in range(3):
                await client.admin.force_compaction("t")
            async with r.snapshot() as s:
                assert await s.rows() == [("a", 1, 1), ("b", 1, 1)]


@pytest.mark.parametrize("keep", [-1, 2.5, "3", True, timedelta(seconds=-1)])
async def test_what_cannot_be_kept_is_refused(keep: Any) -> None:
    async with ap.open("mem://") as client, client.writer("t", SCHEMA):
        with pytest.raises(ap.InvalidUsage):
            await client.admin.retain("t", keep)


async def test_a_policy_that_is_set_again_goes_on(location: Any) -> None:
    """Goal: an application that says what it wants at every start does not begin to forget anew."""
    async with opened(location, compaction_idle_s=1000.0) as client, client.writer("t", SCHEMA) as w:
        await client.admin.retain("t", timedelta(hours=1))
        await grown(w, 3)
        before = (await state_of(client)).retention[0]
        await client.admin.retain("t", timedelta(hours=1))
        await client.admin.retain("t", timedelta(hours=2))
        after = (await state_of(client)).retention[0]
        assert (after.marks, after.hold, after.seconds) == (before.marks, before.hold, 7200.0)
