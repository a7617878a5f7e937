"""Goal: the input of one compaction fits in its memory, and merged batches are not merged again soon."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.base.frontier import Antichain
from aiopersist.compact.local import bounded
from aiopersist.state.compaction import Spec, run_count
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


def spec(batches: list[tuple[int, int]]) -> Spec:
    """Neighbours, each of so many runs and so many updates per run."""
    return Spec({n: batch(n, runs, rows) for n, (runs, rows) in enumerate(batches)}, Antichain(0))


def batch(at: int, runs: int, rows: int) -> HollowBatch:
    parts = tuple(HollowPart(key=f"s/w/{at}-{n}", size=1, rows=rows, checksum="c") for n in range(runs))
    ends = [Antichain(at), Antichain(at + 1), Antichain(0)]
    return HollowBatch(lower=ends[0], upper=ends[1], since=ends[2], parts=parts, runs=tuple(range(1, runs)))


@pytest.mark.parametrize(
    ("batches", "runs_max", "expected"),
    [
        pytest.param([(1, 10)] * 4, 4, [0, 1, 2, 3], id="all"),
        pytest.param([(1, 90), (1, 10), (1, 10), (1, 10)], 3, [1, 2, 3], id="what was merged before waits"),
        pytest.param([(1, 10), (9, 10), (1, 5), (1, 5)], 3, [2, 3], id="what fits beside what does not"),
        pytest.param([(1, 10), (5, 10), (1, 10)], 2, [1], id="nothing fits: the one of the most runs"),
        pytest.param([(5, 10)], 8, [0], id="one of many runs"),
        pytest.param([(0, 0), (3, 10), (0, 0)], 3, [0, 1, 2], id="empty ones cost nothing"),
    ],
)
def test_which_batches_come_first(batches: list[tuple[int, int]], runs_max: int, expected: list[int]) -> None:
    assert list(bounded(spec(batches), runs_max).spec.inputs) == expected


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 1000)), min_size=1, max_size=20), st.integers(2, 6)
)
def test_whatever_comes_fits_and_ends(batches: list[tuple[int, int]], runs_max: int) -> None:
    """Goal: at most so many runs are read; the other runs are kept as they were; the result is one run."""
    found = dict(spec(batches).inputs)
    for _ in range(200):
        if len(found) == 1 and all(run_count(b) <= 1 for b in found.values()):
            return
        work = bounded(Spec(found, Antichain(0)), runs_max)
        chosen = list(work.spec.inputs)
        ordinals = list(found)
        start = ordinals.index(chosen[0])
        assert ordinals[start : start + len(chosen)] == chosen
        assert len(work.read) <= runs_max
        read = sum(part.rows for run in work.read for _, part in run)
        whole = sum(b.len for b in work.spec.inputs.values())
        assert read + sum(part.rows for part in work.kept) == whole
        assert len(chosen) > 1 or len(work.read) > 1
        for ordinal in chosen[1:]:
            del found[ordinal]
        runs = len(work.kept_runs) + 1
        found[chosen[0]] = batch(chosen[0], runs, max(whole // runs, 1))
    raise AssertionError("it does not end")


def test_the_work_of_many_runs_is_not_quadratic() -> None:
    """Goal: 256 equal runs, four at a time: four rounds of all, not 85."""
    found, total = dict(spec([(1, 100)] * 256).inputs), 0
    while len(found) > 1:
        work = bounded(Spec(found, Antichain(0)), 4)
        updates = sum(b.len for b in work.spec.inputs.values())
        total += updates
        first, *rest = work.spec.inputs
        for ordinal in rest:
            del found[ordinal]
        found[first] = batch(first, 1, updates)
    assert total <= 256 * 100 * 5
