"""The part of `StashConformance` about `append`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from aiopersist.base.errors import InvalidUpdate
from aiopersist.base.frontier import Antichain, frontier
from aiopersist.stash import AppendBatch, StaleLower, Stash, StashCollection, StashError

K = TypeVar("K")
V = TypeVar("V")
Collection = StashCollection[str, int]

EMPTY = Antichain()


@contextmanager
def refused(*texts: str, kind: type[StashError] = StashError, fenced: bool = False) -> Iterator[None]:
    """Expect a refusal whose message contains all of `texts`."""
    with pytest.raises(kind) as caught:
        yield
    assert caught.value.is_unrecoverable is fenced
    assert [text for text in texts if text not in str(caught.value)] == [], str(caught.value)


async def visible(stash: Stash, *collections: StashCollection[Any, Any]) -> list[Any]:
    """All that readers see of the collections: entries (`None` if they cannot be read), since and upper."""
    seen = []
    for c in collections:
        since, upper = await stash.since(c), await stash.upper(c)
        seen.append((await stash.iter(c) if since.elements else None, since, upper))
    return seen


async def sealed(stash: Stash, c: StashCollection[K, V], changes: list[tuple[K, V, int]]) -> None:
    """Add each `(key, val, diff)` at the current upper, and seal that time."""
    time = (await stash.upper(c)).time
    assert isinstance(time, int)
    await stash.update_many(c, [((key, val), time, diff) for key, val, diff in changes])
    await stash.seal(c, time + 1)


# Changes that make a batch illegal, for a collection with since {2} and upper {4}.
BAD_BATCHES: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "an older lower": ({"lower": 3}, StaleLower),
    "a later lower": ({"lower": 5}, StaleLower),
    "an empty lower": ({"lower": EMPTY, "upper": EMPTY}, StaleLower),
    "an upper that goes back": ({"upper": 3, "compact": 2}, StashError),
    "a since that goes back": ({"compact": 1}, StashError),
    "a since beyond upper": ({"compact": 6}, StashError),
    "an empty since": ({"compact": EMPTY}, StashError),
    "an entry before lower": ({"entries": [(("z", 1), 4, 1), (("z", 1), 3, 1)]}, StashError),
    "a bad key": ({"entries": [(("z", 1), 4, 1), ((b"z", 1), 4, 1)]}, InvalidUpdate),
    "a bad val": ({"entries": [(("z", 1), 4, 1), (("z", "1"), 4, 1)]}, InvalidUpdate),
    "a bad time": ({"entries": [(("z", 1), 2**63, 1)]}, InvalidUpdate),
    "a bad diff": ({"entries": [(("z", 1), 4, 2**63)]}, InvalidUpdate),
    "no collection": ({"collection_id": 2**40}, StashError),
}


def batch(c: Collection, entries: Sequence[Any] = (), **changes: Any) -> AppendBatch:
    """A legal batch for a collection with upper {4}, apart from `changes`."""
    good = AppendBatch(c.id, lower=4, upper=5, compact=4, timestamp=4, entries=list(entries))
    return replace(good, **changes)


async def at_four(stash: Stash, other: Stash, *names: str) -> list[Collection]:
    """Collections that both handles have opened, with one entry, since {2} and upper {4}."""
    collections = []
    for name in names:
        c = await stash.collection(name, str, int)
        assert await other.collection(name, str, int) == c
        await stash.update(c, ("a", 1), 3, 1)
        await stash.seal(c, 4)
        await stash.compact(c, 2)
        collections.append(c)
    return collections


class StashAppend:
    """Needs the fixtures `stash` and `other`: two handles on one stash that do not fence each other."""

    async def test_append(self, stash: Stash, other: Stash) -> None:
        """Entries may lie beyond upper; since may go up to the new upper; reads are consolidated."""
        a, b, c = await at_four(stash, other, "a", "b", "c")
        entries = [(("a", 1), 4, -1), (("b", 2), 9, 1), (("b", 2), 9, 1)]
        await stash.append(
            [batch(b, upper=EMPTY, compact=2), batch(a, entries, upper=Antichain(7), compact=7)]
        )
        assert await visible(other, a) == [([(("b", 2), 9, 2)], Antichain(7), Antichain(7))]
        assert await visible(other, b) == [([(("a", 1), 3, 1)], Antichain(2), EMPTY)]
        await other.append([batch(c, upper=4)])
        assert await visible(stash, c) == [([(("a", 1), 4, 1)], Antichain(4), Antichain(4))]
        await other.append([batch(c, [(("x", 1), 4, 1)], upper=EMPTY, compact=EMPTY)])
        assert (await stash.since(c), await stash.upper(c)) == (EMPTY, EMPTY)

    @pytest.mark.parametrize(("changes", "kind"), BAD_BATCHES.values(), ids=BAD_BATCHES)
    async def test_a_bad_batch_anywhere_changes_nothing(
        self, stash: Stash, other: Stash, changes: dict[str, Any], kind: type[Exception]
    ) -> None:
        """Wherever the bad batch stands, no collection changes, and the good batches can follow."""
        a, b, bad = collections = await at_four(stash, other, "a", "b", "bad")
        before = await visible(other, *collections)
        good = [batch(a, [(("a", 1), 4, -1)], upper=EMPTY), batch(b, [(("b", 2), 8, 1)], upper=6)]
        for position in range(3):
            with pytest.raises(kind) as caught:
                await stash.append([*good[:position], batch(bad, **changes), *good[position:]])
            message = str(caught.value)
            assert "collection_id" in changes or "'bad'" in message
            if isinstance(error := caught.value, StashError) and "collection_id" not in changes:
                assert ("{4}" if kind is StaleLower else "{2}") in message and not error.is_unrecoverable
            if isinstance(error, StaleLower):
                lower = frontier(changes["lower"])
                assert (error.collection, error.lower, error.upper) == ("bad", lower, Antichain(4))
                assert str(lower) in message
            assert await visible(other, *collections) == before
        await other.append([*good, batch(bad)])
        assert [await stash.upper(c) for c in collections] == [EMPTY, Antichain(6), Antichain(5)]

    async def test_a_collection_is_appended_to_once(self, stash: Stash, other: Stash) -> None:
        a, b = await at_four(stash, other, "a", "b")
        before = await visible(other, a, b)
        for again in (batch(a), batch(a, lower=5, upper=6)):
            with refused("'a'"):
                await stash.append([batch(a), batch(b), again])
        assert await visible(other, a, b) == before

    async def test_append_wants_the_collection_to_be_known(self, stash: Stash, other: Stash) -> None:
        """Each opener must have called `collection` for it; other calls do not need that."""
        a = await stash.collection("a", str, int)
        b = await other.collection("b", str, int)
        batches = [await c.make_batch(other) for c in (b, a)]
        with refused():
            await other.append(batches)
        assert await visible(stash, a, b) == [([], Antichain(0), Antichain(0))] * 2
        await other.collection("a", str, int)
        await other.append(batches)
        assert await visible(stash, a, b) == [([], Antichain(0), Antichain(1))] * 2

    async def test_of_two_appends_one_comes_first(self, stash: Stash, other: Stash) -> None:
        a, b = await at_four(stash, other, "a", "b")
        mine, theirs = [await c.make_batch(s) for c, s in ((a, stash), (a, other))]
        a.append_to_batch(mine, "m", 1, 1)
        a.append_to_batch(theirs, "t", 1, 1)
        await other.append([theirs])
        with refused("'a'", "{4}", "{5}", kind=StaleLower):
            await stash.append([await b.make_batch(stash), mine])
        assert await stash.upper(b) == Antichain(4)
        assert await stash.peek_one(a) == {"a": 1, "t": 1}

    async def test_make_batch(self, stash: Stash, other: Stash) -> None:
        (c,) = await at_four(stash, other, "c")
        new_batch = await c.make_batch(other)
        assert new_batch == batch(c, lower=Antichain(4), upper=Antichain(5), compact=Antichain(4))
        c.append_to_batch(new_batch, "b", 7, 2)
        new_batch.timestamp, new_batch.upper = 6, Antichain(9)
        c.append_to_batch(new_batch, "c", 8, -1)
        assert new_batch.entries == [(("b", 7), 4, 2), (("c", 8), 6, -1)]
        await other.append([new_batch])
        expected = [(("a", 1), 4, 1), (("b", 7), 4, 2), (("c", 8), 6, -1)]
        assert await visible(stash, c) == [(expected, Antichain(4), Antichain(9))]

    async def test_a_big_append_is_as_atomic(self, stash: Stash, other: Stash) -> None:
        a, b = await at_four(stash, other, "a", "b")
        before = await visible(other, a, b)
        many = [((f"{key:05}", key), 4, 1) for key in range(9000)]
        with refused("'b'", kind=StaleLower):
            await stash.append([batch(a, many), batch(b, many, lower=3)])
        bad: Any = (("z", "1"), 4, 1)
        with pytest.raises(InvalidUpdate) as caught:
            await stash.update_many(a, [*many, bad])
        assert caught.value.row == len(many)
        assert await visible(other, a, b) == before
        await stash.append([batch(a, many[::-1]), batch(b, upper=4)])
        assert await other.iter(a) == [*many, (("a", 1), 4, 1)]
