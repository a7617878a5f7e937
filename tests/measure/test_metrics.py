"""Goal: the view says what a client did, in numbers that can be checked one by one, and nothing when off."""

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.measure.metrics import Latencies, Metrics
from aiopersist.measure.view import BOUNDS_S, Histogram, MetricsView
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.shards import until

SCHEMA = ap.Schema(key=str, val=int)


class Scene:
    """A location in memory, whose stores fail as told."""

    def __init__(self) -> None:
        name = uuid.uuid4().hex
        self.faults = Faults()
        self.blob = FaultyBlob(MemoryBlob(name), self.faults)
        self.consensus = FaultyConsensus(MemoryConsensus(name), self.faults)

    def open(self, **settings: Any) -> Any:
        given = ap.Settings(watch_timeout_s=0.05, **settings)
        return ap.open(blob=self.blob, consensus=self.consensus, settings=given, maintenance=False)


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.fixture
async def client(scene: Scene) -> AsyncIterator[ap.Client]:
    async with scene.open() as opened:
        yield opened


@pytest.mark.several_shards
async def test_changes_of_a_stash_are_counted_once_they_are_durable(location: Any) -> None:
    given = {"blob": location.blob, "consensus": location.consensus, "maintenance": False}
    async with ap.open(**given) as client, client.stash() as stash:
        settings = ap.stash.TypedCollection("settings", str, str)
        await settings.upsert_key(stash, "theme", "dark")
        before = client.metrics().stash
        for theme in ("light", "dark", "light"):
            await settings.upsert_key(stash, "theme", theme)
        held = await stash.collection("settings", str, str)
        (upper,) = (await stash.upper(held)).elements
        with pytest.raises(ap.stash.StashError):
            await stash.update_many(held, [(("theme", "late"), upper - 1, 1)])
        after = client.metrics().stash
        assert after.count - before.count == 3
        assert after.seconds > before.seconds
    off = ap.Settings(metrics=False)
    async with ap.open(**given, settings=off) as client, client.stash() as stash:
        await settings.upsert_key(stash, "theme", "dark")
        assert client.metrics().stash.count == 0


async def test_appends_commits_and_requests_agree(client: ap.Client) -> None:
    async with client.writer("s", SCHEMA) as w:
        before = client.metrics()
        for time in range(5):
            await w.compare_and_append([(f"k{n}", n, time, 1) for n in range(3)], time, time + 1)
        after = client.metrics()
    assert after.appends - before.appends == 5
    assert after.rows - before.rows == 15
    assert after.commits.count - before.commits.count == 5
    assert after.versions - before.versions == 5
    sent = after.requests["consensus.compare_and_set"], before.requests["consensus.compare_and_set"]
    assert sent[0].count - sent[1].count == 5 == sent[0].duration.count - sent[1].duration.count
    assert sent[0].bytes > sent[1].bytes
    assert (after.mismatches, after.refusals, after.lost_answers, after.stalls, after.failures) == (0,) * 5


async def test_a_commit_of_two_shards_is_one_commit_and_two_versions(client: ap.Client) -> None:
    async with client.writer("a", SCHEMA) as a, client.writer("b", SCHEMA) as b:
        before = client.metrics()
        await client.compare_and_append_many(
            [ap.Append(a, [("k", 1, 0, 1)], 0, 1), ap.Append(b, [("k", 1, 0, 1)], 0, 1)]
        )
        after = client.metrics()
    assert after.commits.count - before.commits.count == 1
    assert after.versions - before.versions == 2 == after.appends - before.appends


async def test_a_lost_race_is_a_mismatch_and_what_the_state_refuses_a_refusal(
    scene: Scene, client: ap.Client
) -> None:
    async with scene.open() as other, client.writer("s", SCHEMA) as ours, other.writer("s", SCHEMA) as theirs:
        await ours.fetch_recent_upper()
        before = client.metrics()
        await theirs.compare_and_append([], 0, 1)  # this client does not know of it
        await ours.write([("k", 1)])
        after = client.metrics()
        assert after.mismatches - before.mismatches == 1
        assert after.commits.count - before.commits.count == 1
        batch = await ours.batch([("k", 1, 5, 1)], 5, 6)
        with pytest.raises(ap.UpperMismatch):
            await ours.compare_and_append_batch([batch], 5, 6)
        assert client.metrics().refusals - after.refusals == 1
        await batch.delete()


