"""What `Consensus.heads` and `Consensus.watch_together` must do; a part of `ConsensusConformance`."""

import asyncio
from collections.abc import Sequence

import pytest

from aiopersist.base.errors import Unsupported
from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.consensus import Consensus, Entry, Versioned

Handles = tuple[Consensus, Consensus]
HINT_TIMEOUT_S = 30.0


async def grow(consensus: Consensus, key: str, count: int) -> None:
    """Write the versions 0 to `count - 1` of `key`; the data of each is its seqno as text."""
    for seqno in range(count):
        assert await consensus.compare_and_set(key, seqno - 1 if seqno else None, b"%d" % seqno)


def numbered(seqnos: Sequence[int]) -> list[Versioned]:
    """Versions as `grow` writes them."""
    return [Versioned(seqno, b"%d" % seqno) for seqno in seqnos]


async def set_many(consensus: Consensus, entries: Sequence[Entry]) -> bool:
    """Write all entries or none; skip the test if the store cannot."""
    try:
        return await consensus.compare_and_set_many(entries)
    except Unsupported:
        pytest.skip("this store commits to one key at a time")


async def check_heads_of(handles: Handles, count: int) -> None:
    """One call finds the heads of so many keys, and which of them moved."""
    one, two = handles
    keys = [f"k{i}" for i in range(count)]
    for at in range(0, len(keys), 100):
        chunk = keys[at : at + 100]
        assert all(await asyncio.gather(*(one.compare_and_set(key, None, key.encode()) for key in chunk)))
    await grow(one, "other", 3)
    assert await two.heads(dict.fromkeys(keys)) == {key: Versioned(0, key.encode()) for key in keys}
    assert await one.compare_and_set("k7", 0, b"1")
    assert await two.heads(dict.fromkeys(keys, 0)) == {"k7": Versioned(1, b"1")}


class HeadsConformance:
    """See the header."""

    async def test_heads(self, handles: Handles) -> None:
        """Only the heads that moved are returned."""
        one, two = handles
        await grow(one, "a", 3)
        await grow(one, "b", 1)
        await grow(one, "empty", 1)
        seqnos = {"a": 1, "b": 0, "gone": 4, "absent": None, "empty": None}
        assert await two.heads(seqnos) == {"a": Versioned(2, b"2"), "gone": None, "empty": Versioned(0, b"0")}
        assert await two.heads({"a": 2, "b": 0, "empty": 0, "absent": None}) == {}
        assert await two.heads({"a": 5}) == {"a": Versioned(2, b"2")}
        assert await two.heads({}) == {}
        await one.truncate("a", 2)
        assert await one.compare_and_set("a", 2, b"3")
        assert await two.heads(dict.fromkeys(["a", "absent"])) == {"a": Versioned(3, b"3")}

    async def test_heads_of_many(self, handles: Handles) -> None:
        await check_heads_of(handles, 600)

    async def test_heads_are_of_now(self, handles: Handles) -> None:
        """Each head shows every write that returned before the call began."""
        one, two = handles
        keys = [f"k{i}" for i in range(10)]
        for key in keys:
            await grow(one, key, 1)
        for seqno in range(10):
            await asyncio.gather(*(one.compare_and_set(key, seqno, b"x") for key in keys))
            heads = await two.heads(dict.fromkeys(keys, seqno))
            assert heads == {key: Versioned(seqno + 1, b"x") for key in keys}

    async def test_a_likely_head(self, handles: Handles) -> None:
        """It is the head, whatever was likely."""
        one, two = handles
        assert await two.likely_head("k", 0) is None
        await grow(one, "k", 3)
        for seqno in (0, 2, 7):
            assert await two.likely_head("k", seqno) == Versioned(2, b"2")

    async def test_versions_up_to_a_head(self, handles: Handles) -> None:
        """All are there, or those from some version on where others were truncated."""
        one, two = handles
        await grow(one, "k", 40)
        assert await two.head("k") == Versioned(39, b"39")
        for first, last in ((0, 39), (25, 39), (38, 39), (39, 39), (3, 20), (7, 7)):
            assert await two.versions("k", first, last) == numbered(range(first, last + 1))
        assert await one.compare_and_set("k", 39, b"40")
        assert await one.truncate("k", 38) == 38
        versions = await two.versions("k", 10, 39)
        assert versions == numbered(range(versions[0].seqno, 40)) and versions[0].seqno <= 38

    async def test_watched_together(self, handles: Handles) -> None:
        """Each `add` of a key gives one hint, and no version slips in between two of them."""
        one, two = handles
        for key in ("a", "b", "c"):
            await grow(one, key, 1)
        watch = one.watch_together()
        for key in ("a", "b", "gone"):
            watch.add(key)
        watch.discard("gone")
        seen: dict[str, int] = {}
        for seqno in range(4):
            moving = "b" if seqno == 2 else "a"
            target = 1 + sum(1 for s in range(seqno) if ("b" if s == 2 else "a") == moving)
            hint = asyncio.ensure_future(watch.moved())
            await SYSTEM.sleep(0.02)
            assert await two.compare_and_set(moving, target - 1, b"x")
            async with asyncio.timeout(HINT_TIMEOUT_S):
                while seen.get(moving, 0) < target:
                    for key in await hint:
                        watch.add(key)
                        head = await one.head(key)
                        assert head is not None
                        seen[key] = head.seqno
                    hint = asyncio.ensure_future(watch.moved())
            hint.cancel()
        assert seen["a"] == 3 and seen["b"] == 1 and "c" not in seen and "gone" not in seen
        await watch.aclose()
        await watch.aclose()
