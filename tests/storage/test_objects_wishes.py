"""Goal: wishes on a bucket cost commits nothing, each is heeded once, and little of them is left behind."""

import asyncio

import pytest

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.objects import wishes
from aiopersist.storage.objects.names import WISHES, folder_of, is_wish
from aiopersist.testing.storage.heads import grow
from tests.storage.objects_kit import Place


def names(place: Place) -> list[str]:
    return [name for name in place.world.stored if is_wish(name)]


async def test_each_wish_is_heeded_once(place: Place) -> None:
    one, calls = place.handle()
    other, _ = place.handle()
    await grow(one, "k", 1)
    await other.wish(["k"], "far", 0.05, 0.0)
    calls.calls.clear()
    assert await one.compare_and_set("k", 0, b"1")
    assert calls.calls == {"create": 1, "list": 1}, "it costs no request"
    assert one.stand_back_s("k", "near", 0.0) > 0
    await asyncio.sleep(0.06)
    assert await one.compare_and_set("k", 1, b"2")
    assert one.stand_back_s("k", "near", 0.0) == 0, "it is there for its client, who may be gone"
    await other.wish(["k"], "far", 60.0, 0.0)
    assert await one.compare_and_set("k", 2, b"3")
    assert one.stand_back_s("k", "near", 0.0) > 0


async def test_one_wish_of_a_client_is_there_at_most(place: Place) -> None:
    one, _ = place.handle()
    await grow(one, "k", 5)
    for who in ("a", "b", "a", "b", "a"):
        await one.wish(["k"], who, 1.0, 0.0)
    assert len(names(place)) == 2
    await one.wish(["k"], "a", 0.0, 0.0)
    assert len(names(place)) == 1
    assert await one.truncate("k", 4) == 4
    assert names(place) == []


async def test_a_name_of_another_kind_is_no_wish_that_lasts(place: Place) -> None:
    """Goal: so are those that earlier versions of the library have left: they are heeded as these were."""
    one, _ = place.handle()
    await grow(one, "k", 1)
    for odd in ("abc", "abc-", "abc-9²", "abc-99999999", "a.b.c-x"):
        await one._bucket.create(f"{folder_of('k')}{WISHES}{odd}", b"")
    assert await one.compare_and_set("k", 0, b"1")
    assert one.stand_back_s("k", "near", 0.0) == 0
    await one._bucket.create(f"{folder_of('k')}{WISHES}{'f' * 32}-60000", b"")
    assert await one.compare_and_set("k", 1, b"2")
    assert 0 < one.stand_back_s("k", "near", 0.0) <= 60


@pytest.mark.parametrize("what", ["create", "delete"])
async def test_a_wish_that_fails_changes_no_commit(place: Place, what: str) -> None:
    one, _ = place.handle()
    other, calls = place.handle()
    await grow(one, "k", 1)
    await other.wish(["k"], "far", 1.0, 0.0)
    calls.fails[what] = StorageUnavailable("no")
    with pytest.raises(StorageUnavailable):
        await other.wish(["k"], "far", 1.0, 0.0)
    calls.fails.clear()
    head = await other.head("k")
    assert head is not None and await other.compare_and_set("k", head.seqno, b"1")


async def test_what_is_remembered_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "HEARD_MAX", 5)
    one, _ = place.handle()
    for number in range(50):
        one._wishes.listed("k", [f"x/~{number}-1000"])
    assert len(one._wishes._heard_names) == 5
