"""Consensus on objects: its versions, its names, buckets that cannot be used, and whole locations."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from itertools import islice
from urllib.parse import urlsplit

import pytest

import aiopersist as ap
from aiopersist.base.errors import Corruption, Indeterminate, InvalidLocation, StorageUnavailable, Unsupported
from aiopersist.base.runtime import Runtime
from aiopersist.storage.consensus import Entry, Versioned
from aiopersist.storage.objects.bucket import Object, Tagged
from aiopersist.storage.objects.consensus import ObjectsConsensus, delays_of_polls
from aiopersist.storage.objects.names import (
    SEQNO_MAX,
    floor_name,
    floor_of,
    folder_of,
    is_hashed,
    key_of,
    version_name,
    version_of,
)
from aiopersist.storage.objects.recent import KEYS_MAX
from aiopersist.testing import servers
from aiopersist.testing.proxy import TcpProxy
from aiopersist.testing.storage.heads import grow, numbered
from tests.storage.objects_kit import Objects, Place, World
from tests.support.location import both_in_a_bucket
from tests.support.obstore_s3 import by_obstore

# --- versions ------------------------------------------------------------------------------------


async def test_a_version_that_was_read_counts_only_if_it_is_the_head(place: Place) -> None:
    """Goal: what won the race may have been followed, truncated, or replaced by what was late."""
    one, _ = place.handle()
    other, calls = place.handle()
    await grow(one, "k", 2)
    await other.head("k")
    assert await one.compare_and_set("k", 1, b"2")
    assert await other.compare_and_set("k", 1, b"x") is False
    assert await one.compare_and_set("k", 2, b"3")
    calls.calls.clear()
    assert await other.head("k") == Versioned(3, b"3")
    assert calls.calls == {"list": 1, "get": 1}
    name = folder_of("k") + version_name(2)
    place.world.stored[folder_of("k") + version_name(3)] = place.world.stored.pop(name)._replace(tag="other")
    assert await other.head("k") == Versioned(3, b"2")


async def test_who_does_not_know_the_head_reads_it_first(place: Place) -> None:
    """Goal: what was known some time ago may be truncated, and a creation would leave an orphan."""

    class Later(Runtime):
        ahead_s = 0.0

        def monotonic(self) -> float:
            return super().monotonic() + self.ahead_s

    runtime = Later()
    slow, calls = place.handle(runtime)
    await grow(slow, "k", 2)
    fast, _ = place.handle()
    for seqno in range(1, 9):
        assert await fast.compare_and_set("k", seqno, b"%d" % (seqno + 1))
    assert await fast.truncate("k", 9) == 9
    runtime.ahead_s = 60.0
    calls.calls.clear()
    assert await slow.compare_and_set("k", 1, b"x") is False
    assert calls.calls["create"] == 0
    assert sorted(name for name in place.world.stored if "/v/" in name) == [folder_of("k") + version_name(9)]


async def test_an_orphan_is_of_unknown_outcome_and_is_collected(place: Place) -> None:
    """Goal: who slept after it knew the head creates a version that was truncated: nobody reads it."""
    slow, _ = place.handle()
    await grow(slow, "k", 2)
    fast, _ = place.handle()
    for seqno in range(1, 9):
        assert await fast.compare_and_set("k", seqno, b"%d" % (seqno + 1))
    assert await fast.truncate("k", 9) == 9
    with pytest.raises(Indeterminate, match="truncated"):
        await slow.compare_and_set("k", 1, b"orphan")
    assert folder_of("k") + version_name(2) in place.world.stored
    for handle in (slow, fast, place.handle()[0]):
        assert await handle.scan("k", 0, 100) == numbered([9])
        assert await handle.scan("k", 0, 1) == numbered([9])
        assert await handle.head("k") == Versioned(9, b"9")
    assert await fast.truncate("k", 9) == 0
    assert folder_of("k") + version_name(2) not in place.world.stored


async def test_a_head_that_a_list_shows_below_the_floor_has_moved(place: Place) -> None:
    """Goal: a list takes time. It may pass where the head is not yet, and then show an orphan of the seqno
    that was known."""
    one, _ = place.handle()
    await grow(one, "k", 10)
    assert await one.truncate("k", 9) == 9
    place.world.stored[folder_of("k") + version_name(2)] = Object(b"sleeper\n2", "orphan")
    slow, calls = place.handle()
    find = calls.inner.find

    async def passed_too_early(prefix: str, *, after: str = "", limit: int | None = None) -> list[Tagged]:
        calls.inner.find = find  # type: ignore[method-assign]
        return [each for each in await find(prefix, after=after) if version_name(9) not in each.name]

    calls.inner.find = passed_too_early  # type: ignore[method-assign]
    assert await slow.heads({"k": 2}) == {"k": Versioned(9, b"9")}


@pytest.mark.parametrize("error", [StorageUnavailable("gone"), Indeterminate("gone")], ids=repr)
async def test_a_creation_that_cannot_be_confirmed_is_of_unknown_outcome(
    place: Place, error: Exception
) -> None:
    """Goal: also where the list alone surely changed nothing: the version is there."""
    one, calls = place.handle()
    await grow(one, "k", 1)
    calls.fails["list"] = error
    with pytest.raises(Indeterminate):
        await one.compare_and_set("k", 0, b"1")
    assert await place.handle()[0].head("k") == Versioned(1, b"1")


async def test_what_surely_was_not_created_is_told_so(place: Place) -> None:
    one, calls = place.handle()
    await grow(one, "k", 1)
    calls.fails["create"] = StorageUnavailable("409 ConditionalRequestConflict")
    with pytest.raises(StorageUnavailable):
        await one.compare_and_set("k", 0, b"1")
    assert await one.compare_and_set("k", 0, b"1")


async def test_a_refusal_that_took_long_may_come_too_late(place: Place) -> None:
    """Goal: a driver sends a creation twice. The first copy counts, and is truncated; the second finds what
    somebody has left who slept, and is refused: `False` would say that the first one did not count."""

    class Slow(Runtime):
        now_s = 0.0

        def monotonic(self) -> float:
            return self.now_s

    runtime = Slow()
    slow, calls = place.handle(runtime)
    await grow(slow, "k", 2)
    fast, _ = place.handle()
    create = calls.inner.create

    async def sent_twice(name: str, data: bytes) -> str | None:
        assert await create(name, data) is not None
        for seqno in range(2, 6):
            await fast.head("k")
            assert await fast.compare_and_set("k", seqno, b"%d" % (seqno + 1))
        assert await fast.truncate("k", 5) == 5
        place.world.stored[name] = Object(b"sleeper\n2", "orphan")
        runtime.now_s += 60.0
        return await create(name, data)

    calls.inner.create = sent_twice  # type: ignore[method-assign]
    with pytest.raises(Indeterminate, match="truncated"):
        await slow.compare_and_set("k", 1, b"2")


async def test_a_refusal_because_of_nothing_is_of_unknown_outcome(place: Place) -> None:
    """Goal: `False` would say that there is a newer head."""
    one, calls = place.handle()
    await grow(one, "k", 1)

    async def refuses(name: str, data: bytes) -> str | None:
        return None

    calls.inner.create = refuses  # type: ignore[method-assign]
    with pytest.raises(Indeterminate, match="it is not"):
        await one.compare_and_set("k", 0, b"1")


async def test_a_truncation_that_breaks_off_is_finished_by_the_next(place: Place) -> None:
    one, calls = place.handle()
    await grow(one, "k", 5)
    calls.fails["delete"] = StorageUnavailable("gone")
    with pytest.raises(StorageUnavailable):
        await one.truncate("k", 4)
    other, _ = place.handle()
    assert await other.scan("k", 0, 100) == numbered([4])
    assert await other.truncate("k", 2) == 0
    assert len(place.world.stored) == 2, "the last version, and its floor"


async def test_several_keys_at_once_are_refused_and_nothing_is_sent(place: Place) -> None:
    one, calls = place.handle()
    with pytest.raises(Unsupported, match="one shard at a time"):
        await one.compare_and_set_many([Entry("a", None, b""), Entry("b", None, b"")])
    assert await one.compare_and_set_many([]) is True
    assert calls.calls == {}


async def test_an_object_that_is_no_version(place: Place) -> None:
    one, _ = place.handle()
    await grow(one, "k", 1)
    place.world.stored[folder_of("k") + version_name(1)] = Object(b"rubbish", "tag")
    with pytest.raises(Corruption, match=version_name(1)):
        await one.head("k")


@pytest.mark.parametrize("name", ["v/README", "v/.keep", "v/-1", "x/README", "x/1_0", "x/ffffffffffffffff"])
async def test_an_object_of_another_is_named(name: str, place: Place) -> None:
    """Goal: what something else has written among versions and floors is told by its name, and stays; a
    version that is created beside it is of unknown outcome."""
    one, _ = place.handle()
    await grow(one, "k", 3)
    other = folder_of("k") + name
    place.world.stored[other] = Object(b"", "tag")
    calls = [one.truncate("k", 2)]
    if name.startswith("x/") or name < "v/7":
        calls += [one.head("k"), one.heads({"k": None})]
    if name.startswith("x/"):
        calls += [one.scan("k", 0, 9)]
    for call in calls:
        with pytest.raises(Corruption, match=re.escape(repr(other))):
            await call
    if name.startswith("x/"):
        with pytest.raises(Indeterminate, match=re.escape(repr(other))):
            await one.compare_and_set("k", 2, b"3")
    assert other in place.world.stored


async def test_what_is_known_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.storage.objects.heads.KNOWN_MAX", 10)
    one, _ = place.handle()
    for number in range(30):
        await grow(one, f"k{number}", 2)
    assert len(one._heads) == 10
    other, _ = place.handle()
    for number in range(KEYS_MAX + 5):
        await grow(one, f"w{number}", 1)
        await other.head(f"w{number}")
        assert await one.compare_and_set(f"w{number}", 0, b"1")
        assert await other.compare_and_set(f"w{number}", 0, b"x") is False
    assert len(other._recent) == KEYS_MAX
    assert await one.compare_and_set("k3", 1, b"2")


def test_a_watch_slows_down() -> None:
    delays = list(islice(delays_of_polls(1.0), 8))
    assert delays == pytest.approx([1, 1.5, 2.25, 3.375, 5.0625, 7.59375, 10, 10])


async def test_a_commit_of_its_own_handle_wakes_a_watch_at_once(place: Place) -> None:
    one, calls = place.handle()
    one._poll_s = 3600.0
    await grow(one, "k", 1)
    calls.calls.clear()
    waiting = asyncio.ensure_future(one.watch("k"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    assert await one.compare_and_set("k", 0, b"1")
    await waiting
    assert calls.calls == {"create": 1, "list": 1}, "it did not poll"


# --- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seqno", [0, 1, 15, 16, 2**40, SEQNO_MAX])
def test_versions_descend_and_floors_rise(seqno: int) -> None:
    assert version_of("kx/" + version_name(seqno)) == seqno
    assert floor_of("kx/" + floor_name(seqno)) == seqno
    if seqno < SEQNO_MAX:
        assert version_name(seqno) > version_name(seqno + 1)
        assert floor_name(seqno) < floor_name(seqno + 1)


@pytest.mark.parametrize(
    "key", ["a", "..", ".", "a/b", "%2F", "größe/日本", "k" * 199, "k" * 200, "é" * 1000], ids=len
)
def test_a_folder_is_one_component_of_legal_length(key: str) -> None:
    folder = folder_of(key)
    assert folder.endswith("/") and "/" not in folder[:-1]
    assert len(folder) < 255 and folder.isascii() and folder[:-1] not in (".", "..")
    assert is_hashed(folder) or key_of(folder.rstrip("/")) == key


# --- buckets that cannot be used -----------------------------------------------------------------


class Overwriting(Objects):
    """Knows no conditions."""

    def _put(self, name: str, data: bytes) -> str | None:
        self.stored.pop(name, None)
        return super()._put(name, data)


async def test_a_bucket_that_ignores_conditions_is_refused() -> None:
    world = World({})
    consensus = ObjectsConsensus(Overwriting(world))
    with pytest.raises(InvalidLocation, match="If-None-Match"):
        await ap.open(blob="mem://", consensus=consensus)
    assert [name for name in world.stored if "/" in name] == []


async def test_a_bucket_is_checked_once(place: Place) -> None:
    """By the first client thoroughly, by the others with two requests."""
    for expected in ({"create": 10, "get": 1, "delete": 1}, {"create": 1, "get": 1}):
        consensus, calls = place.handle()
        await consensus.check()
        await consensus.check()
        assert calls.calls == expected


@pytest.fixture
def moto(_s3_pool: dict[str, servers.S3Server]) -> servers.S3Server:
    """No real server takes what a gateway has changed, since requests are signed."""
    return _s3_pool["moto"]


@pytest.fixture
async def careless(moto: servers.S3Server) -> AsyncIterator[str]:
    """The URL of a place in a bucket behind a gateway that strips conditions from requests."""
    endpoint = urlsplit(moto.endpoint)
    async with TcpProxy(str(endpoint.hostname), int(endpoint.port or 80)) as proxy:
        header = re.compile(rb"if-none-match:", re.IGNORECASE)
        proxy.changed = lambda data: header.sub(b"x-none-match-:", data)
        yield moto.url(uuid.uuid4().hex, endpoint=f"http://{proxy.host}:{proxy.port}")


async def test_a_gateway_that_strips_conditions_is_refused(careless: str) -> None:
    for url in (careless, by_obstore(careless.replace("?", "-2?"))):
        with pytest.raises(InvalidLocation, match="If-None-Match"):
            await ap.open(url)
    blob, _ = both_in_a_bucket(careless)
    async with ap.open(blob=blob, consensus="mem://") as client:  # with another consensus store it will do
        await client.ping()


# --- whole locations -----------------------------------------------------------------------------


BUCKETS = {"s3": "best_s3_url", "obstore": "best_s3_url", "az": "azure_url", "gs": "gcs_url"}


@pytest.fixture(params=BUCKETS)
def bucket_url(request: pytest.FixtureRequest) -> str:
    """An empty place in each kind of bucket."""
    url: str = request.getfixturevalue(BUCKETS[request.param])
    return by_obstore(url) if request.param == "obstore" else url


async def test_a_bucket_is_a_whole_location(bucket_url: str) -> None:
    """Goal: append, read, listen, a table, a transaction; another client sees all of it."""
    schema = ap.Schema(key=str, val=int)
    url = f"{bucket_url}&poll_s=0.05"
    async with ap.open(url) as client, ap.open(url) as other:
        async with client.writer("t", schema) as w, other.reader("t", schema) as r:
            listening = await r.listen()
            await w.compare_and_append([("a", 1, 0, 1)], 0, 1)
            async with asyncio.timeout(30):
                step = await anext(listening.steps())
            assert step.updates.rows() == [("a", 1, 0, 1)]
            await listening.aclose()
        table, again = client.table("u", key=str, val=int), other.table("u", key=str, val=int)

        async def twice(tx: ap.Transaction) -> None:
            tx.put(table, "k", 2 * (await tx.get(table, "k") or 0))

        await table.put("k", 4)
        await client.transact(twice)
        assert await again.get("k") == 8
        assert (await other.fsck("t")).ok
        with pytest.raises(Unsupported, match="Postgres"):
            await client.stash()


@pytest.mark.parametrize(
    "bucket_url",
    ["s3", "az", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("obstore", "gs"))],
    indirect=True,
)
async def test_clients_race_for_one_shard(bucket_url: str) -> None:
    """Goal: nothing is lost, nothing is there twice."""
    schema, url = ap.Schema(key=str, val=int), f"{bucket_url}&poll_s=0.05"

    async def work(name: str) -> None:
        async with ap.open(url) as client, client.writer("t", schema) as w:
            for number in range(10):
                await w.write([(name, number)])

    await asyncio.gather(*(work(f"w{n}") for n in range(4)))
    async with ap.open(url, readonly=True) as client, client.reader("t") as r, r.snapshot() as s:
        found = sorted((key, val, diff) for key, val, diff in await s.rows())
    assert found == [(f"w{n}", number, 1) for n in range(4) for number in range(10)]
