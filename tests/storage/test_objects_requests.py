"""Goal: how many requests consensus on objects makes."""

import random
from contextlib import suppress

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.objects.bucket import Object
from aiopersist.storage.objects.tails import TAIL_MAX
from aiopersist.testing.storage.heads import grow, numbered
from tests.storage.objects_kit import Place


async def test_requests(place: Place) -> None:
    """Goal: a commit is a creation and a list; a head is a list and a get."""
    one, calls = place.handle()
    await grow(one, "k", 3)
    calls.calls.clear()
    assert await one.compare_and_set("k", 2, b"3")
    assert calls.calls == {"create": 1, "list": 1}
    calls.calls.clear()
    assert await one.compare_and_set("k", 2, b"x") is False
    assert calls.calls == {}, "it knows a newer head"
    other, calls = place.handle()
    assert await other.head("k") == Versioned(3, b"3")
    assert calls.calls == {"list": 1, "get": 1}
    calls.calls.clear()
    assert await one.compare_and_set("k", 3, b"4")
    assert await other.compare_and_set("k", 3, b"x") is False
    assert calls.calls == {"create": 1, "get": 1}
    calls.calls.clear()
    assert await other.head("k") == Versioned(4, b"4"), "which it has read"
    assert calls.calls == {"list": 1}
    calls.calls.clear()
    assert await other.heads({"k": 4}) == {}
    assert calls.calls == {"list": 1}
    calls.calls.clear()
    assert await other.versions("k", 1, 4) == numbered(range(1, 5))
    assert calls.calls == {}, "the tail of the head has them"
    assert await other.scan("k", 1, 100) == numbered(range(1, 5))
    assert calls.calls == {"list": 1, "get": 1}, "whose tail has the others"
    calls.calls.clear()
    assert await other.truncate("k", 3) == 3
    assert calls.calls == {"list": 2, "create": 1, "delete": 1}


async def test_requests_for_many_versions(place: Place) -> None:
    """Goal: a list of many versions takes long, and a list of the floors follows a shorter one."""
    one, _ = place.handle()
    await grow(one, "k", 100)
    other, calls = place.handle()
    assert await other.head("k") == Versioned(99, b"99")
    assert calls.calls == {"list": 2, "get": 1}
    calls.calls.clear()
    assert await other.compare_and_set("k", 99, b"100")
    assert await other.head("k") == Versioned(100, b"100")
    assert calls.calls == {"create": 1, "list": 3}, "which it has written"
    calls.calls.clear()
    assert await other.versions("k", 10, 100) == numbered(range(10, 101))
    assert calls.calls == {"get": 12}, "with their tails"
    calls.calls.clear()
    assert await other.versions("k", 10, 20) == numbered(range(10, 21)), "far from the head"
    assert calls.calls == {"list": 1, "get": 2}
    assert await one.truncate("k", 95) == 95
    assert await other.versions("k", 90, 100) == numbered(range(95, 101)), "some were truncated"
    await other.head("k")
    calls.calls.clear()
    assert await other.head("k") == Versioned(100, b"100")
    assert calls.calls == {"list": 1}, "few are left"


async def test_a_head_that_is_likely_is_read_beside_the_list(place: Place) -> None:
    one, _ = place.handle()
    await grow(one, "k", 3)
    for seqno, requests in (
        (2, {"list": 1, "get": 1}),
        (0, {"list": 1, "get": 2}),
        (9, {"list": 1, "get": 2}),
    ):
        other, calls = place.handle()
        assert await other.likely_head("k", seqno) == Versioned(2, b"2")
        assert calls.calls == requests
        calls.calls.clear()
        assert await other.likely_head("k", seqno) == Versioned(2, b"2")
        assert calls.calls == {"list": 1}
    other, calls = place.handle()
    assert await other.likely_head("no", 0) is None


async def test_what_a_read_that_failed_has_got_is_not_read_again(place: Place) -> None:
    """Goal: where one get of four fails, a read of a hundred succeeds after a few tries."""
    one, _ = place.handle()
    await grow(one, "k", 900)
    assert await one.truncate("k", 0) == 0
    other, calls = place.handle()
    dice, gets = random.Random(1), other._bucket.get

    async def get(name: str) -> Object | None:
        if dice.random() < 0.25:
            raise StorageUnavailable("503 of something between")
        return await gets(name)

    other._bucket.get = get  # type: ignore[method-assign]
    found, tries = list[Versioned](), 0
    while not found and tries < 100:
        tries += 1
        with suppress(StorageUnavailable):
            found = await other.scan("k", 0, 1000)
    assert found == numbered(range(900)) and tries > 1
    assert calls.calls["get"] <= 900 / TAIL_MAX + 1, "each object was read once"
    assert len(other._unfinished) == 0
