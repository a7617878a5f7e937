"""Goal: a shard stays small by itself, no reader is harmed, and since moves only by a call or a policy."""

import asyncio
import gc
from typing import Any

import pytest

import aiopersist as ap
from tests.maintenance.maintenance_kit import grown, opened, state_of, until
from tests.support.internals import shards_of, stack_of
from tests.support.schemas import KIND, SCHEMA


async def contents_of(client: ap.Client) -> dict[tuple[str, int], int]:
    async with client.reader("t", SCHEMA) as r, r.snapshot() as s:
        return {(key, val): diff for key, val, diff in await s.rows()}


# --- compaction and garbage collection ---------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 16384])
async def test_an_idle_shard_converges(location: Any, inline: int) -> None:
    """Goal: without any call: few batches, few versions, no unused blob."""
    async with opened(location, inline_writes_single_max_bytes=inline, blob_target_size=4000) as client:
        async with client.writer("t", SCHEMA) as w:
            expected = await grown(w, 60)

            async def few() -> Any:
                view = await client.admin.inspect("t")
                return view if len(view.batches) <= 2 * 8 and view.live_diffs < 60 else None

            view = await until(few)
            assert sum(len(level.batches) for level in view.levels.values()) <= len(view.batches)
            assert await contents_of(client) == expected
        assert (await client.admin.fsck("t")).problems == []
        assert stack_of(client).supervisor.failures.count == 0


async def test_force_compaction_leaves_one_batch(location: Any) -> None:
    async with opened(
        location, maintenance=False, inline_writes_single_max_bytes=0, blob_target_size=200
    ) as client:
        async with client.writer("t", SCHEMA) as w, client.reader("t", SCHEMA) as r:
            expected = await grown(w, 20)
            await r.downgrade_since(15)
            await client.admin.force_compaction("t")
            (batch,) = (await client.admin.inspect("t")).batches
            assert (batch.lower, batch.upper, batch.since) == (*map(ap.Antichain, (0, 20, 15)),)
            assert (batch.runs, batch.len <= 80) == (1, True)
            assert await contents_of(client) == expected
            with pytest.raises(ap.SinceViolation):
                await r.snapshot(14)
            await client.admin.force_gc("t")
            usage = await client.admin.usage()
            assert usage.total == usage.referenced
        assert (await client.admin.sweep_leaked_blobs()).keys == ()


async def test_an_open_snapshot_survives(location: Any) -> None:
    """Goal: compaction and collection go on around it, in another client as well."""
    async with opened(location, inline_writes_single_max_bytes=0) as client, opened(location) as other:
        async with client.writer("t", SCHEMA) as w, client.reader("t", SCHEMA) as r:
            await grown(w, 10)
            async with r.snapshot(4) as old:
                await r.downgrade_since(9)
                for turn in (client, other):
                    await turn.force_compaction("t")
                    await turn.force_gc("t")
                assert sum(diff for _, _, diff in await old.rows()) == 20
            await client.admin.force_gc("t")
            usage = await client.admin.usage()
            assert usage.total == usage.referenced


async def test_compaction_of_more_runs_than_fit_takes_several_passes(location: Any) -> None:
    limits = {"compaction_memory_bytes": 10_000, "row_group_bytes": 1000, "inline_writes_single_max_bytes": 0}
    async with opened(location, **limits, compaction_idle_s=1000.0) as client:
        async with client.writer("t", SCHEMA) as w:
            batches = [await w.batch([(f"k{n}", n, 0, 1), ("all", 0, 0, 1)], 0, 1) for n in range(9)]
            await w.compare_and_append_batch(batches, 0, 1)
            assert (await client.admin.inspect("t")).batches[0].runs == 9
            await client.admin.force_compaction("t")
            (batch,) = (await client.admin.inspect("t")).batches
            assert (batch.runs, batch.len) == (1, 10)
            assert (await contents_of(client))["all", 0] == 9
        assert (await client.admin.fsck("t")).ok


async def test_product_times_and_truncated_parts_are_compacted() -> None:
    schema = ap.Schema(key=str, val=int, time=2)
    async with ap.open("mem://", settings=ap.Settings(inline_writes_single_max_bytes=0)) as client:
        async with client.writer("p", schema) as w, client.reader("p", schema) as r:
            end = ap.Antichain((0, 3), (3, 0))
            batch = await w.batch(
                [("a", 1, (0, 1), 1), ("a", 1, (2, 2), 1), ("b", 1, (5, 5), 1)], (0, 0), (9, 9)
            )
            await w.compare_and_append_batch([batch], (0, 0), end)
            await w.compare_and_append([("a", 1, (0, 4), 1)], end, ap.Antichain((0, 5), (3, 0)))
            await r.downgrade_since((0, 2))
            await client.admin.force_compaction("p")
            (batch_view,) = (await client.admin.inspect("p")).batches
            assert batch_view.runs == 1
            async with r.snapshot((0, 4)) as s:
                assert await s.rows() == [("a", 1, 2)]
        assert (await client.admin.fsck("p")).problems == []


# --- the process that does it, and failures ---------------------------------------------------------


async def test_rollups_go_on_beside_an_open_reader(location: Any) -> None:
    """Goal: a collection that reaches nothing gives its claim back."""
    async with opened(location, rollup_every=16) as client:
        async with client.writer("t", SCHEMA) as w, client.reader("t", SCHEMA) as r:
            await grown(w, 1)
            async with r.snapshot(0):
                for time in range(1, 120):
                    await w.compare_and_append([("a", time, time, 1)], time, time + 1)
                    await asyncio.sleep(0.002)

                async def rolled_up() -> Any:
                    state = await state_of(client)
                    return not state.claims and state.seqno - max(state.rollups, default=0) < 40

                await until(rolled_up)


