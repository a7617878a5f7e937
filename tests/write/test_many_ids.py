"""Goal: the ids that a shard remembers, of batches built in other processes and of transactions, cost
other commits nothing, and are bounded: by a refusal, before any id is forgotten that makes an append
happen once."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import UsageKind
from aiopersist.shard.log import consensus_key
from aiopersist.state.ids import Ids
from aiopersist.state.model import TransactionRecord
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults
from tests.support.internals import shard_of, stack_of
from tests.support.processes import Clock
from tests.support.schemas import SCHEMA


async def built(client: ap.Client, told: bytes, time: int) -> bytes:
    async with client.workers.builder_from_transmittable(told, time) as builder:
        await builder.add("k", time, time, 1)
        return (await builder.finish(time + 1)).to_transmittable()


async def append_lent(client: ap.Client, w: Any, told: bytes, time: int) -> None:
    batch = await w.batch_from_transmittable(await built(client, told, time))
    await w.compare_and_append_batch([batch], time, time + 1)


async def size_of_last_diff(client: ap.Client, w: Any) -> int:
    state = shard_of(w).state
    (version,) = await stack_of(client).consensus.scan(consensus_key(state.shard), state.seqno, 1)
    return len(version.data)


async def test_an_append_writes_as_much_after_many_batches_of_a_lent_writer_as_after_few() -> None:
    async with ap.open("mem://", maintenance=False) as client, client.writer("s", SCHEMA) as w:
        told, sizes = w.to_transmittable(), []
        for time in range(150):
            await append_lent(client, w, told, time)
            sizes.append(await size_of_last_diff(client, w))
        assert max(sizes[100:]) < max(sizes[:50]) + 100
        await w.compare_and_append([("k", 1, 150, 1)], 150, 151)
        assert await size_of_last_diff(client, w) < max(sizes)


async def test_a_lent_writer_that_is_full_is_lent_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a builder is refused before anything is built; batches that were built before are appended; the
    handle has a new writer by then; and once it is unused, the full one goes with its ids."""
    monkeypatch.setattr("aiopersist.shard.registration.LENT_BATCHES_MAX", 3)
    clock = Clock(MemoryConsensus(), Faults())
    async with (
        ap.open(blob=MemoryBlob(), consensus=clock, maintenance=False) as client,
        client.writer("s", SCHEMA) as w,
    ):
        told, full = w.to_transmittable(), w.writer_id
        early = [await built(client, told, 3) for _ in range(2)]
        for time in range(3):
            await append_lent(client, w, told, time)
        with pytest.raises(ap.BatchExpired, match="transmit a new one"):
            await built(client, told, 3)
        await w.compare_and_append_batch([await w.batch_from_transmittable(data) for data in early], 3, 4)
        await w.compare_and_append([], 4, 5)
        again = w.to_transmittable()
        assert again != told
        await append_lent(client, w, again, 5)
        assert len(shard_of(w).state.consumed[full]) == 5
        clock.ahead_s += 3601
        await w.compare_and_append([], 6, 7)
        state = shard_of(w).state
        assert full not in state.writers
        assert full not in state.consumed
        assert w.writer_id in state.writers


# --- transactions ----------------------------------------------------------------------------------------


async def test_one_id_too_many_is_refused_and_forgets_nothing() -> None:
    settings = ap.Settings(txn_ids_max=2)
    async with ap.open("mem://", settings=settings) as client, client.writer("s", SCHEMA) as w:
        for n, app in enumerate(("a", "b")):
            await w.compare_and_append([("k", n, n, 1)], n, n + 1, txn=(app, 1))
        with pytest.raises(ap.InvalidUsage, match="txn_ids_max") as refused:
            await w.compare_and_append([("k", 2, 2, 1)], 2, 3, txn=("c", 1))
        assert (refused.value.kind, refused.value.txn) == (UsageKind.INVALID_TXN, ("c", 1))  # type: ignore[attr-defined]
        assert await w.fetch_recent_upper() == ap.Antichain(2)
        await w.compare_and_append([("k", 2, 2, 1)], 2, 3, txn=("a", 2))
        await w.compare_and_append([("k", 9, 3, 1)], 3, 4, txn=("b", 1))  # a repeat
        assert await w.fetch_recent_upper() == ap.Antichain(3)
        batch = await w.batch([("k", 3, 3, 1)], 3, 4)
        with pytest.raises(ap.InvalidUsage, match="txn_ids_max"):
            await w.compare_and_append_batch([batch], 3, 4, txn=("c", 1))
        await w.compare_and_append_batch([batch], 3, 4)


async def test_writes_that_share_a_commit_fail_alone_where_there_is_no_room_for_their_ids() -> None:
    settings = ap.Settings(txn_ids_max=3)
    async with ap.open("mem://", settings=settings) as client, client.writer("s", SCHEMA) as w:
        await w.write([("k", 0)], txn=("old", 1))
        calls = [w.write([("k", 1)]), w.write([("k", 2)], txn=("old", 2))]
        calls += [w.write([("k", n)], txn=(f"new-{n}", 1)) for n in range(3, 7)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, ap.InvalidUsage) for one in done] == [False] * 4 + [True] * 2
        async with client.reader("s") as r, r.snapshot() as contents:
            assert sorted(val for _, val, _ in await contents.rows()) == [0, 1, 2, 3, 4]
        assert set(shard_of(w).state.transactions) == {"old", "new-3", "new-4"}


async def test_ids_are_forgotten_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: with the rollup, the ids that were unused for so long; no version drops more than a slice."""
    monkeypatch.setattr("aiopersist.gc.rollup.FORGOTTEN_AT_ONCE", 50)
    settings = ap.Settings(txn_retention_s=1000.0)
    async with (
        ap.open("mem://", maintenance=False, settings=settings) as client,
        client.writer("s", SCHEMA) as w,
    ):
        now = await stack_of(client).consensus.now()
        register = shard_of(w).register
        apps = {f"app-{n}": TransactionRecord(1, now - (2000.0 if n < 120 else 0.0)) for n in range(200)}
        register.state = shard_of(w).state.replace(transactions=Ids(apps))
        before = shard_of(w).state.seqno
        await client._services.maintenance.of(shard_of(w)).roll_up()
        assert set(shard_of(w).state.transactions) == {f"app-{n}" for n in range(120, 200)}
        versions = await stack_of(client).consensus.scan(consensus_key(w.shard_id), before + 1, 100)
        assert max(version.data.count(b"app-") for version in versions) == 50
