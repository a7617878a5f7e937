"""Goal: the plan of a copy takes each batch that is new once, says where times tell no more what is new, and
ends each step where the copy can be read."""

from typing import Any

import pytest

from aiopersist.backup.plan import is_before, is_readable, plan_copy
from aiopersist.base.errors import OpaqueMismatch
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import Commit, Context, Keep
from aiopersist.state.copying import CopyMark, MoveCopy, mark_of, opaque_of
from aiopersist.state.model import CriticalReader, HollowBatch, State
from aiopersist.state.record import HollowPart

F = Antichain
PART = HollowPart(key="s/w/p.parquet", size=100, rows=10, checksum="")


def state(since: int, *bounds: tuple[int, int, int], **more: Any) -> State:
    """A source with batches of these lowers, uppers and sinces."""
    batches = {
        n: HollowBatch(lower=F(low), upper=F(up), since=F(batch_since), parts=(PART,))
        for n, (low, up, batch_since) in enumerate(bounds)
    }
    upper = F(bounds[-1][1]) if bounds else F(0)
    return State(shard="s", seqno=9, commit="c", at=0.0, since=F(since), upper=upper, batches=batches, **more)


def planned(source: State, upper: int, step_bytes: int = 10**9) -> list[tuple[int, Any, Any, bool, bool]]:
    return [
        (len(step.batches), step.lower.time, step.upper.time, step.is_exact, step.replaces)
        for step in plan_copy(source, F(upper), step_bytes)
    ]


@pytest.mark.parametrize(
    ("source", "upper", "expected"),
    [
        pytest.param(state(0), 0, [], id="nothing was written"),
        pytest.param(state(0, (0, 5, 0)), 0, [(1, 0, 5, True, False)], id="the first"),
        pytest.param(state(0, (0, 5, 0)), 5, [], id="nothing new"),
        pytest.param(state(0, (0, 5, 0)), 7, [], id="the copy is ahead"),
        pytest.param(state(3, (0, 5, 3)), 0, [(1, 0, 5, False, False)], id="times were moved"),
        pytest.param(state(0, (0, 5, 0), (5, 9, 0)), 5, [(1, 5, 9, True, False)], id="a new batch"),
        pytest.param(state(7, (0, 5, 7), (5, 9, 7)), 5, [(1, 5, 9, False, False)], id="moved, and apart"),
        pytest.param(state(4, (0, 9, 4)), 5, [(1, 5, 9, True, False)], id="across, and times tell"),
        pytest.param(state(5, (0, 9, 5)), 5, [(1, 5, 9, False, True)], id="across, moved onto the upper"),
        pytest.param(
            state(8, (0, 9, 8), (9, 12, 0)), 5, [(2, 5, 12, False, True)], id="across, moved beyond"
        ),
    ],
)
def test_what_is_new(source: State, upper: int, expected: Any) -> None:
    assert planned(source, upper) == expected


def test_steps_end_where_the_copy_can_be_read() -> None:
    source = state(12, (0, 5, 0), (5, 10, 0), (10, 15, 0), (15, 20, 0))
    assert planned(source, 0, 1) == [(3, 0, 15, True, False), (1, 15, 20, True, False)]
    assert all(is_readable(source.since, step.upper) for step in plan_copy(source, F(0), 1))
    gone = state(30, (0, 5, 0), (5, 10, 0))
    assert planned(gone, 0, 1) == [(2, 0, 10, True, False)]


def test_a_replacement_goes_beyond_what_the_copy_has() -> None:
    source = state(6, (0, 3, 6), (3, 8, 6), (8, 9, 0))
    assert planned(source, 5, 1) == [(2, 5, 8, False, True), (1, 8, 9, True, False)]


@pytest.mark.parametrize(
    ("since", "upper", "expected"),
    [
        (F(4), F(5), True),
        (F(5), F(5), False),
        (F(6), F(5), False),
        (F(0), F(0), True),
        (F((0, 0)), F((4, 0)), True),
        (F((0, 7)), F((4, 0)), True),
        (F((0, 1)), F((1, 1)), False),
        (F((2, 2)), F((4, 0), (0, 4)), True),
        (F((2, 4)), F((4, 0), (0, 4)), False),
    ],
)
def test_before(since: Antichain, upper: Antichain, expected: bool) -> None:
    """Goal: by the definition too, on all small times: none that is before the upper is advanced onto it."""
    from itertools import product

    from aiopersist.base.frontier import advance

    assert is_before(since, upper) is expected
    if expected:
        first = upper.elements[0]
        times = product(range(7), repeat=2) if isinstance(first, tuple) else range(12)
        assert not [t for t in times if not upper.less_equal(t) and upper.less_equal(advance(t, since))]


def test_a_mark_moves_only_with_the_copy() -> None:
    """Goal: who has written a copy is not made a copier by a later move of since."""
    mark = CriticalReader(since=F(0), opaque=opaque_of(F(5)))
    copy, written = (
        state(0, (0, upper, 0), critical={mark_of("x"): mark}) for upper in (5, 6)
    )  # fmt: skip
    move = MoveCopy(CopyMark(mark_of("x"), F(3), is_exact=True))
    done = move(copy, Context(now=1.0))
    assert isinstance(done, Commit)
    assert done.changes.since == F(3)
    refused = move(written, Context(now=1.0))
    assert isinstance(refused, Keep)
    assert isinstance(refused.error, OpaqueMismatch)
