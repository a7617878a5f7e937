"""Goal: times and frontiers are the documented partial order: each operation is compared with its
definition over a whole grid of times, with product times and frontiers of several elements."""

import copy
import itertools
import pickle
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiopersist as ap
from aiopersist.testing.strategies import frontiers, times
from tests.support.schemas import INT_MAX

GRID = {None: list(range(8)), 2: list(itertools.product(range(7), repeat=2))}
Shape = int | None

shapes = pytest.mark.parametrize("length", [None, 2], ids=["int", "product"])


def le(a: Any, b: Any) -> bool:
    """The partial order, once more."""
    return all(x <= y for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else a <= b


def up_set(frontier: ap.Antichain, length: Shape) -> set[Any]:
    """All times of the grid at or beyond the frontier: what a frontier *means*."""
    return {t for t in GRID[length] if any(le(e, t) for e in frontier.elements)}


# --- construction ------------------------------------------------------------------------------------


class Built(NamedTuple):
    id: str
    given: tuple[Any, ...]
    elements: tuple[Any, ...]
    text: str


BUILT = [
    Built("empty", (), (), "{}"),
    Built("one", (3,), (3,), "{3}"),
    Built("least of ints", (5, 3, 9, 3), (3,), "{3}"),
    Built("greatest time", (INT_MAX,), (INT_MAX,), f"{{{INT_MAX}}}"),
    Built("product", ((10, 1), (0, 11)), ((0, 11), (10, 1)), "{(0, 11), (10, 1)}"),
    Built("product, not minimal", ((1, 1), (1, 2), (0, 3), (2, 2)), ((0, 3), (1, 1)), "{(0, 3), (1, 1)}"),
    Built("repeated", ((1, 2), (1, 2)), ((1, 2),), "{(1, 2)}"),
    Built("length one", ((4,),), ((4,),), "{(4,)}"),
    Built(
        "length three", ((1, 2, 3), (3, 2, 1), (3, 3, 3)), ((1, 2, 3), (3, 2, 1)), "{(1, 2, 3), (3, 2, 1)}"
    ),
]


@pytest.mark.parametrize("case", BUILT, ids=lambda c: c.id)
def test_a_frontier_keeps_minimal_elements_in_order(case: Built) -> None:
    for order in itertools.permutations(case.given):
        frontier = ap.Antichain(*order)
        assert frontier.elements == case.elements
        assert repr(frontier) == str(frontier) == case.text
        assert frontier == ap.Antichain(*case.elements)
        assert hash(frontier) == hash(ap.Antichain(*case.elements))


def test_time_is_the_only_element() -> None:
    assert ap.Antichain(7).time == 7
    assert ap.Antichain((1, 2)).time == (1, 2)
    assert ap.Antichain().time is None
    with pytest.raises(ValueError, match=r"\{\(0, 1\), \(1, 0\)\}"):
        _ = ap.Antichain((0, 1), (1, 0)).time


@pytest.mark.parametrize(
    "bad",
    [
        (-1,), (2**63,), (True,), (1.0,), ("1",), (None,), ((),), ((1, -1),), ((1, 2**63),), ((1, True),),
        ([1, 2],), (1, (1,)), ((1,), (1, 2)), (1, (1, 2), 3), (0, -1),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_time_is_refused(bad: tuple[Any, ...]) -> None:
    with pytest.raises(ap.InvalidUsage) as caught:
        ap.Antichain(*bad)
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


def test_a_frontier_is_immutable_and_a_value() -> None:
    frontier = ap.Antichain((1, 2), (2, 1))
    with pytest.raises(AttributeError):
        frontier.elements = ()  # type: ignore[misc]
    with pytest.raises(AttributeError):
        del frontier.elements
    with pytest.raises(AttributeError):
        frontier.more = 1  # type: ignore[attr-defined]
    for same in (pickle.loads(pickle.dumps(frontier)), copy.copy(frontier), copy.deepcopy(frontier)):
        assert same == frontier
        assert hash(same) == hash(frontier)
    assert len({frontier, ap.Antichain((2, 1), (1, 2)), ap.Antichain()}) == 2
    assert ap.Antichain(3) != 3
    assert ap.Antichain(3) != ap.Antichain((3,))


# --- order -------------------------------------------------------------------------------------------


@shapes
@given(data=st.data())
def test_order_is_inclusion_of_what_lies_beyond(length: Shape, data: Any) -> None:
    """`a <= b` iff all that is beyond `b` is beyond `a`; so the empty frontier is the greatest."""
    a, b = data.draw(frontiers(length)), data.draw(frontiers(length))
    beyond_a, beyond_b = up_set(a, length), up_set(b, length)
    assert (a <= b) is (beyond_b <= beyond_a)
    assert (a < b) is (beyond_b < beyond_a)
    assert (a >= b) is (beyond_b >= beyond_a)
    assert (a > b) is (beyond_b > beyond_a)
    assert (a == b) is (beyond_a == beyond_b)
    assert a <= ap.Antichain()
    assert (ap.Antichain() <= a) is (a == ap.Antichain())


@shapes
@given(data=st.data())
def test_less_equal_and_less_than_a_time(length: Shape, data: Any) -> None:
    frontier, time = data.draw(frontiers(length)), data.draw(times(length))
    assert frontier.less_equal(time) is any(le(e, time) for e in frontier.elements)
    assert frontier.less_than(time) is any(le(e, time) and e != time for e in frontier.elements)


@shapes
@given(data=st.data())
def test_join_and_meet_are_intersection_and_union(length: Shape, data: Any) -> None:
    a, b = data.draw(frontiers(length)), data.draw(frontiers(length))
    assert up_set(a.join(b), length) == up_set(a, length) & up_set(b, length)
    assert up_set(a.meet(b), length) == up_set(a, length) | up_set(b, length)
    assert a.join(b) == b.join(a)
    assert a.meet(b) == b.meet(a)


@shapes
@given(data=st.data())
def test_advance_is_the_meet_of_joins(length: Shape, data: Any) -> None:
    """And means: the earliest time that every reader beyond the frontier takes for the same."""
    frontier, time = data.draw(frontiers(length, empty=False)), data.draw(times(length))
    advanced = ap.advance(time, frontier)
    readers = up_set(frontier, length)
    same = [t for t in GRID[length] if all(le(t, r) == le(time, r) for r in readers)]
    assert all(le(advanced, r) == le(time, r) for r in readers)
    if length is None:
        assert advanced == max(time, frontier.time)
    else:
        joined = [tuple(map(max, time, f)) for f in frontier.elements]
        assert advanced == tuple(map(min, *joined)) if len(joined) > 1 else advanced == joined[0]
    assert le(time, advanced)
    assert ap.advance(advanced, frontier) == advanced
    # Two times that no reader tells apart become one: that is what makes compaction sum them up.
    assert {ap.advance(t, frontier) for t in same} == {advanced}


def test_advance_over_several_elements() -> None:
    """Spelt out once: neither a join nor a meet of the elements alone."""
    frontier = ap.Antichain((0, 3), (2, 1))
    assert ap.advance((0, 0), frontier) == (0, 1)
    assert ap.advance((1, 0), frontier) == (1, 1)
    assert ap.advance((5, 0), frontier) == (5, 1)
    assert ap.advance((1, 5), frontier) == (1, 5)


def test_nothing_advances_to_the_empty_frontier() -> None:
    with pytest.raises(ap.InvalidUsage) as caught:
        ap.advance(3, ap.Antichain())
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize("time", [-1, 2**63, True, (1, -1), "3"], ids=repr)
def test_only_a_time_is_advanced(time: Any) -> None:
    with pytest.raises(ap.InvalidUsage) as caught:
        ap.advance(time, (3, 3) if isinstance(time, tuple) else 3)
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


@pytest.mark.parametrize(
    "mixed",
    [
        lambda: ap.Antichain(3).less_equal((3,)),
        lambda: ap.Antichain((3, 3)).less_equal(3),
        lambda: ap.Antichain((3, 3)).less_than((3, 3, 3)),
        lambda: ap.Antichain(3) <= ap.Antichain((3,)),
        lambda: ap.Antichain(3) < ap.Antichain((3, 4)),
        lambda: ap.Antichain(3).join(ap.Antichain((3,))),
        lambda: ap.Antichain(3).meet(ap.Antichain((3,))),
        lambda: ap.Antichain((1, 1)).join(ap.Antichain((3,))),
        lambda: ap.advance(3, ap.Antichain((3, 3))),
        lambda: ap.advance((3, 3), ap.Antichain(3)),
    ],
    ids=range(10),
)
def test_times_of_different_lengths_do_not_compare(mixed: Any) -> None:
    with pytest.raises(ap.InvalidUsage) as caught:
        mixed()
    assert caught.value.kind is ap.UsageKind.INVALID_TIME


def test_frontiers_compare_with_frontiers_only() -> None:
    for wrong in ("3", 3.0, True, None):
        with pytest.raises(TypeError):
            _ = ap.Antichain(3) <= wrong  # type: ignore[operator]


@pytest.mark.parametrize("time", [5, (1, 2)], ids=repr)
def test_a_time_is_taken_as_a_frontier(time: Any) -> None:
    frontier = ap.Antichain(time)
    low, high = (0, INT_MAX) if isinstance(time, int) else ((0, 0), (INT_MAX, INT_MAX))
    assert ap.advance(low, time) == ap.advance(low, frontier) == time
    assert ap.Antichain(low).join(time) == frontier
    assert ap.Antichain(high).meet(time) == frontier
    description = ap.Description(low, time, low)
    assert description == ap.Description(ap.Antichain(low), frontier, ap.Antichain(low))
    assert description.upper == frontier


def test_description_names_its_frontiers() -> None:
    description = ap.Description(ap.Antichain(1), ap.Antichain(), ap.Antichain(0))
    assert (description.lower, description.upper, description.since) == (
        ap.Antichain(1), ap.Antichain(), ap.Antichain(0),
    )  # fmt: skip
    lower, upper, since = description
    assert (lower, upper, since) == tuple(description)
    assert pickle.loads(pickle.dumps(description)) == description
    with pytest.raises(AttributeError):
        description.lower = ap.Antichain(2)  # type: ignore[misc]


@pytest.mark.parametrize(("low", "high"), [(3, 5), ((1, 2), (1, 3))], ids=["ints", "product times"])
def test_a_frontier_is_compared_with_a_time_as_with_its_frontier(low: Any, high: Any) -> None:
    """Goal: `reader.upper > 5` says what it looks like; from both sides."""
    a, b, everything = ap.Antichain(low), ap.Antichain(high), ap.Antichain()
    assert a < high and a <= high and a <= low and not a < low
    assert b > low and b >= low and b >= high and not b > high
    assert high > a and low < b and low <= a <= low
    assert everything > high and not everything <= high
    assert a != low