async def test_a_round_beside_a_compaction_does_not_end_it(location: Any) -> None:
    """Goal: the registration ends only when its last user has released it."""
    async with opened(location, inline_writes_single_max_bytes=0, compaction_idle_s=1000.0) as client:
        async with client.writer("t", SCHEMA) as w:
            expected = await grown(w, 20)
            maintenance = client._services.maintenance.of(shards_of(client).at(await client.shard_id("t")))
            async with maintenance.registration.held() as registration:
                for _ in range(3):
                    await client.admin.maintain()
                    assert registration.alive
            async with asyncio.timeout(50):
                while registration.writer in (await state_of(client)).writers:
                    await asyncio.sleep(0.01)
            assert await contents_of(client) == expected


async def test_what_fails_does_not_end_what_goes_on_beside_it() -> None:
    async with opened(ap.Location("mem://", "mem://"), compaction_idle_s=1000.0) as client:
        async with client.writer("t", SCHEMA) as w:
            await grown(w, 3)
            shared = client._services.maintenance.of(
                shards_of(client).at(await client.shard_id("t"))
            ).registration
            async with shared.held() as one:
                with pytest.raises(RuntimeError):
                    async with shared.held() as two:
                        assert one.writer == two.writer
                        raise RuntimeError
                assert one.alive
                async with shared.held() as three:
                    assert three.writer != one.writer


async def test_registrations_of_maintenance_do_not_pile_up(location: Any) -> None:
    """Goal: however often a shard is opened and let go; and a client that is closed leaves none."""
    async with opened(location, compaction_inputs_min=2, watch_timeout_s=0.1) as client:
        for turn in range(5):
            async with client.writer("t", SCHEMA) as w:
                for time in range(turn * 20, turn * 20 + 20):
                    await w.compare_and_append([("a", time, time, 1)], time, time + 1)
                await asyncio.sleep(0.1)
            del w
            await asyncio.sleep(0.1)
            gc.collect()
        assert len((await state_of(client)).writers) == 1
    async with opened(location, compaction_idle_s=1000.0) as client:
        assert not (await state_of(client)).writers


# --- critical since ----------------------------------------------------------------------------------


async def test_two_owners_of_a_critical_since_fence_each_other(location: Any) -> None:
    async with opened(location) as client, opened(location) as other:
        async with client.writer("t", SCHEMA) as w:
            await grown(w, 10)
            one = await client.critical_since("t", "pipeline", opaque=1)
            two = await other.critical_since("t", "pipeline", opaque=9)
            assert (one.since, one.opaque, two.opaque) == (ap.Antichain(0), 1, 1)
            assert await one.compare_and_downgrade_since(1, 1, 3) == ap.Antichain(3)
            assert await two.compare_and_downgrade_since(1, 2, 0) == ap.Antichain(3)  # moves nothing, fences
            with pytest.raises(ap.OpaqueMismatch) as caught:
                await one.compare_and_downgrade_since(1, 1, 8)
            assert (caught.value.expected, caught.value.actual) == (1, 2)
            assert (await client.admin.inspect("t")).since == ap.Antichain(3)
            await one.aclose()
            await two.aclose()
            assert (await client.admin.inspect("t")).critical["pipeline"].since == ap.Antichain(3)


async def test_a_critical_since_holds_back_what_others_move(location: Any) -> None:
    async with opened(location) as client, client.writer("t", SCHEMA) as w:
        await grown(w, 10)
        async with client.critical_since("t", "slow") as slow, client.reader("t", SCHEMA) as r:
            await r.downgrade_since(8)
            assert (await client.admin.inspect("t")).since == ap.Antichain(0)
            await slow.compare_and_downgrade_since(0, 0, 5)
            assert (await client.admin.inspect("t")).since == ap.Antichain(5)


# --- the end -----------------------------------------------------------------------------------------


async def test_finalize(location: Any) -> None:
    async with opened(location, inline_writes_single_max_bytes=0) as client:
        async with client.writer("t", SCHEMA) as w:
            await grown(w, 5)
            with pytest.raises(ap.InvalidUsage) as caught:
                await client.admin.finalize("t")
            assert (caught.value.kind, caught.value.since) == (KIND.FINALIZATION_ERROR, ap.Antichain(0))
            await w.compare_and_append([], 5, ap.Antichain())
            async with client.reader("t", SCHEMA) as r:
                await r.downgrade_since(ap.Antichain())
            await client.admin.finalize("t")
            await client.admin.finalize("t")
            with pytest.raises(ap.ShardFinalized):
                await client.reader("t", SCHEMA)
        await client.admin.sweep_leaked_blobs(dry_run=False)
        assert (await client.admin.usage()).total == 0
    async with opened(location) as client:
        with pytest.raises(ap.ShardFinalized):
            await client.writer("t", SCHEMA)


async def test_drop_deletes_the_data(location: Any) -> None:
    async with opened(location, inline_writes_single_max_bytes=0) as client:
        async with client.writer("t", SCHEMA) as w:
            await grown(w, 5)
            await client.admin.drop("t")
        assert (await client.admin.usage()).live == 0
        await client.admin.sweep_leaked_blobs(dry_run=False)
        assert (await client.admin.usage()).total == 0
        async with client.writer("t", SCHEMA) as w:
            assert w.upper == ap.Antichain(0)


async def test_unknown_shards_are_told() -> None:
    async with ap.open("mem://") as client:
        for call in ("inspect", "fsck", "force_gc", "force_compaction", "finalize"):
            with pytest.raises(ap.UnknownShard):
                await getattr(client.admin, call)("nobody")
        with pytest.raises(ap.UnknownShard):
            await client.critical_since("nobody", "me")
