"""Goal: background work that meets an unforeseen exception waits, longer each time; it writes nothing
meanwhile, the failure is counted, and the log shows once where it was.

What is unforeseen is put in place of a function of the library: no input is known that raises there.
"""

import asyncio
import logging
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base import runtime
from aiopersist.base.failures import LOG_EVERY_S, Backoff, Failures
from tests.support.internals import stack_of
from tests.support.schemas import SCHEMA
from tests.support.virtual import in_virtual_time, played

HASTY = ap.Settings(compaction_idle_s=0.05, compaction_inputs_min=2)


class Unforeseen(Exception):
    """What no `except` of the library names."""


class Still(runtime.Runtime):
    """Moves by its sleeps alone."""

    def __init__(self) -> None:
        self.at = 0.0

    def monotonic(self) -> float:
        return self.at

    async def sleep(self, seconds: float) -> None:
        self.at += seconds


def unforeseen(monkeypatch: Any, target: str) -> Counter[str]:
    """Make the function raise; how often it did."""
    calls = Counter[str]()

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls["calls"] += 1
        raise Unforeseen(target)

    monkeypatch.setattr(target, fail)
    return calls


@pytest.mark.parametrize(
    ("target", "keep"),
    [
        ("aiopersist.compact.local.rewrite", None),
        ("aiopersist.maintenance.shard.plan", None),
        ("aiopersist.maintenance.shard.ApplyRetention", timedelta(seconds=0.2)),
        ("aiopersist.maintenance.shard.can_collect", timedelta(seconds=0.2)),
        ("aiopersist.maintenance.background.due", None),
    ],
)
def test_maintenance_waits(monkeypatch: Any, caplog: Any, target: str, keep: Any) -> None:
    """Goal: in most of a minute at rest a job is tried a few times; few versions, few lines."""
    caplog.set_level(logging.WARNING, "aiopersist")

    async def rest() -> None:
        began = asyncio.get_running_loop().time()
        async with ap.open("mem://", settings=HASTY) as client, client.writer("t", SCHEMA) as w:
            await client.admin.retain("t", keep)
            calls = unforeseen(monkeypatch, target)
            for time in range(12):
                await w.compare_and_append([("a", time, time, 1)], time, time + 1)
            await asyncio.sleep(1.0)
            before, tried = (await client.admin.inspect("t")).seqno, calls["calls"]
            await asyncio.sleep(50.0)
            assert calls["calls"] - tried < 60
            assert (await client.admin.inspect("t")).seqno - before < 60
            passed = asyncio.get_running_loop().time() - began
            lines = Counter(record.getMessage().partition(" failed")[0] for record in caplog.records)
            assert all(count <= 1 + passed / LOG_EVERY_S for count in lines.values()), lines
            assert stack_of(client).supervisor.failures.count >= calls["calls"] > 0

    played(0, rest)


async def test_a_round_tends_the_other_shards(monkeypatch: Any) -> None:
    from aiopersist.maintenance.shard import ShardMaintenance

    moved = ShardMaintenance.move_since

    async def fails(self: ShardMaintenance, *, exact: bool) -> None:
        if self.shard.state.retention[0].times == 3:
            raise Unforeseen
        await moved(self, exact=exact)

    async with ap.open("mem://", maintenance=False) as client:
        for name, keep in (("bad", 3), ("good", 2)):
            async with client.writer(name, SCHEMA) as w:
                await w.compare_and_append([("a", 1, 0, 1)], 0, 20)
                await client.admin.retain(name, keep)
        monkeypatch.setattr(ShardMaintenance, "move_since", fails)
        done = await client.admin.maintain()
        assert [text.split(":")[0] for text in done.failures.values()] == ["Unforeseen"]
        assert (await client.admin.inspect("good")).since == ap.Antichain(18)


@in_virtual_time
async def test_a_heartbeat_is_repeated(monkeypatch: Any) -> None:
    """Goal: the registration outlives a heartbeat that met a bug."""
    from aiopersist.shard.registration import Registration

    beat, calls = Registration._heartbeat, Counter[str]()

    async def fails_first(self: Registration) -> None:
        calls["calls"] += 1
        if calls["calls"] == 1:
            raise Unforeseen
        await beat(self)

    monkeypatch.setattr(Registration, "_heartbeat", fails_first)
    settings = ap.Settings(writer_lease_s=2.0)
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        async with client.writer("t", SCHEMA) as w:
            before = (await client.admin.inspect("t")).writers[w.writer_id].heartbeat
            async with asyncio.timeout(50):
                while (await client.admin.inspect("t")).writers[w.writer_id].heartbeat == before:
                    await asyncio.sleep(0.05)
    assert calls["calls"] >= 2


async def test_who_waits_hears_of_it(monkeypatch: Any) -> None:
    """Goal: a follower that meets a bug tells its waiters; it does not leave them waiting for ever."""
    settings = ap.Settings(watch_timeout_s=0.1)
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        async with client.writer("t", SCHEMA) as w:
            waiting = asyncio.create_task(w.wait_for_upper_past(5))
            await asyncio.sleep(0.01)
            with monkeypatch.context() as patch, pytest.raises(Unforeseen):
                unforeseen(patch, "aiopersist.shard.register.decode_commit")
                async with asyncio.timeout(50):
                    await waiting


def test_a_step_of_an_indexed_waits(monkeypatch: Any) -> None:
    """Goal: neither a drain nor a compaction that meets a bug is tried in a busy loop."""

    async def rest() -> None:
        settings = ap.Settings(indexed_step_s=0.02)
        async with ap.open("mem://", settings=settings) as client, client.indexed("x") as ix:
            stream = await ix.register("s", str, int)
            for time in range(6):
                await ix.write([(stream, [("a", time, time, 1)])])
                await ix.seal([stream], time + 1)
                await ix.step()
            with monkeypatch.context() as patch:
                calls = unforeseen(patch, "aiopersist.indexed.work.compact")
                await ix.allow_compaction([(stream, 6)])
                await asyncio.sleep(20.0)
                assert 1 <= calls["calls"] < 60
            async with asyncio.timeout(50):
                while ix.counters()["compactions"] < 1:
                    await asyncio.sleep(0.01)

    played(0, rest)


def test_a_kind_is_logged_once_per_interval(caplog: Any) -> None:
    clock = Still()
    failures = Failures(clock)
    for _ in range(100):
        failures.report("this", Unforeseen("why"))
        failures.report("that", Unforeseen("why"))
        failures.report("this", ap.Corruption("why"))
    assert (failures.count, len(caplog.records)) == (300, 3)
    assert [record.exc_info is not None for record in caplog.records] == [True, True, False]
    clock.at += LOG_EVERY_S
    failures.report("this", Unforeseen("why"))
    assert caplog.records[-1].getMessage().endswith("(99 more since the last line)")


async def test_a_backoff_grows_and_begins_anew() -> None:
    clock = Still()
    backoff = Backoff(Failures(clock), "a loop")

    async def rests() -> float:
        began = clock.at
        await backoff.failed(Unforeseen())
        return clock.at - began

    first = await rests()
    for _ in range(20):
        last = await rests()
    assert first <= 0.004 and 8 <= last <= 16
    backoff.succeeded()
    assert await rests() <= 0.004
