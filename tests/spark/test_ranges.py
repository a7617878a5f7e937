"""Goal: the ranges of a read are disjoint, cover every key, and hold about as many updates each; a hot key
does not make one task do all."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.spark.ranges import Block, KeyRange, divide


def covers(ranges: list[KeyRange]) -> bool:
    """Each key is in one range, or in all shares of one."""
    whole = [r._replace(share=0, shares=1) for r in ranges if r.share == 0]
    ends = [(r.lower, r.upper) for r in whole]
    met = all(a[1] == b[0] and a[1] is not None for a, b in pairwise(ends))
    shares = all(
        [r.share for r in ranges if (r.lower, r.upper) == end] == list(range(r0.shares))
        for end, r0 in zip(ends, [r for r in ranges if r.share == 0], strict=True)
    )
    rising = all(a[0] is None or a[0] < a[1] for a in ends if a[1] is not None)
    return ends[0][0] is None and ends[-1][1] is None and met and shares and rising


blocks = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 10), st.integers(1, 100)).map(
        lambda b: Block(b[0], b[0] + b[1], b[2])
    ),
    max_size=30,
)


@given(blocks, st.integers(1, 12))
def test_all_keys_are_covered_once(found: list[Block], tasks: int) -> None:
    ranges = divide(found, tasks)
    assert covers(ranges)
    assert len(ranges) <= 2 * tasks


def begun(ranges: list[KeyRange], found: list[Block]) -> list[float]:
    """Updates of the blocks that begin in each range, of a share its share."""
    return [
        sum(
            b.updates
            for b in found
            if (r.lower is None or b.lower >= r.lower) and (r.upper is None or b.lower < r.upper)
        )
        / r.shares
        for r in ranges
    ]


@pytest.mark.parametrize("runs", [1, 8])
def test_ranges_are_about_equal(runs: int) -> None:
    """Goal: also where every run covers all keys."""
    found = [Block(k * 10, k * 10 + 9, 1000) for _ in range(runs) for k in range(40)]
    sizes = begun(divide(found, 8), found)
    assert len(sizes) == 8
    assert max(sizes) <= 1.3 * min(sizes)


def test_a_hot_key_is_shared() -> None:
    found = [Block("a", "f", 100), *[Block("hot", "hot", 1000)] * 9, Block("x", "z", 100)]
    ranges = divide(found, 4)
    assert covers(ranges)
    hot = [r for r in ranges if r.shares > 1]
    assert {r.shares for r in hot} == {len(hot)}
    assert max(begun(ranges, found)) <= 1.5 * 9200 / 4


def test_what_is_not_known_is_one_range() -> None:
    assert divide([], 8) == [KeyRange()]
    assert divide([Block(None, None, 5), Block(3, None, 5)], 8) == [KeyRange()]
    assert divide([Block(1, 2, 10), Block(5, 6, 10)], 1) == [KeyRange()]


@pytest.mark.parametrize("kind", [str, bytes, float])
def test_keys_of_any_kind_that_has_an_order(kind: Any) -> None:
    keys: list[Any] = [
        f"{n:03}" if kind is str else b"%03d" % n if kind is bytes else n / 7 for n in range(30)
    ]
    found = [Block(key, key, 1) for key in keys]
    ranges = divide(found, 5)
    assert covers(ranges)
    assert begun(ranges, found) == [6.0] * 5
