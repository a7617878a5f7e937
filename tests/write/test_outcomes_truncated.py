"""Goal: the outcome of an append is known also if its version was truncated, or other versions follow it."""

import asyncio

import pytest

import aiopersist as ap
from aiopersist.shard.commit import commit
from aiopersist.shard.log import consensus_key
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from tests.support.internals import shard_of, shards_of
from tests.support.rigs import Rig
from tests.support.schemas import SCHEMA
from tests.support.shards import CAS
from tests.support.virtual import in_virtual_time
from tests.write.outcomes_kit import by_compare, rig


async def _truncate_but_head(r: Rig, w: ap.WriteHandle[str, int]) -> None:
    """What garbage collection does: a rollup at the head, and nothing before it."""
    from aiopersist.maintenance.shard import ShardMaintenance
    from aiopersist.shard.shard import Shard

    shard: Shard = next(iter(shards_of(r.honest)._open.values()))
    await ShardMaintenance(shard).roll_up()
    latest = shard.state.latest_rollup
    assert latest is not None
    await r.consensus.truncate(consensus_key(w.shard_id), latest)


@pytest.mark.parametrize("happened", [True, False])
async def test_of_a_truncated_version_the_token_decides(happened: bool) -> None:
    """Goal: the version of the attempt is gone, the state keeps the writer's last token."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.faults.fail_next(CAS, Outcome.LOST if happened else Outcome.DROPPED)
        r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await by_compare(w)
        async with r.honest.writer("t", SCHEMA) as other:
            upper = 1 if happened else 0
            await other.compare_and_append([], upper, 9)
            await other.compare_and_append([], 9, 10)
        await _truncate_but_head(r, w)
        r.faults.heal()
        assert await w.settle() == (ap.Committed(ap.Antichain(1)) if happened else ap.NotCommitted())


async def test_of_a_truncated_version_of_a_writer_that_is_gone_nothing_can_be_told() -> None:
    """Goal: then, and only then, the outcome stays unknown; the handle goes on."""
    async with rig() as r, r.client.writer("t", SCHEMA) as w:
        r.faults.fail_next(CAS, Outcome.LOST)
        r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await by_compare(w)
        from aiopersist.shard.attempt import Slot
        from aiopersist.state.writing import ExpireWriter

        async with r.honest.writer("t", SCHEMA) as other:
            await commit(shard_of(other).register, ExpireWriter(w.writer_id), Slot())
            await other.compare_and_append([], 1, 10)
            await _truncate_but_head(r, w)
            r.faults.heal()
            for _ in range(2):
                with pytest.raises(ap.Indeterminate):
                    await w.settle()
            await w.compare_and_append([("b", 1, 10, 1)], 10, 11)  # registers anew
            assert await w.settle() is None


async def test_a_registration_of_unknown_outcome_is_made_anew() -> None:
    """Goal: its version is gone, and nothing proves that it happened: a handle is opened all the same."""
    async with rig() as r, r.honest.writer("t", SCHEMA) as other:
        async with r.client.reader("t", SCHEMA):  # it knows the shard
            r.faults.fail_next(CAS, Outcome.DROPPED)
            r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
            opening = asyncio.ensure_future(r.client.writer("t", SCHEMA).__aenter__())
            while r.faults._next[CAS]:
                await asyncio.sleep(0)
            await other.compare_and_append([("a", 1, 0, 1)], 0, 1)
            await other.compare_and_append([("a", 1, 1, 1)], 1, 2)
            await _truncate_but_head(r, other)
            r.faults.heal()
            w = await opening
            await w.compare_and_append([("b", 1, 2, 1)], 2, 3)
            await w.aclose()


async def test_a_write_that_was_put_back_is_not_told_of_the_failure_of_others() -> None:
    """Goal: of two numbers of one application only the one that was sent has failed."""
    faults = Faults()
    consensus = FaultyConsensus(MemoryConsensus(""), faults)
    settings = ap.Settings(retry_timeout_s=0)
    async with ap.open(blob=MemoryBlob(""), consensus=consensus, settings=settings) as client:
        w = await client.writer("t", SCHEMA)
        faults.fail_next(CAS, Outcome.REFUSED)
        first, second = await asyncio.gather(
            w.write([("a", 1)], txn=("app", 1)), w.write([("b", 2)], txn=("app", 2)), return_exceptions=True
        )
        assert isinstance(first, ap.StorageUnavailable)
        assert second == 0
        async with client.reader("t", SCHEMA) as r, r.snapshot() as s:
            assert await s.rows() == [("b", 2, 1)]


@pytest.mark.parametrize("error", [ap.Indeterminate, OSError], ids=["of unknown outcome", "foreign"])
@in_virtual_time
async def test_a_version_is_not_sent_for_ever(error: type[Exception]) -> None:
    """Goal: with pauses, and until the retry limit; then the outcome is unknown, and can be settled."""
    sent = 0

    class Breaking(MemoryConsensus):
        async def compare_and_set(self, key: str, expected: int | None, data: bytes) -> bool:
            nonlocal sent
            if breaking:
                sent += 1
                raise error("lost")
            return await super().compare_and_set(key, expected, data)

    breaking = False
    settings = ap.Settings(retry_timeout_s=0.3)
    async with ap.open(blob=MemoryBlob(""), consensus=Breaking(""), settings=settings) as client:
        w = await client.writer("t", SCHEMA)
        breaking = True
        async with asyncio.timeout(50):
            with pytest.raises(ap.Indeterminate):
                await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
        assert 1 < sent < 20
        breaking = False
        assert await w.settle() == ap.NotCommitted()
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1)


async def test_settling_does_not_wait_for_the_writes_of_others() -> None:
    async with ap.open("mem://") as client:
        w = await client.writer("t", SCHEMA)
        stop = False

        async def keep_writing() -> None:
            while not stop:
                await w.write([("k", 1)])

        busy = [asyncio.create_task(keep_writing()) for _ in range(4)]
        await asyncio.sleep(0.05)
        mine = asyncio.create_task(w.write([("mine", 1)]))
        await asyncio.sleep(0)
        mine.cancel()
        await asyncio.wait([mine])
        async with asyncio.timeout(50):
            await w.settle()
        stop = True
        await asyncio.gather(*busy)
