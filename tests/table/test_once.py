"""Doing a thing once: `once=` and `txn=` of a table."""

import asyncio
import uuid
from itertools import islice
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.catalog import RecordId, resolve_or_create
from aiopersist.state.once import hash_of
from aiopersist.table.transaction.transact import RECORDS, _record_of
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.support.internals import stack_of
from tests.support.processes import Place
from tests.table.kit import Gate, entries, gated, in_time, versions


def writes(table: Any, once: str) -> dict[str, Any]:
    return {
        "put": lambda: table.put("k", 1, once=once),
        "put_many": lambda: table.put_many({"k": 1, "l": 1}, once=once),
        "delete": lambda: table.delete("there", once=once),
        "insert": lambda: table.insert("new", 1, once=once),
        "update": lambda: table.update("k", lambda old: (old or 0) + 1, once=once),
    }


@pytest.mark.parametrize("write", writes(None, ""))
@pytest.mark.parametrize("who", ["same", "other"])
async def test_a_repeat_writes_nothing(write: str, who: str, place: Place) -> None:
    """The repeat gives the time of the first one, and undoes nothing that came after."""
    one = await place.client()
    two = one if who == "same" else await place.client()
    table = one.table("t", str, int)
    await table.put("there", 1)
    await writes(table, "id")[write]()
    time = await one.happened("id", shard="t")
    await table.put_many(dict.fromkeys(("k", "l", "there", "new"), 9))
    seqno = await versions(one, "t")
    again = await writes(two.table("t", str, int), "id")[write]()
    assert again == (ap.Repeated(time) if write == "update" else time)
    assert await versions(one, "t") <= seqno + 2  # a client that is new registers
    assert await entries(table) == [("k", 9), ("l", 9), ("new", 9), ("there", 9)]


@pytest.mark.parametrize("write", ["put", "delete", "update"])
async def test_what_wrote_nothing_is_remembered(write: str, place: Place) -> None:
    """The first one had nothing to change. A late repeat must not undo what came after."""
    client = await place.client()
    table = client.table("t", str, int)
    await table.put("k", 1)
    calls = {
        "put": lambda: table.put("k", 1, once="id"),
        "delete": lambda: table.delete("gone", once="id"),
        "update": lambda: table.update("k", lambda old: 1, once="id"),
    }
    await calls[write]()
    time = await client.happened("id", shard="t")
    assert time is not None
    await table.put_many({"k": 5, "gone": 5})
    again = await calls[write]()
    assert again == (ap.Repeated(time) if write == "update" else time)
    assert await entries(table) == [("gone", 5), ("k", 5)]


