"""The part of the suite for consensus stores about races: what a loser learns, and wishes to go first."""

import pytest

from aiopersist.base.runtime import SYSTEM
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.testing.storage.heads import Handles, grow, numbered, set_many

LONG_S = 60.0


def _skip_without_wishes(consensus: Consensus) -> None:
    if type(consensus).wish is Consensus.wish:
        pytest.skip("this store keeps no wishes")


def _skip_without_newer(consensus: Consensus) -> None:
    if getattr(consensus.newer, "__func__", None) is Consensus.newer:
        pytest.skip("the answers of this store tell no newer head")


class NewerConformance:
    """Inherited by `ConsensusConformance`. Skipped for a store whose answers tell no heads."""

    async def test_who_loses_hears_to_what(self, handles: Handles) -> None:
        one, two = handles
        _skip_without_newer(one)
        await grow(one, "k", 1)
        assert one.newer("k") is None, "nothing was lost"
        for seqno in (1, 2):
            assert await two.compare_and_set("k", seqno - 1, b"%d" % seqno)
        assert not await one.compare_and_set("k", 0, b"mine")
        assert one.newer("k") == Versioned(2, b"2")
        assert one.newer("k") is None, "it is told once"
        assert not await one.compare_and_set("k", 0, b"mine")
        assert await one.compare_and_set("k", 2, b"3")
        assert one.newer("k") is None, "the last one was won"

    async def test_who_loses_several_hears_which_have_moved(self, handles: Handles) -> None:
        one, two = handles
        _skip_without_newer(one)
        await grow(one, "a", 1)
        await grow(one, "b", 1)
        assert await two.compare_and_set("b", 0, b"1")
        assert not await set_many(one, [Entry("a", 0, b"a1"), Entry("b", 0, b"b1")])
        assert (one.newer("a"), one.newer("b")) == (None, Versioned(1, b"1"))


class WishesConformance:
    """Inherited by `ConsensusConformance`. Skipped for a store that keeps no wishes."""

    async def test_the_next_compare_and_set_shows_the_wish_of_another(self, handles: Handles) -> None:
        one, two = handles
        _skip_without_wishes(one)
        await grow(one, "k", 2)
        await grow(one, "other", 1)
        assert one.stand_back_s("k", "near", 0.0) == 0
        await two.wish(["k"], "far", LONG_S, 1.0)
        assert await one.compare_and_set("k", 1, b"2")
        assert await one.compare_and_set("other", 0, b"1")
        assert 0 < one.stand_back_s("k", "near", 0.0) <= LONG_S
        assert one.stand_back_s("k", "far", 0.0) == 0, "it is its own"
        assert one.stand_back_s("other", "near", 0.0) == 0

    async def test_of_several_wishes_the_longest_counts_of_those_that_waited_for_longer(
        self, handles: Handles
    ) -> None:
        one, two = handles
        _skip_without_wishes(one)
        await grow(one, "k", 1)
        await two.wish(["k"], "far", LONG_S, 200.0)
        await two.wish(["k"], "farther", 2 * LONG_S, 100.0)
        assert await one.compare_and_set("k", 0, b"1")
        assert LONG_S < one.stand_back_s("k", "near", 50.0) <= 2 * LONG_S
        assert 0 < one.stand_back_s("k", "farther", 150.0) <= LONG_S
        assert one.stand_back_s("k", "far", 250.0) == 0

    async def test_who_wishes_stands_behind_those_that_wished_before(self, handles: Handles) -> None:
        one, two = handles
        _skip_without_wishes(one)
        await grow(one, "k", 1)
        await two.wish(["k"], "far", LONG_S, 100.0)
        await one.wish(["k"], "near", 2 * LONG_S, 0.0)
        wait_s = one.stand_back_s("k", "near", 50.0)
        assert wait_s == 0 or 0 < wait_s <= LONG_S, "a store need not tell it before a compare-and-set"
        assert await one.compare_and_set("k", 0, b"1")
        assert 0 < one.stand_back_s("k", "near", 50.0) <= LONG_S
        assert one.stand_back_s("k", "far", 150.0) == 0

    async def test_a_wish_for_several_keys_is_shown_by_a_compare_and_set_of_several(
        self, handles: Handles
    ) -> None:
        one, two = handles
        _skip_without_wishes(one)
        await grow(one, "a", 1)
        await grow(one, "b", 1)
        await two.wish(["a", "b", "missing"], "far", LONG_S, 1.0)
        assert await set_many(one, [Entry("a", 0, b"1"), Entry("b", 0, b"1"), Entry("new", None, b"0")])
        assert all(0 < one.stand_back_s(key, "near", 0.0) <= LONG_S for key in ("a", "b"))
        assert one.stand_back_s("new", "near", 0.0) == 0

    async def test_a_wish_is_over_when_it_is_withdrawn_or_its_time_has_passed(self, handles: Handles) -> None:
        one, two = handles
        _skip_without_wishes(one)
        await grow(one, "k", 1)
        await two.wish(["k"], "far", LONG_S, 1.0)
        await two.wish(["k"], "far", 0.0, 0.0)
        assert await one.compare_and_set("k", 0, b"1")
        assert one.stand_back_s("k", "near", 0.0) == 0
        await two.wish(["k"], "far", 0.05, 1.0)
        assert await one.compare_and_set("k", 1, b"2")
        await SYSTEM.sleep(0.1)
        assert one.stand_back_s("k", "near", 0.0) == 0

    async def test_a_wish_decides_nothing_and_is_no_version(self, handles: Handles) -> None:
        one, two = handles
        _skip_without_wishes(one)
        await grow(one, "k", 4)
        for who in ("far", "farther"):
            await two.wish(["k", "missing"], who, LONG_S, 1.0)
        assert await one.compare_and_set("k", 3, b"4")
        assert await one.compare_and_set("k", 3, b"4") is False
        assert await one.list_keys("") == ["k"]
        assert await two.head("k") == Versioned(4, b"4")
        assert await two.scan("k", 0, 100) == numbered(range(5))
        assert await two.head("missing") is None
        assert await one.truncate("k", 2) == 2
        assert await two.scan("k", 0, 100) == numbered(range(2, 5))
        await two.wish(["k"], "far", LONG_S, 1.0)
        assert await one.compare_and_set("k", 4, b"5")
