"""Inline parts, runs, stores that fail; see `test_builder.py`."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import HAPPENS, Faults, Outcome
from tests.batches.builder_kit import (
    EACH_ITS_OWN,
    NEVER_INLINE,
    PARTS,
    RECORD,
    Gate,
    assert_closed,
    nothing_left,
)
from tests.support.internals import shards_of
from tests.support.rigs import rig
from tests.support.schemas import SCHEMA
from tests.support.shards import history, open_mem, parquet, rows, summed, until


class EveryThird(Faults):
    """Each third write of a blob ends so."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(latency_s=(0.0, 0.002))
        self.bad = outcome

    def outcome(self, op: str) -> Outcome:
        self.calls[op] += 1
        return self.bad if op == "set" and self.calls[op] % 3 == 0 else Outcome.DONE


def at(key: str, val: int = 0, time: int = 0, diff: int = 1) -> Any:
    return (key, val, time, diff)


FAILURES = [o for o in Outcome if o not in (Outcome.DONE, Outcome.LATE)]


# --- inline parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("single", "total", "sizes", "inline"),
    [
        (100, 2**20, [75], True),  # 75 + 24 goodbytes
        (100, 2**20, [76], False),
        (100, 2**20, [20, 31], True),
        (100, 2**20, [20, 32], False),
        (0, 2**20, [1], False),
        (16384, 0, [1], False),
        (0, 0, [1], False),
        (16384, 100, [76], False),
        (16384, 2**20, [200, 16000], True),
        (16384, 2**20, [200, 17000], False),
    ],
)
@pytest.mark.parametrize("how", ["add", "extend"])
async def test_a_small_batch_is_inline(single: int, total: int, sizes: Any, inline: bool, how: str) -> None:
    """Goal: less than the limit, by goodbytes; 0 is never; an inline batch writes no blob."""
    limits = {"inline_writes_single_max_bytes": single, "inline_writes_total_max_bytes": total}
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w, w.builder(0) as b:
        updates = [(str(n) * size, n, 0, 1) for n, size in enumerate(sizes)]
        if how == "add":
            assert [await b.add(*update) for update in updates] == [RECORD] * len(updates)
        else:
            await b.extend(iter(updates))
        batch = await b.finish(1)
        (part,) = batch.parts
        assert (part.key is None) is inline
        assert part.encoded_size_bytes > 0
        assert len(await parquet(client)) == (0 if inline else 1)
        await w.compare_and_append_batch([batch], 0, 1)
        assert len(await parquet(client)) == (0 if inline else 1)
        assert await rows(client) == [(key, val, 1) for key, val, _, _ in updates]


async def test_only_a_sole_part_that_is_still_buffered_is_inline() -> None:
    async with open_mem(blob_target_size=60) as client, client.writer("t", SCHEMA) as w:
        async with w.builder(0) as b:  # 25 bytes each: the third reaches the target
            added = [await b.add(key, 1, 0, 1) for key in "abc"]
            assert added == [RECORD, RECORD, PARTS]
            sole = await b.finish(1)
            assert [part.key is None for part in sole.parts] == [False]
        async with w.builder(0) as b:
            await b.extend([(key, 1, 0, 1) for key in "abcd"])
            followed = await b.finish(1)
            assert [part.key is None for part in followed.parts] == [False, False]
        async with w.builder(0) as b:
            await b.extend([(key, 1, 0, 1) for key in "ab"])
            buffered = await b.finish(1)
            assert [part.key is None for part in buffered.parts] == [True]
        for batch in (sole, followed, buffered):
            await batch.delete()
        assert await parquet(client) == []


@pytest.mark.parametrize("together", [1, 4])
async def test_inline_parts_of_a_shard_stay_below_their_total(together: int) -> None:
    """Goal: also when the batches of one append are too much together."""
    limits = {"inline_writes_single_max_bytes": 600, "inline_writes_total_max_bytes": 1500}
    async with open_mem(**limits) as client, client.writer("t", SCHEMA) as w:
        expected = {}
        for n in range(10):
            batches = []
            for m in range(together):
                async with w.builder(n) as b:
                    await b.add(f"{n}-{m}" + "x" * 400, m, n, 1)
                    batches.append(await b.finish(n + 1))
                expected[f"{n}-{m}" + "x" * 400, m, n] = 1
            assert all(part.key is None for batch in batches for part in batch.parts)
            await w.compare_and_append_batch(batches, n, n + 1)
            (shard,) = shards_of(client)._open.values()
            assert shard.state.inline_bytes < 1500
        assert await history(client) == expected