async def test_what_failed_is_not_remembered(quiet: ap.Client) -> None:
    """Neither a key that was there nor a function that raised is something that happened."""
    table = quiet.table("t", str, int)
    await table.put("k", 1)
    with pytest.raises(ap.KeyExists):
        await table.insert("k", 2, once="a")
    with pytest.raises(ZeroDivisionError):
        await table.update("k", lambda old: 1 // 0, once="b")
    assert await quiet.happened("a", shard="t") is None
    assert await quiet.happened("b", shard="t") is None
    await table.delete("k")
    await table.insert("k", 2, once="a")
    assert await table.update("k", lambda old: old + 1, once="b") == 3


async def test_twice_in_one_group(quiet: ap.Client) -> None:
    """The first one of the group happens; the others are its repeats, in each order with other calls."""
    table = quiet.table("t", str, int)
    await table.put("k", 0)
    first, between, second, third = await in_time(
        asyncio.gather(
            table.update("k", lambda old: old + 1, once="id"),
            table.put("l", 1),
            table.update("k", lambda old: old + 1, once="id"),
            table.put("k", 50, once="id"),
        )
    )
    assert first == 1
    assert second == ap.Repeated(between)
    assert third == between
    assert await entries(table) == [("k", 1), ("l", 1)]


async def test_twice_in_one_group_of_which_the_first_fails(quiet: ap.Client) -> None:
    """Then the second one is the first that happens."""
    table = quiet.table("t", str, int)
    await table.put("k", 0)
    failed, done = await in_time(
        asyncio.gather(
            table.insert("k", 5, once="id"),
            table.update("k", lambda old: 7, once="id"),
            return_exceptions=True,
        )
    )
    assert isinstance(failed, ap.KeyExists)
    assert done == 7


@pytest.mark.parametrize("mark", ["once", "txn"])
async def test_another_client_records_the_id_meanwhile(mark: str, place: Place) -> None:
    """Two clients send one id at one moment. The group that comes second does not happen as it was planned:
    its repeat is told so, and the other operations of the group are written."""
    async with gated(place.urls) as (client, gate):
        table, other = client.table("t", str, int), (await place.client()).table("t", str, int)
        await table.put("z", 0)
        await other.put("y", 0)
        marked: dict[str, Any] = {"once": "id"} if mark == "once" else {"txn": ("app", 1)}
        gate.hold("compare_and_set")
        puts = [
            asyncio.create_task(work)
            for work in (
                table.put_many({"a": 1}, **marked),
                table.put("b", 2),
                table.update("c", lambda old: 3),
            )
        ]
        await in_time(gate.held.wait())
        time = await other.put_many({"a": 10}, **marked)
        gate.open()
        answers = await in_time(asyncio.gather(*puts))
        assert answers[2] == 3
        if mark == "once":
            assert answers[0] == time
        for reader in (table, other):
            assert await entries(reader) == [("a", 10), ("b", 2), ("c", 3), ("y", 0), ("z", 0)]
        assert await table.get_many(list("abc"), stale=True) == {"a": 10, "b": 2, "c": 3}


async def test_one_table_of_a_group_repeats(place: Place) -> None:
    """A group over two tables, of which another client has recorded the id in one: the other is written."""
    async with gated(place.urls) as (client, gate):
        a, b = client.table("a", str, int), client.table("b", str, int)
        theirs = (await place.client()).table("a", str, int)
        await asyncio.gather(a.put("z", 0), b.put("z", 0))
        await theirs
        gate.hold("compare_and_set_many")
        puts = [asyncio.create_task(p) for p in (a.put("k", 1, once="id"), a.put("l", 2), b.put("k", 3))]
        await in_time(gate.held.wait())
        time = await theirs.put("k", 10, once="id")
        gate.open()
        answers = await in_time(asyncio.gather(*puts))
        assert answers[0] == time
        assert await theirs.get_many(["k", "l"]) == {"k": 10, "l": 2}
        assert await a.get_many(["k", "l"], stale=True) == {"k": 10, "l": 2}
        assert await b.get("k") == 3


async def test_txn_is_a_high_water_mark(place: Place) -> None:
    """A number that is not greater than the last one of the application writes nothing."""
    table = (await place.client()).table("t", str, int)
    await table.put_many({"k": 1}, txn=("app", 5))
    await table.put_many({"k": 2}, txn=("app", 5))
    await table.put_many({"k": 3}, txn=("app", 4))
    assert await table.get("k") == 1
    await table.put_many({"k": 1}, txn=("app", 6))  # changes nothing, and is remembered
    await table.put("k", 7)
    again = (await place.client()).table("t", str, int)
    await again.put_many({"k": 1}, txn=("app", 6))
    assert await again.get("k") == 7
    await again.put_many({"k": 8}, txn=("other", 1))
    assert await table.get("k") == 8


async def test_txns_of_one_application_in_one_group(quiet: ap.Client) -> None:
    """Rising numbers are all written, in their order, and a number again is not."""
    table = quiet.table("t", str, int)
    await table.put("z", 0)
    await in_time(
        asyncio.gather(
            *(table.put_many({"k": n, f"n{n}": m}, txn=("app", n)) for n, m in ((1, 0), (2, 0), (2, 5)))
        )
    )
    assert await table.get("k") == 2
    assert await table.get_many(["n1", "n2"]) == {"n1": 0, "n2": 0}
    await table.put_many({"k": 3}, txn=("app", 3))
    assert await table.get("k") == 3


async def test_ids_are_forgotten(place: Place) -> None:
    """After `once_keep_s` a repeat is new."""
    client = await place.client(once_keep_s=100.0, reader_lease_s=1e6, writer_lease_s=1e6)
    table = client.table("t", str, int)
    await table.put("k", 1, once="id")
    await table.put("k", 2)
    await table.put("k", 1, once="id")
    assert await table.get("k") == 2
    place.clock.ahead_s = 101.0
    await table.put("k", 1, once="id")
    assert await table.get("k") == 1


def of_one_record(count: int) -> list[str]:
    """Ids that one record of transactions has."""
    ids = (f"id{number}" for number in range(100_000))
    first = _record_of(hash_of("id0"))
    return list(islice((one for one in ids if _record_of(hash_of(one)) == first), count))


@pytest.mark.several_shards
@pytest.mark.parametrize("shard", ["t", None], ids=["put", "transact"])
async def test_an_id_is_remembered_until_so_many_newer_ones_came(
    shard: str | None, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: to the last one, by each client; then a repeat is new. Compaction and collection forget none."""
    monkeypatch.setattr("aiopersist.state.once.IDS_MAX", 10)
    clients = await place.client(rollup_every=4), await place.client(rollup_every=4)
    ids = of_one_record(12)

    async def put(client: ap.Client, once: str) -> None:
        table = client.table("t", str, int)

        async def body(tx: ap.Transaction) -> None:
            tx.put(table, "n", (await tx.get(table, "n") or 0) + 1)

        if shard is None:
            await client.transact(body, once=once)
        else:
            await table.update("n", lambda old: (old or 0) + 1, once=once)

    for number, one in enumerate(ids[:10]):
        await put(clients[number % 2], one)
    await clients[0].force_compaction("t")
    await clients[0].force_gc("t")
    first = await clients[0].happened(ids[0], shard)
    assert first is not None
    for client in (*clients, await place.client()):
        assert await client.happened(ids[0], shard) == first
        await put(client, ids[0])
        assert await client.table("t", str, int).get("n") == 10
    await put(clients[1], ids[10])
    assert [await client.happened(ids[0], shard) for client in clients] == [None, None]
    assert None not in [await client.happened(ids[1], shard) for client in clients]
    await put(clients[0], ids[0])
    assert await clients[1].table("t", str, int).get("n") == 12
    assert (await clients[1].happened(ids[0], shard) or 0) > first


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.REFUSED])
@pytest.mark.parametrize("retries", [0.0, None])
async def test_answers_that_are_lost(outcome: Outcome, retries: float | None, place: Place) -> None:
    """Every write with an id, each answer of it lost: what is reported is true, and repeating until it is
    told does it once."""
    faults = Faults()
    opening = ap.open(
        blob=place.blob,
        consensus=FaultyConsensus(place.consensus(), faults),
        settings=ap.Settings(retry_timeout_s=retries, watch_timeout_s=0.02),
        maintenance=False,
    )
    async with opening as client:
        table = client.table("t", str, int)
        await table.put("n", 0)
        for number in range(6):
            faults.fail_next("compare_and_set", outcome)

            async def repeated(number: int = number) -> Any:
                while True:
                    try:
                        return await table.update("n", lambda old: (old or 0) + 1, once=f"id{number}")
                    except (ap.Indeterminate, ap.StorageUnavailable):
                        assert retries is not None

            both = await in_time(asyncio.gather(repeated(), repeated()))
            assert any(isinstance(answer, ap.Repeated) for answer in both)
            assert await table.get("n") == number + 1
            assert await client.happened(f"id{number}", shard="t") is not None
        other = (await place.client()).table("t", str, int)
        assert await entries(other) == [("n", 6)]


async def test_lost_answers_without_ids(place: Place) -> None:
    """What raised `Indeterminate` happened or not; the view agrees with the shard in any case."""
    faults = Faults(seed=5, rates={Outcome.LOST: 0.2, Outcome.DROPPED: 0.2, Outcome.REFUSED: 0.1})
    opening = ap.open(
        blob=place.blob,
        consensus=FaultyConsensus(place.consensus(), faults),
        settings=ap.Settings(retry_timeout_s=0.0, watch_timeout_s=0.02),
        maintenance=False,
    )
    honest = await place.client()
    await honest.table("t", str, int).put("k", 0)
    rates, faults.rates = faults.rates, {}
    async with opening as client:
        table = client.table("t", str, int)
        await table
        faults.rates = rates
        acknowledged = 0
        for number in range(1, 60):
            try:
                await table.put("k", number)
                acknowledged = number
            except (ap.Indeterminate, ap.StorageUnavailable):
                pass
            faults.rates = {}
            found = await honest.table("t", str, int).get("k")
            assert found is not None
            assert found >= acknowledged
            assert await table.get("k") == found
            faults.rates = rates
        faults.heal()
        report = await honest.fsck("t")
        assert report.ok, report.problems


@pytest.mark.several_shards
async def test_a_record_that_was_named_and_not_created_knows_no_id(quiet: ap.Client) -> None:
    """Goal: a client that ends between the two leaves nothing that `happened` stumbles over."""
    for number in range(RECORDS):
        await resolve_or_create(stack_of(quiet), f"{number:02}", RecordId)
    assert await quiet.happened("r") is None
    table = quiet.table("t", str, int)

    async def body(tx: ap.Transaction) -> None:
        tx.put(table, "k", 1)

    await quiet.transact(body, once="r")
    assert await quiet.happened("r") is not None


async def test_what_is_cancelled_while_its_key_is_looked_up_does_not_happen() -> None:
    """Goal: before its group is sent, also in a table that is not resident; `happened` says so for good."""
    url, gate = f"mem://{uuid.uuid4().hex}", Gate()
    small = ap.Settings(table_resident_bytes=0, inline_writes_single_max_bytes=0, blob_cache_bytes=0)
    blob, consensus = FaultyBlob(ap.open_blob(url), gate), ap.open_consensus(url)
    async with (
        ap.open(url) as other,
        ap.open(blob=blob, consensus=consensus, settings=small, maintenance=False) as client,
    ):
        await other.table("t", str, int).put_many({f"k{number}": number for number in range(2000)})
        table = client.table("t", str, int)
        assert not (await table.view()).resident
        gate.hold("get", "get_range")
        work = asyncio.create_task(table.update("k7", lambda old: 0, once="id"))
        await in_time(gate.held.wait())
        work.cancel()
        await asyncio.wait([work])
        asked = asyncio.create_task(client.happened("id", "t"))
        await asyncio.sleep(0)
        gate.open()
        assert await in_time(asked) is None
        assert await in_time(table.get("k7")) == 7
        assert await client.happened("id", "t") is None


@pytest.mark.several_shards
async def test_happened_decides_a_transaction_that_is_on_its_way(place: Place) -> None:
    """Goal: its answer was lost, its statement may come late: not after `happened` said that it did not."""
    async with gated(place.urls, retry_timeout_s=0.0) as (client, gate):
        table = client.table("t", str, int)
        await table.put("k", 1)

        async def body(tx: ap.Transaction) -> None:
            tx.put(table, "k", 2)

        for number in range(3):
            gate.fail_next("compare_and_set_many", Outcome.LATE)
            with pytest.raises(ap.Indeterminate):
                await client.transact(body, once=str(number))
            found = await in_time(client.happened(str(number)))
            await gate.land()
            assert await (await place.client()).happened(str(number)) is found is None
        assert await table.get("k") == 1


@pytest.mark.several_shards
async def test_happened_waits_for_what_was_taken(place: Place) -> None:
    """Goal: a call that is cancelled while its group registers a writer may still happen."""
    await (await place.client()).table("t", str, int).put("k", 1)
    async with gated(place.urls) as (client, gate):
        table = client.table("t", str, int)
        await table.get("k")
        gate.hold("compare_and_set")
        work = asyncio.create_task(table.put("k", 2, once="id"))
        await in_time(gate.held.wait())
        work.cancel()
        await asyncio.wait([work])
        asked = asyncio.create_task(client.happened("id", "t"))
        await asyncio.wait([asked], timeout=0.05)
        gate.open()
        found = await in_time(asked)
        await table.put("l", 1)
        assert await client.happened("id", "t") == found
        assert await table.get("k") == (1 if found is None else 2)
