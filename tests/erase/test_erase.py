"""Goal: what `erase` calls done is nowhere in the stores, by a look that shares nothing with it."""

import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.erase.kit import NOW, SECRET, Pair, places, stays, with_history
from tests.support.location import both_in_a_bucket
from tests.support.processes import Place


@pytest.mark.parametrize("inline_bytes", [16384, 0], ids=["inline", "blob"])
async def test_what_is_done_is_nowhere(location: StoreUrls, inline_bytes: int) -> None:
    settings = ap.Settings(inline_writes_single_max_bytes=inline_bytes)
    async with ap.open(**location._asdict(), settings=settings, maintenance=False) as client:
        people = await with_history(client)
        assert await places(client)
        told = await client.admin.erase(people, ["ada"], dry_run=True)
        assert not told.done and told.present == 1 and told.remnants and told.deleted == 0
        erased = await client.admin.erase(people, ["ada"], wait=NOW)
        assert (erased.remnants, erased.holders) == ([], [])
        assert (erased.done, erased.deleted) == (True, 1)
        assert await places(client) == []
        await stays(people)
        assert (await client.admin.fsck("people")).ok
        again = await client.admin.erase(people, ["ada"], wait=NOW)
        assert again.done and again.time is None  # nothing to do: no history is given up


async def test_in_a_bucket_newer_versions_carry_older_ones(
    best_s3_url: str, request: pytest.FixtureRequest
) -> None:
    """Goal: the objects of versions that were truncated are gone, and so is what others carry of them."""
    blob, consensus = both_in_a_bucket(best_s3_url, request.node)
    async with ap.open(blob=blob, consensus=consensus, maintenance=False) as client:
        people = await with_history(client)
        await people.delete("ada")
        await client.admin.retain("people", 0)
        for _ in range(2):
            await client.admin.force_gc("people")
            await client.admin.force_compaction("people")
        await client.admin.force_gc("people")
        assert await places(client)  # by the commands alone: in objects of newer versions
        told = await client.admin.erase(people, ["ada"], dry_run=True)
        assert {remnant.kind for remnant in told.remnants} == {"leftover"}
        assert (await client.admin.erase(people, ["ada"], wait=NOW)).done
        assert await places(client) == []


async def test_by_a_condition_the_history_counts(quiet: ap.Client) -> None:
    """Goal: rows of which it was true once are gone; a row of which it is true no more stays."""
    people = await with_history(quiet)
    await people.put("cid", SECRET)
    await people.put("cid", b"has another val by now")
    await people.put("dan", SECRET)
    await people.delete("dan")
    is_secret = pc.starts_with(pc.field("val"), SECRET)
    erased = await quiet.erase(people, where=is_secret, wait=NOW)
    assert erased.done and erased.deleted == 1
    assert await places(quiet) == []
    assert await people.get("cid") == b"has another val by now"
    assert await people.get("ada") is None and await people.get("bob") == b"stays"


async def test_an_erased_key_takes_its_other_vals_along(quiet: ap.Client) -> None:
    """Goal: the earlier vals of a row that a condition names are searched for, though it is not true of
    them."""
    people = await with_history(quiet)
    hold = await quiet.reader("people", hold_name="nightly")
    told = await quiet.erase(people, where=pc.field("val") == SECRET, wait=NOW)
    assert not told.done and sum(remnant.rows for remnant in told.remnants) >= 5  # two of each val, and it
    await hold.release()
    assert (await quiet.erase(people, where=pc.field("val") == SECRET, wait=NOW)).done
    assert await places(quiet) == []


async def test_keys_of_several_fields(quiet: ap.Client) -> None:
    people = quiet.table("pairs", key=Pair, val=bytes)
    await people.put_many({Pair("a", 1): SECRET, Pair("a", 2): b"x", Pair("b", 1): b"y"})
    assert (await quiet.erase(people, [Pair("a", 1), Pair("c", 3)], wait=NOW)).done
    assert await places(quiet) == [] and await people.count() == 2


