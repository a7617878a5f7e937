"""Goal: who loses each race on an object store comes through, beside writers that never pause."""

import asyncio
from collections.abc import Iterator

import pytest

from aiopersist.errors import StorageUnavailable
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.objects import courtesy
from aiopersist.storage.objects.names import folder_of, is_wish
from aiopersist.testing.storage.heads import grow
from tests.storage.objects_kit import Counting, Place

COMMITS_MAX = 3000  # of the other, before the loser comes through: without courtesy it never does


def wishes(place: Place) -> list[str]:
    return [name for name in place.world.stored if is_wish(name)]


class Slow(Counting):
    """Each request takes a while."""

    async def _call(self, what: str, request: object) -> object:
        await asyncio.sleep(0.002)
        return await super()._call(what, request)  # type: ignore[arg-type]


def racing(place: Place) -> Iterator[Consensus]:
    while True:
        handle, calls = place.handle()
        handle._bucket = Slow(calls)
        yield handle


async def commit(handle: Consensus) -> None:
    """Commit on the newest version, as the library does."""
    while True:
        head = await handle.head("k")
        assert head is not None
        if await handle.compare_and_set("k", head.seqno, b"x"):
            return


async def test_who_loses_each_race_comes_through(place: Place) -> None:
    handles = racing(place)
    busy, slow = next(handles), next(handles)
    await grow(busy, "k", 1)
    commits, is_done = 0, False

    async def without_pause() -> None:
        nonlocal commits
        while not is_done and commits < COMMITS_MAX:
            assert await busy.compare_and_set("k", commits, b"y") or await give_way()
            commits += 1

    async def give_way() -> bool:
        nonlocal commits
        head = await busy.head("k")
        assert head is not None
        commits = head.seqno - 1
        return True

    running = asyncio.ensure_future(without_pause())
    for _ in range(3):
        await commit(slow)
    is_done = True
    await running
    assert commits < COMMITS_MAX


async def test_a_wish_is_left_after_some_losses_and_deleted_by_the_win(place: Place) -> None:
    one, _ = place.handle()
    other, calls = place.handle()
    await grow(one, "k", 1)
    for losses in range(1, 3 * courtesy.WISHES_AFTER):
        head = await other.head("k")
        assert head is not None
        assert await one.compare_and_set("k", head.seqno, b"x")
        assert await other.compare_and_set("k", head.seqno, b"y") is False
        assert len(wishes(place)) == losses // courtesy.WISHES_AFTER
    calls.calls.clear()
    await commit(other)
    assert wishes(place) == []
    assert calls.calls["delete"] == 1


async def test_each_wish_makes_others_pause_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(self: object, seconds: float) -> None:
        pauses.append(seconds)

    one, _ = place.handle()
    await grow(one, "k", 1)
    folder = folder_of("k")
    await one._bucket.create(f"{folder}x/~abc", b"")
    monkeypatch.setattr("aiopersist.runtime.Runtime.sleep", sleep)
    for seqno in range(5):
        assert await one.compare_and_set("k", seqno, b"x")
    assert len(pauses) == 1 and 0 < pauses[0] <= courtesy.MOST_S
    assert await one.truncate("k", 4) == 4
    assert wishes(place) == []


async def test_who_loses_again_and_again_rests_but_not_after_a_wish(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []

    async def sleep(self: object, seconds: float) -> None:
        rests.append(seconds)

    monkeypatch.setattr("aiopersist.runtime.Runtime.sleep", sleep)
    monkeypatch.setattr("aiopersist.runtime.Runtime.uniform", lambda self, low, high: high)
    one, _ = place.handle()
    other, _ = place.handle()
    await grow(one, "k", 1)
    rested = []
    for _ in range(courtesy.WISHES_AFTER + 2):
        head = await other.head("k")
        assert head is not None
        assert await one.compare_and_set("k", head.seqno, b"x")
        rests.clear()
        assert await other.compare_and_set("k", head.seqno, b"y") is False
        rested.append(len(rests))
        assert all(0 < seconds <= courtesy.MOST_S for seconds in rests)
    expected = [0] * (courtesy.RESTS_AFTER - 1) + [1] * len(rested)
    expected[courtesy.WISHES_AFTER - 1] = expected[courtesy.WISHES_AFTER] = 0  # the others pause
    assert rested == expected[: len(rested)]
    await commit(other)
    assert not other._wishes._races


@pytest.mark.parametrize("what", ["create", "delete"])
async def test_a_wish_that_fails_changes_nothing(place: Place, what: str) -> None:
    one, _ = place.handle()
    other, calls = place.handle()
    await grow(one, "k", 1)
    create = other._bucket.create

    async def failing(name: str, data: bytes) -> str | None:
        if is_wish(name):
            raise StorageUnavailable("no")
        return await create(name, data)

    if what == "create":
        other._bucket.create = failing  # type: ignore[method-assign]
    for _ in range(courtesy.WISHES_AFTER):
        head = await other.head("k")
        assert head is not None
        assert await one.compare_and_set("k", head.seqno, b"x")
        assert await other.compare_and_set("k", head.seqno, b"y") is False
    if what == "delete":
        calls.fails["delete"] = StorageUnavailable("no")
    await commit(other)
    assert len(wishes(place)) == (what == "delete")


async def test_what_is_remembered_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courtesy, "HEARD_MAX", 5)
    one, _ = place.handle()
    known = one._wishes
    for number in range(50):
        known.hear("k", [f"w{number}"], 0.0)
        for seqno in range(3 * courtesy.WISHES_AFTER):
            known.refused(f"k{number}", seqno, "x/~")
    assert len(known._heard) == 5
    assert len(known._races) <= 5
