"""Goal: what a version in a bucket carries of those before it is true, small, and saves requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.base.errors import Corruption
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.objects.names import folder_of, version_name
from aiopersist.storage.objects.tails import KEYS_MAX, TAIL_BYTES_MAX, TAIL_MAX, Tails, packed, unpacked
from aiopersist.testing.storage.heads import grow, numbered
from tests.storage.objects_kit import Place


@given(st.lists(st.binary(max_size=20), max_size=TAIL_MAX), st.binary(max_size=50), st.integers(0, 10**18))
def test_what_is_packed_is_unpacked(tail: list[bytes], data: bytes, more: int) -> None:
    seqno = len(tail) + more
    found = unpacked("name", seqno, packed(b"token", tail, data))
    assert [version.data for version in found] == [*tail, data]
    assert [version.seqno for version in found] == list(range(more, seqno + 1))


@pytest.mark.parametrize(
    "stored",
    [
        *(b"", b"token", b"token 3", b"token 3\nab", b"token x\nabc", b"token -1\nabc", b"token 1  1\nabc"),
        *(b"token 1 1 1\nabcd", b"token" + b" 1" * 1000 + b"\n" + bytes(2000)),
    ],
    ids=str,
)
def test_what_is_no_version_is_told(stored: bytes) -> None:
    with pytest.raises(Corruption, match="the object 'name' is no version"):
        unpacked("name", 2, stored)


async def test_a_scan_gets_one_object_for_several_versions(place: Place) -> None:
    one, _ = place.handle()
    await grow(one, "k", 100)
    other, calls = place.handle()
    assert await other.scan("k", 0, 1000) == numbered(range(100))
    assert calls.calls == {"list": 1, "get": 12}, "12 of 100"
    assert await other.scan("k", 7, 5) == numbered(range(7, 12))


async def test_what_is_carried_of_truncated_versions_is_told(place: Place) -> None:
    """Goal: who erases data learns of all that the objects have below the floor."""
    one, _ = place.handle()
    await grow(one, "k", 30)
    assert await one.leftovers("k") == []
    await one.truncate("k", 20)
    other, _ = place.handle()
    found = await other.leftovers("k")
    assert {*found} == {*numbered(range(20 - TAIL_MAX, 20))}
    await one.truncate("k", 29)
    assert {version.seqno for version in await other.leftovers("k")} == {*range(29 - TAIL_MAX, 29)}


async def test_an_object_of_each_writer_carries_what_others_have_written(place: Place) -> None:
    one, _ = place.handle()
    other, _ = place.handle()
    await grow(one, "k", 3)
    for seqno, handle in enumerate([other, one, other], 2):
        head = await handle.head("k")
        assert head is not None and head.seqno == seqno
        assert await handle.compare_and_set("k", seqno, b"%d" % (seqno + 1))
    third, calls = place.handle()
    assert await third.scan("k", 0, 100) == numbered(range(6))
    assert calls.calls["get"] == 1


async def test_large_versions_are_carried_by_none(place: Place) -> None:
    one, _ = place.handle()
    large = bytes(TAIL_BYTES_MAX + 1)
    datas = [b"0", large, b"2", b"3"]
    for seqno, data in enumerate(datas):
        assert await one.compare_and_set("k", seqno - 1 if seqno else None, data)
    sizes = [len(place.world.stored[folder_of("k") + version_name(seqno)].data) for seqno in range(4)]
    assert sizes[1] < len(large) + 100 and max(sizes[2:]) < 100
    other, calls = place.handle()
    assert await other.scan("k", 0, 100) == [Versioned(*each) for each in enumerate(datas)]
    assert calls.calls["get"] == 3


def test_what_is_kept_is_bounded() -> None:
    tails = Tails()
    for number in range(3 * KEYS_MAX):
        for seqno in range(3 * TAIL_MAX):
            tails.add(f"k{number}", [Versioned(seqno, bytes(TAIL_BYTES_MAX // 4))], own=True)
    assert len(tails._versions) == KEYS_MAX
    assert {len(known) for known in tails._versions.values()} == {4}


def test_versions_that_do_not_follow_are_no_tail() -> None:
    tails = Tails()
    tails.add("k", numbered(range(3)))
    assert tails.before("k", 3) == [b"0", b"1", b"2"]
    assert tails.before("k", 2) == tails.before("k", 4) == tails.before("other", 0) == []
    tails.add("k", numbered(range(2)))
    assert tails.before("k", 3) == [b"0", b"1", b"2"], "older ones change nothing"
    tails.add("k", numbered(range(1, 5)))
    assert tails.before("k", 5) == [b"0", b"1", b"2", b"3", b"4"]
    tails.add("k", numbered([9]))
    assert tails.before("k", 10) == [b"9"]


def test_versions_of_another_history_are_no_tail() -> None:
    """Goal: a bucket that was restored from a backup has others of the same seqnos."""
    tails = Tails()
    other = [Versioned(seqno, b"other") for seqno in range(20)]
    tails.add("k", numbered(range(5)))
    tails.add("k", other[3:6])
    assert tails.newest("k") == other[3:6], "a later head"
    tails.add("k", numbered(range(4)))
    assert tails.newest("k") == numbered(range(4)), "an earlier one"
    tails.add("k", other[4:9])
    assert tails.newest("k") == other[4:9], "nothing says that they are of one history"
    tails.add("k", other[9:10], own=True)
    assert tails.newest("k") == other[4:10]
    tails.forget("k")
    assert tails.newest("k") == []


async def test_a_bucket_that_was_restored(place: Place) -> None:
    """Goal: a handle that has known what is gone reads and commits what is there."""
    one, calls = place.handle()
    await grow(one, "k", 4)
    backup = dict(place.world.stored)
    for seqno in range(3, 12):
        assert await one.compare_and_set("k", seqno, b"old")
    place.world.stored.clear()
    place.world.stored.update(backup)
    assert await one.head("k") == Versioned(3, b"3")
    assert await one.versions("k", 0, 3) == numbered(range(4))
    calls.calls.clear()
    assert await one.compare_and_set("k", 3, b"4")
    assert calls.calls == {"create": 1, "list": 1}
    other, _ = place.handle()
    for seqno in range(4, 14):
        await other.head("k")
        assert await other.compare_and_set("k", seqno, b"%d" % (seqno + 1))
    assert await one.head("k") == Versioned(14, b"14")
    assert await one.versions("k", 0, 14) == numbered(range(15))
