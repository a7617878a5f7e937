"""What a stash is given is its own from then on, whatever its owner does with it."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

import aiopersist as ap
from aiopersist.stash import Stash, TypedCollection

PAIRS = [(1, [1]), (2, [2]), (3, [3])]


@pytest_asyncio.fixture
async def stash() -> AsyncIterator[Stash]:
    async with ap.stash.open("mem://") as stash:
        yield stash


def same_pair() -> Iterator[Any]:
    """The pairs, in one list that is filled anew for each."""
    pair: list[Any] = [0, []]
    for pair[:] in PAIRS:
        yield pair


def same_entry() -> Iterator[Any]:
    entry: list[Any] = [None, 0, 1]
    for entry[0] in same_pair():
        yield entry


@pytest.mark.parametrize("entries", [same_entry, lambda: ((pair, 0, 1) for pair in same_pair())])
async def test_entries_of_an_iterator_that_fills_one_list(stash: Stash, entries: Any) -> None:
    expected = [(pair, 0, 1) for pair in PAIRS]
    one, two = [await stash.collection(name, int, list[int]) for name in ("one", "two")]
    await stash.update_many(one, entries())
    assert await stash.iter(one) == expected
    batch = await two.make_batch(stash)
    batch.entries = entries()
    await stash.append([batch])
    assert await stash.iter(two) == expected


async def test_pairs_of_an_iterator_that_fills_one_list(stash: Stash) -> None:
    table: TypedCollection[int, list[int]] = TypedCollection("table", int, list[int])
    assert await table.insert_many_without_overwrite(stash, same_pair()) == dict(PAIRS)
    await table.upsert(stash, same_pair())
    assert await table.peek_one(stash) == dict(PAIRS)
