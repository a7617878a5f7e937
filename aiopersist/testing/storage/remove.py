"""What every `Consensus` must do of which keys can be removed; a part of `storage_consensus`. A store that
cannot is skipped here: it says `Unsupported`."""

import asyncio

import pytest

from aiopersist.errors import Unsupported
from aiopersist.storage.consensus import Consensus, Versioned
from aiopersist.testing.storage.heads import Handles, grow


def numbered(seqno: int) -> Versioned:
    """As `grow` makes it."""
    return Versioned(seqno, b"%d" % seqno)


async def removed(consensus: Consensus, key: str, seqno: int) -> bool:
    """Skip the test where the store removes nothing."""
    try:
        return await consensus.remove(key, numbered(seqno))
    except Unsupported:
        pytest.skip("removes no keys")


class RemoveConformance:
    """See the header."""

    async def test_remove(self, handles: Handles) -> None:
        """Of the key nothing is left; a key beside it stays; another head is a mismatch."""
        one, two = handles
        await grow(one, "k", 4)
        await grow(one, "kk", 2)
        for other in (0, 2, 4, 2**40):
            assert await removed(one, "k", other) is False
        assert await two.head("k") == Versioned(3, b"3")
        assert await one.truncate("k", 2) == 2
        assert await one.remove("k", numbered(3)) is True
        assert await two.head("k") is None
        assert await two.scan("k", 0, 10) == []
        assert await two.list_keys("") == ["kk"]
        assert await two.heads({"k": 3, "kk": 1}) == {"k": None}
        assert await two.head("kk") == Versioned(1, b"1")
        assert await two.remove("k", numbered(3)) is True  # repeated: it is away
        assert await two.remove("never", numbered(0)) is True

    async def test_a_key_that_was_removed_begins_anew(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 3)
        assert await removed(one, "k", 2) is True
        assert await two.compare_and_set("k", 2, b"late") is False
        assert await two.compare_and_set_many([]) is True
        await grow(two, "k", 2)
        assert await one.scan("k", 0, 10) == [Versioned(0, b"0"), Versioned(1, b"1")]
        assert await one.remove("k", numbered(2)) is False

    async def test_remove_of_a_version_that_is_another(self, handles: Handles) -> None:
        """A key that was removed and made anew up to the same number stays, however late the request."""
        one, two = handles
        await grow(one, "k", 3)
        assert await removed(one, "k", 2) is True
        await grow(two, "k", 2)
        assert await two.compare_and_set("k", 1, b"new") is True
        assert await one.remove("k", numbered(2)) is False
        assert await one.scan("k", 0, 10) == [numbered(0), numbered(1), Versioned(2, b"new")]
        assert await one.remove("k", Versioned(2, b"new")) is True
        assert await two.head("k") is None

    async def test_remove_races_with_compare_and_set(self, handles: Handles) -> None:
        """One of them wins, each time, and nothing is half there."""
        one, two = handles
        for seqno in range(30):
            key = f"k{seqno}"
            await grow(one, key, 2)
            gone, won = await asyncio.gather(removed(one, key, 1), two.compare_and_set(key, 1, b"2"))
            log = await one.scan(key, 0, 10)
            assert gone is not won
            assert log == ([] if gone else [Versioned(n, b"%d" % n) for n in range(3)])
            assert (await two.head(key) is None) is gone

    async def test_remove_races_with_creation(self, handles: Handles) -> None:
        """Whoever makes the key anew has made version 0, whole, or has not."""
        one, two = handles
        for seqno in range(20):
            key = f"k{seqno}"
            await grow(one, key, 1)
            gone, made = await asyncio.gather(removed(one, key, 0), two.compare_and_set(key, None, b"new"))
            assert gone is True
            assert await one.scan(key, 0, 10) == ([Versioned(0, b"new")] if made else [])

    async def test_several_who_remove(self, handles: Handles) -> None:
        """All are told that it is away; with a truncate beside them nobody waits for ever."""
        one, two = handles

        async def truncated(key: str) -> None:
            try:
                await two.truncate(key, 25)
            except ValueError:  # it is away
                pass

        for n in range(5):
            key = f"k{n}"
            await grow(one, key, 30)
            race = (removed(one, key, 29), truncated(key), removed(two, key, 29), removed(one, key, 29))
            assert [found for found in await asyncio.gather(*race) if found is not None] == [True] * 3
            assert await two.scan(key, 0, 100) == []