async def test_retries_errors_and_lost_answers(scene: Scene, client: ap.Client) -> None:
    async with client.writer("s", SCHEMA) as w:
        scene.faults.fail_next("head", Outcome.REFUSED, times=2)
        await w.fetch_recent_upper()
        found = client.metrics().requests["consensus.head"]
        assert (found.errors, found.retries) == (2, 2)
        scene.faults.fail_next("compare_and_set", Outcome.LOST)
        await w.compare_and_append([("k", 1, 0, 1)], 0, 1)
        view = client.metrics()
        assert view.lost_answers == 1 == view.appends
        assert view.requests["consensus.compare_and_set"].errors == 1
        assert view.requests["consensus.compare_and_set"].retries == 0


async def test_the_cache_counts_hits_and_misses(scene: Scene) -> None:
    async with scene.open(inline_writes_single_max_bytes=0) as client, client.writer("s", SCHEMA) as w:
        await w.write([(f"k{n}", n) for n in range(100)])
        async with client.reader("s", SCHEMA) as reader:
            for _ in range(3):
                async with reader.snapshot() as snapshot:
                    await snapshot.rows()
        view = client.metrics()
        reads = [view.requests[op].count for op in ("blob.get", "blob.get_range") if op in view.requests]
        assert view.cache.misses == sum(reads) > 0
        assert view.cache.hits == 2 * view.cache.misses
        assert 0 < view.cache.bytes < view.cache.bytes_max == client._stack.settings.blob_cache_bytes
        assert view.requests["blob.set"].bytes > 0


async def test_long_work_is_counted_and_its_failures_apart(scene: Scene, client: ap.Client) -> None:
    async with client.writer("s", SCHEMA) as w:
        for n in range(4):
            await w.write([("k", n)])
        await client.admin.force_compaction("s")
        await client.admin.force_gc("s")
        view = client.metrics()
        assert view.compactions.duration.count == 1
        assert view.collections.duration.count == 1
        assert (view.compactions.failures, view.compactions.running) == (0, 0)


async def test_a_compaction_that_fails_is_a_failure(scene: Scene) -> None:
    async with scene.open(retry_timeout_s=0.01, inline_writes_single_max_bytes=0) as client:
        async with client.writer("s", SCHEMA) as w:
            for n in range(2):
                await w.write([("k", n)])
            scene.faults.fail_next("set", Outcome.REFUSED, times=1000)
            with pytest.raises(ap.StorageUnavailable):
                await client.admin.force_compaction("s")
            scene.faults.heal()
        assert client.metrics().compactions.failures == 1
        assert client.metrics().compactions.duration.count == 0


async def test_queues_and_handles_are_those_of_now(scene: Scene, client: ap.Client) -> None:
    async with client.writer("s", SCHEMA) as w, client.reader("s", SCHEMA, hold=0):
        gate = asyncio.Event()
        inner = scene.consensus.inner

        class Slow(type(inner)):  # type: ignore[misc]
            async def compare_and_set(self, *args: Any) -> bool:
                await gate.wait()
                return bool(await super().compare_and_set(*args))

        inner.__class__ = Slow
        waiting = asyncio.ensure_future(w.wait_for_upper_past(5))
        writes = [asyncio.ensure_future(w.write([("k", n)])) for n in range(8)]
        await until(lambda: client.metrics().requests["consensus.compare_and_set"].in_flight == 1)
        writes += [asyncio.ensure_future(w.write([("k", n)])) for n in range(3)]
        await until(lambda: client.metrics().queues.writes == 3)
        view = client.metrics()
        assert view.queues.waiters == 1
        assert (view.handles.writers, view.handles.holds, view.handles.readers) == (1, 1, 0)
        gate.set()
        await asyncio.gather(*writes)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert client.metrics().queues.writes == 0
    assert client.metrics().handles.writers == 0


async def test_heartbeats_are_counted(scene: Scene) -> None:
    async with scene.open(writer_lease_s=0.2) as client, client.writer("s", SCHEMA):
        await until(lambda: client.metrics().leases.heartbeats >= 2)
        assert client.metrics().leases.lost == 0


async def test_a_lost_lease_is_counted(scene: Scene) -> None:
    async with scene.open(writer_lease_s=0.2) as client, client.writer("s", SCHEMA):
        await client.admin.drop("s")
        await until(lambda: client.metrics().leases.lost == 1)


