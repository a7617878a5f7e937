"""Goal: `erase` names who holds the rows, ends only those that it is told to, and waits for the others."""

import asyncio
from datetime import timedelta

import pyarrow.compute as pc

from tests.erase.kit import NOW, SECRET, places, with_history
from tests.support.processes import Place


async def test_holds_are_named_and_end_only_if_they_are(place: Place) -> None:
    client, other = await place.client(), await place.client()
    people = await with_history(client)
    slow = await other.subscription("people", name="mailer", start="snapshot")
    await slow.aclose()  # its position stays
    hold = await other.reader("people", hold_name="nightly")
    await other.critical_since("people", "pipeline")
    told = await client.admin.erase(people, ["ada"], wait=NOW)
    assert not told.done and told.deleted == 1 and told.remnants
    assert {(h.kind, h.id) for h in told.holders} == {
        ("subscription", "mailer"),
        ("named", "nightly"),
        ("critical", "pipeline"),
    }
    ends = {h.kind: h.until is not None for h in told.holders}
    assert ends == {"subscription": False, "named": True, "critical": False}
    some = await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["nightly", "critical:pipeline"])
    assert not some.done and [h.id for h in some.holders] == ["mailer"]
    assert {h.id for h in some.ended} == {"nightly", "pipeline"}
    await hold.aclose()  # its client keeps versions, too, until its next heartbeat
    erased = await client.admin.erase(people, ["ada"], wait=NOW, end_holds=["mailer"])
    assert erased.done and [h.id for h in erased.ended] == ["mailer"]
    assert await places(client) == []


async def test_it_waits_for_a_consumer(place: Place) -> None:
    """Goal: nothing has to be called again once the consumer has acknowledged."""
    client, other = await place.client(), await place.client()
    people = await with_history(client)
    theirs = other.table("people", key=str, val=bytes)
    mailer = await theirs.subscription("mailer")
    erasing = asyncio.create_task(client.admin.erase(people, ["ada"], wait=timedelta(seconds=50)))
    async for step in mailer:
        await mailer.ack(step, durable=True)
        if any(change.key == "ada" and change.new is None for change in step.changes):
            break
    await mailer.aclose()
    await theirs.aclose()
    assert (await erasing).done and await places(client) == []


async def test_an_open_snapshot_keeps_what_it_reads(place: Place) -> None:
    client, other = await place.client(inline_writes_single_max_bytes=0), await place.client()
    people = await with_history(client)
    async with other.reader("people") as reader:
        async with reader.snapshot() as snapshot:
            told = await client.admin.erase(people, ["ada"], wait=NOW)
            assert not told.done and [h.kind for h in told.holders] == ["reader"]
            assert SECRET in {row[1] for row in await snapshot.rows()}  # it reads on
        await other.force_gc("people")  # begins with a heartbeat
        assert (await client.admin.erase(people, ["ada"], wait=NOW)).done
    assert await places(client) == []


async def test_a_table_of_another_client_that_is_not_resident_lets_go(place: Place) -> None:
    client, other = await place.client(), await place.client()
    people = await with_history(client)
    held = await other.table("people", key=str, val=bytes, resident=False)
    assert await held.get("bob") == b"stays"
    assert not (await client.admin.erase(people, ["ada"], wait=NOW)).done
    for _ in range(2):  # it gives up history, then the versions
        assert await held.get("cid") is None
        await other.force_gc("people")  # begins with a heartbeat
        told = await client.admin.erase(people, ["ada"], wait=NOW)
    assert told.done and await places(client) == []


async def test_what_is_put_again_is_told_and_stays(place: Place) -> None:
    """Goal: a row that somebody puts after the deletion is not deleted by it, and is not called gone."""
    client, other = await place.client(), await place.client()
    people = await with_history(client)
    hold = await other.reader("people", hold_name="nightly")
    erasing = asyncio.create_task(client.admin.erase(people, ["ada"], wait=timedelta(seconds=50)))
    theirs = other.table("people", key=str, val=bytes)
    while await theirs.get("ada") is not None:
        await asyncio.sleep(0.001)
    await theirs.put("ada", b"new")
    await theirs.aclose()
    await hold.release()
    told = await erasing
    assert not told.done and (told.present, told.deleted) == (1, 1) and await people.get("ada") == b"new"
    assert (await client.admin.erase(people, ["ada"], wait=NOW)).done


async def test_a_key_that_is_somebody_elses_by_now(place: Place) -> None:
    """Goal: by a condition, a key of a row that is gone may be put again with another val: that is neither
    deleted nor told, whenever it comes."""
    client, other = await place.client(), await place.client()
    people = await with_history(client)
    await people.put("dan", SECRET)
    await people.delete("dan")
    hold = await other.reader("people", hold_name="nightly")
    is_secret = pc.field("val") == SECRET
    erasing = asyncio.create_task(client.admin.erase(people, where=is_secret, wait=timedelta(seconds=50)))
    theirs = other.table("people", key=str, val=bytes)
    while await theirs.get("ada") is not None:
        await asyncio.sleep(0.001)
    await theirs.put_many({"dan": b"another Dan", "ada": b"another Ada"})
    await theirs.aclose()
    await hold.release()
    told = await erasing
    assert told.done and (told.deleted, told.present) == (1, 0)
    assert await people.get("dan") == b"another Dan" and await people.get("ada") == b"another Ada"
    assert await places(client) == []