# --- runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("updates", "runs"),
    [
        ([], ()),
        ([at("a")], ()),
        ([at("a"), at("b"), at("c")], ()),
        ([at("c"), at("b"), at("a")], (1, 2)),
        ([at("a"), at("c"), at("b"), at("d")], (2,)),
        ([at("b"), at("a"), at("c"), at("a")], (1, 3)),
        ([at("a"), at("a"), at("a")], ()),  # at the end of the run so far
        ([at("a", 1), at("a", 2), at("a", 1)], (2,)),
        ([at("a", 1, 5), at("a", 1, 6), at("a", 1, 5)], (2,)),
        ([at("a", 9, 9), at("b", 0, 0)], ()),  # key before val before time
        ([at("a", 1, 9), at("a", 2, 0)], ()),
        ([at("a"), at("z", 0, 0, 0), at("b")], ()),  # the part in the middle came to nothing
        ([at("é"), at("z")], (1,)),  # by bytes
        ([at("a", -1), at("a", -2)], (1,)),
        ([at("a"), at(""), at("b")], (1,)),
    ],
)
async def test_runs(updates: Any, runs: tuple[int, ...]) -> None:
    """Goal: a part that begins at or after the end of the run continues it."""
    async with open_mem(**EACH_ITS_OWN) as client, client.writer("t", SCHEMA) as w, w.builder(0) as b:
        for update in updates:
            await b.add(*update)
        batch = await b.finish(20)
        assert batch.runs == runs
        assert [p.key_lower for p in batch.parts] == [u[0] for u in updates if u[3]]
        await w.compare_and_append_batch([batch], 0, 20)
        assert await history(client) == summed(updates)
        sums: dict[Any, int] = {}
        for key, val, _, diff in updates:
            sums[key, val] = sums.get((key, val), 0) + diff
        assert await rows(client) == [(*kv, d) for kv, d in sorted(sums.items()) if d]


async def test_a_run_is_compared_with_the_end_of_its_last_part() -> None:
    """Goal: of parts that overlap: [a, c] then [b, d] are two runs, [a, c] then [c, d] one."""
    for second, runs in ((("b", "d"), (1,)), (("c", "d"), ())):
        async with open_mem(blob_target_size=50, **NEVER_INLINE) as client:
            async with client.writer("t", SCHEMA) as w, w.builder(0) as b:
                for key in ("c", "a", *second[::-1]):
                    await b.add(key, 1, 0, 1)
                batch = await b.finish(1)
                assert (len(batch.parts), batch.runs) == (2, runs)
                await batch.delete()


# --- stores that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.LATE])
async def test_a_slow_store_that_fails_every_third_request(outcome: Outcome) -> None:
    """Goal: answers lost or requests refused: the parts are there once, in their order."""
    updates = [(f"k{n:02}", n, n, 1) for n in range(12)]
    async with (
        rig(blob_faults=EveryThird(outcome), **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        for update in updates:
            await b.add(*update)
        batch = await b.finish(12)
        assert [part.key_lower for part in batch.parts] == [u[0] for u in updates]
        assert batch.runs == ()
        assert sorted(part.key for part in batch.parts) == sorted(await r.parts())
        if outcome is not Outcome.DONE:
            assert r.blob_faults.calls["set"] > 12
        await w.compare_and_append_batch([batch], 0, 12)
        assert await history(r.honest) == summed(updates)


@pytest.mark.parametrize("outcome", FAILURES)
@pytest.mark.parametrize("then", ["add", "refused", "extend", "finish"])
async def test_an_upload_that_fails_surfaces_at_the_next_call(outcome: Outcome, then: str) -> None:
    """Goal: at the very next `add`, or at `finish`; the builder is closed, and what was uploaded, told or
    not, is deleted."""
    async with (
        rig(blob_faults=Faults(), retry_timeout_s=0, **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        await until(lambda: r.blob_faults.calls["set"] == 1)
        r.blob_faults.fail_next("set", outcome)
        await b.add("b", 1, 0, 1)
        await until(lambda: b._upload._in_flight[1][0].done())
        assert len(await r.parts()) == (2 if outcome in HAPPENS else 1)
        with pytest.raises(ap.StorageUnavailable):
            match then:
                case "add":
                    await b.add("c", 1, 0, 1)
                case "refused":
                    await b.add("c", "not an int", 0, 1)
                case "extend":
                    await b.extend([("c", 1, 0, 1)])
                case "finish":
                    await b.finish(1)
        await assert_closed(b)
        assert await r.parts() == []
        async with w.builder(0) as again:
            await again.add("c", 1, 0, 1)
            await w.compare_and_append_batch([await again.finish(1)], 0, 1)
        assert await rows(r.honest) == [("c", 1, 1)]


@pytest.mark.parametrize("outcome", FAILURES)
async def test_the_upload_that_finish_starts_may_fail(outcome: Outcome) -> None:
    async with (
        rig(blob_faults=Faults(), retry_timeout_s=0, **NEVER_INLINE) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        r.blob_faults.fail_next("set", outcome)
        with pytest.raises(ap.StorageUnavailable):
            await b.finish(1)
        await assert_closed(b)
        assert await r.parts() == []


async def test_an_add_that_waits_for_the_part_that_fails() -> None:
    async with (
        rig(blob_faults=Gate(), retry_timeout_s=0, **EACH_ITS_OWN) as r,
        r.client.writer("t", SCHEMA) as w,
        w.builder(0) as b,
    ):
        await b.add("a", 1, 0, 1)
        await until(lambda: len(r.blob_faults.waiting) == 1)
        await b.add("b", 1, 0, 1)
        r.blob_faults.fail_next("set", Outcome.REFUSED)
        waiting = asyncio.create_task(b.add("c", 1, 0, 1))
        await until(lambda: len(r.blob_faults.waiting) == 2)
        assert not waiting.done()
        r.blob_faults.let(0)
        await until(lambda: r.blob_faults.injected)
        r.blob_faults.let_all()
        with pytest.raises(ap.StorageUnavailable):
            await waiting
        await assert_closed(b)
        await nothing_left(r.blob)