async def test_after_the_types_have_grown(quiet: ap.Client) -> None:
    """Goal: parts of an earlier schema are read, too."""

    class Old(BaseModel):
        photo: bytes

    class New(BaseModel):
        photo: bytes
        age: int | None = None

    old = quiet.table("people", key=str, val=Old)
    await old.put("ada", Old(photo=SECRET))
    await old.aclose()
    number, _ = await quiet.schema("people")
    await quiet.compare_and_evolve_schema("people", number, ap.Schema(key=str, val=New))
    new = quiet.table("people", key=str, val=New)
    await new.put("bob", New(photo=b"", age=3))
    told = await quiet.erase(new, where=pc.field("photo") == SECRET, dry_run=True)
    assert sum(remnant.rows for remnant in told.remnants) > 0
    assert (await quiet.erase(new, ["ada"], wait=NOW)).done
    assert await places(quiet) == [] and await new.count() == 1


async def test_what_is_refused(quiet_mem: ap.Client, mem: ap.Client) -> None:
    people = await with_history(quiet_mem)
    with pytest.raises(ap.InvalidUsage, match="give keys, or a condition"):
        await quiet_mem.erase(people)
    with pytest.raises(TypeError, match="is one key"):
        await quiet_mem.erase(people, "ada")
    with pytest.raises(ap.InvalidUsage, match="No match"):
        await quiet_mem.erase(people, where=pc.field("none") == 1)
    with pytest.raises(ap.InvalidUsage, match="another client"):
        await mem.erase(people, ["ada"])
    with pytest.raises(TypeError, match="wait="):
        await quiet_mem.erase(people, ["ada"], wait=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is one name"):
        await quiet_mem.erase(people, ["ada"], end_holds="mailer")
    assert await people.get("ada") == SECRET


async def test_a_readonly_client_may_look(location: StoreUrls) -> None:
    async with ap.open(**location._asdict(), maintenance=False) as client:
        await with_history(client)
    async with ap.open(**location._asdict(), readonly=True) as client:
        people = client.table("people", key=str, val=bytes)
        told = await client.admin.erase(people, ["ada"], dry_run=True)
        assert not told.done and told.present == 1
        with pytest.raises(ap.Unsupported):
            await client.admin.erase(people, ["ada"])


async def test_of_what_was_deleted_before_only_that_history_goes(place: Place) -> None:
    """Goal: since need not pass what came after the deletion: a consumer that stands there may stay."""
    client = await place.client()
    people = await with_history(client)
    await people.delete("ada")
    async with people.subscription("mailer", start="now"):
        pass
    for n in range(5):
        await people.put("bob", b"%d" % n)
    await people.put("bob", b"stays")
    erased = await client.admin.erase(people, ["ada"], wait=NOW)
    assert erased.done and erased.deleted == 0
    assert await places(client) == []
    assert erased.time is not None and erased.since == ap.Antichain(erased.time)
    assert "mailer" in await client.admin.subscriptions("people")


async def test_a_copy_follows(place: Place) -> None:
    """Goal: the way of the docs for backups: copy again, then erase in the copy; it is still one."""
    client = await place.client()
    people = await with_history(client)
    async with ap.open("mem://", maintenance=False) as backup:
        await client.admin.copy_shard("people", backup)
        assert await places(backup)
        assert (await client.admin.erase(people, ["ada"], wait=NOW)).done
        await people.put("bob", b"stays")
        await client.admin.copy_shard("people", backup)
        copied = backup.table("people", key=str, val=bytes)
        erased = await backup.erase(copied, ["ada"], wait=NOW)
        assert erased.done and erased.deleted == 0 and await places(backup) == []
        await copied.aclose()
        await people.put("bob", b"later")
        await client.admin.copy_shard("people", backup)


async def test_a_table_that_is_not_there_is_not_made(quiet: ap.Client) -> None:
    """Goal: nobody is told that all is erased where the name is misspelt."""
    for dry_run in (True, False):
        with pytest.raises(ap.UnknownShard):
            await quiet.erase(quiet.table("poeples", str, bytes), ["ada"], wait=NOW, dry_run=dry_run)
    assert await quiet.list_shards() == {}
