"""What `Consensus.remove` must do; a part of `ConsensusConformance`. The tests are skipped for a store that
raises `Unsupported`."""

import asyncio
from contextlib import suppress

import pytest

from aiopersist.base.errors import Unsupported
from aiopersist.storage.consensus import Consensus, Versioned
from aiopersist.testing.storage.heads import Handles, grow, numbered


def version(seqno: int) -> Versioned:
    return numbered([seqno])[0]


async def removed(consensus: Consensus, key: str, seqno: int) -> bool:
    """Remove a key that `grow` wrote; skip the test if the store removes no keys."""
    try:
        return await consensus.remove(key, version(seqno))
    except Unsupported:
        pytest.skip("this store removes no keys")


class RemoveConformance:
    """See the header."""

    async def test_remove(self, handles: Handles) -> None:
        """Nothing of the key is left; another key stays; another head is a mismatch."""
        one, two = handles
        await grow(one, "k", 4)
        await grow(one, "kk", 2)
        for other in (0, 2, 4, 2**40):
            assert await removed(one, "k", other) is False
        assert await two.head("k") == Versioned(3, b"3")
        assert await one.truncate("k", 2) == 2
        assert await one.remove("k", version(3)) is True
        assert await two.head("k") is None
        assert await two.scan("k", 0, 10) == []
        assert await two.list_keys("") == ["kk"]
        assert await two.heads({"k": 3, "kk": 1}) == {"k": None}
        assert await two.head("kk") == Versioned(1, b"1")
        assert await two.remove("k", version(3)) is True  # repeated: the key is gone already
        assert await two.remove("never", version(0)) is True

    async def test_a_key_that_was_removed_begins_anew(self, handles: Handles) -> None:
        one, two = handles
        await grow(one, "k", 3)
        assert await removed(one, "k", 2) is True
        assert await two.compare_and_set("k", 2, b"late") is False
        assert await two.compare_and_set_many([]) is True
        await grow(two, "k", 2)
        assert await one.scan("k", 0, 10) == numbered(range(2))
        assert await one.remove("k", version(2)) is False

    async def test_remove_of_a_version_that_is_another(self, handles: Handles) -> None:
        """A key that was removed and made anew up to the same seqno stays, however late the removal comes."""
        one, two = handles
        await grow(one, "k", 3)
        assert await removed(one, "k", 2) is True
        await grow(two, "k", 2)
        assert await two.compare_and_set("k", 1, b"new") is True
        assert await one.remove("k", version(2)) is False
        assert await one.scan("k", 0, 10) == [*numbered(range(2)), Versioned(2, b"new")]
        assert await one.remove("k", Versioned(2, b"new")) is True
        assert await two.head("k") is None

    async def test_remove_races_with_compare_and_set(self, handles: Handles) -> None:
        """One of the two wins each time, and leaves nothing half done."""
        one, two = handles
        for seqno in range(30):
            key = f"k{seqno}"
            await grow(one, key, 2)
            gone, won = await asyncio.gather(removed(one, key, 1), two.compare_and_set(key, 1, b"2"))
            log = await one.scan(key, 0, 10)
            assert gone is not won
            assert log == ([] if gone else numbered(range(3)))
            assert (await two.head(key) is None) is gone

    async def test_remove_races_with_creation(self, handles: Handles) -> None:
        """A compare-and-set that makes the key anew writes version 0, or nothing."""
        one, two = handles
        for seqno in range(20):
            key = f"k{seqno}"
            await grow(one, key, 1)
            gone, created = await asyncio.gather(removed(one, key, 0), two.compare_and_set(key, None, b"new"))
            assert gone is True
            assert await one.scan(key, 0, 10) == ([Versioned(0, b"new")] if created else [])

    async def test_several_who_remove(self, handles: Handles) -> None:
        """All removals succeed, and none waits for ever, with a truncate beside them."""
        one, two = handles

        async def truncated(key: str) -> None:
            with suppress(ValueError):  # the key is gone
                await two.truncate(key, 25)

        for n in range(5):
            key = f"k{n}"
            await grow(one, key, 30)
            race = (removed(one, key, 29), truncated(key), removed(two, key, 29), removed(one, key, 29))
            assert [outcome for outcome in await asyncio.gather(*race) if outcome is not None] == [True] * 3
            assert await two.scan(key, 0, 100) == []