@pytest.mark.parametrize("lost", [Outcome.LOST, Outcome.REFUSED])
async def test_nothing_is_counted_when_it_is_off(scene: Scene, lost: Outcome) -> None:
    """Goal: no wrapper counts, and the calls are the same."""
    async with scene.open(metrics=False) as client, client.writer("s", SCHEMA) as w:
        scene.faults.fail_next("compare_and_set", lost)
        await w.write([("k", 1)])
        await client.admin.force_compaction("s")
        view = client.metrics()
        assert not view.enabled
        assert dict(client.metrics) == {} == view.requests
        assert client.metrics["blob.get"].count == 0
        untold = ("age_s", "client", "enabled", "cache", "handles", "queues")
        assert view.model_dump(exclude=set(untold)) == MetricsView().model_dump(exclude=set(untold))
        assert view.handles.writers == 1


async def test_the_environment_turns_it_off(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOPERSIST_METRICS", "false")
    async with scene.open() as client:
        assert not client.metrics().enabled


async def test_the_view_is_frozen_and_has_a_json_form(client: ap.Client) -> None:
    await client.list_shards()
    view = client.metrics()
    with pytest.raises(ValueError, match="frozen"):
        view.appends = 1  # type: ignore[misc]
    assert MetricsView.model_validate_json(view.model_dump_json()) == view
    assert json.loads(view.model_dump_json())["requests"]["consensus.list_keys"]["duration"]["count"] == 1
    later = client.metrics()
    await client.list_shards()
    assert later.requests["consensus.list_keys"].count == 1


async def test_any_thread_may_ask(client: ap.Client) -> None:
    """Goal: an exporter's thread gets views while the loop opens and closes shards."""
    views, ended = [], threading.Event()

    def ask() -> None:
        while not ended.is_set():
            views.append(client.metrics())

    asking = asyncio.create_task(asyncio.to_thread(ask))
    for n in range(40):
        async with client.writer(f"s{n}", SCHEMA) as w:
            await w.write([("k", n)])
    ended.set()
    await asking
    assert client.metrics().appends == 40
    counts = [view.appends for view in views]
    assert counts == sorted(counts)


async def test_clients_of_a_process_have_names_of_their_own(scene: Scene) -> None:
    async with scene.open() as one, scene.open() as two:
        taken = one.metrics().client
        assert two.metrics().client not in ("", taken)
        async with scene.open(client_name="orders") as three, scene.open(client_name="orders") as four:
            assert (three.metrics().client, four.metrics().client) == ("orders", "orders-2")
    async with scene.open(client_name="orders") as again:
        assert again.metrics().client == "orders"
    async with scene.open() as again:
        assert again.metrics().client == taken


def test_a_name_is_freed_once() -> None:
    one, two = Metrics(lambda: 0.0), Metrics(lambda: 0.0)
    one.begin("freed")
    one.end()
    two.begin("freed")
    one.end()
    one.begin("freed")
    assert (one.name, two.name) == ("freed-2", "freed")


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [
        (0.0, 0),
        (BOUNDS_S[0], 0),
        (BOUNDS_S[0] * 1.001, 1),
        (BOUNDS_S[7], 7),
        (BOUNDS_S[-1], len(BOUNDS_S) - 1),
        (1e6, len(BOUNDS_S)),
    ],
)
def test_the_bucket_of_a_duration(seconds: float, bucket: int) -> None:
    latencies = Latencies()
    latencies.add(seconds)
    view = latencies.view()
    assert view.buckets[bucket] == 1 == view.count == latencies.count
    assert view.seconds == seconds


def test_quantiles_are_bounds_of_buckets() -> None:
    latencies = Latencies()
    for _ in range(99):
        latencies.add(0.00015)
    latencies.add(3.0)
    view = latencies.view()
    assert view.quantile_s(0.5) == view.quantile_s(0.99) == 0.0002
    assert 3.0 <= view.quantile_s(1.0) < 6.0
    assert view.quantile_s(0.0) == 0.0002
    assert view.mean_s == pytest.approx((99 * 0.00015 + 3) / 100)
    assert Histogram().quantile_s(0.5) == 0.0 == Histogram().mean_s
    with pytest.raises(ValueError, match="not between 0 and 1"):
        view.quantile_s(99)
