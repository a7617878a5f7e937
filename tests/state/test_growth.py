"""Goal: plans that are made on the loop take work in proportion to their input, not to its square."""

from collections.abc import Callable

import pytest

from aiopersist.base.frontier import Antichain
from aiopersist.parts.runs import plan_runs
from aiopersist.state.compaction import largest_inline_run
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.record import HollowPart
from tests.state.values import ZERO

FEW, MANY = 500, 2_000


class Counted(int):
    """An int that counts how often one of them is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other

    def __hash__(self) -> int:
        return hash(int(self))


def plan_of_runs(n: int) -> None:
    """A batch of one part per run."""
    parts = tuple(HollowPart(key=f"s/w/{number}", size=1, rows=1, checksum="c") for number in range(n))
    runs = tuple(map(Counted, range(1, n)))
    batch = HollowBatch(lower=ZERO, upper=Antichain(1), since=ZERO, parts=parts, runs=runs)
    assert len(plan_runs([(batch, part) for part in parts])) == n


def run_of_inline_batches(n: int) -> None:
    """A state of as many small batches."""
    part = HollowPart(inline=b"0", size=1, rows=1, checksum="c")
    batches = {
        Counted(number): HollowBatch(
            lower=Antichain(number), upper=Antichain(number + 1), since=ZERO, parts=(part,), runs=()
        )
        for number in range(n)
    }
    state = State(shard="s", seqno=n, commit="c", at=0.0, since=ZERO, upper=Antichain(n), batches=batches)
    assert len(largest_inline_run(state)) == n


@pytest.mark.parametrize("plan", [plan_of_runs, run_of_inline_batches])
def test_four_times_as_much_is_four_times_the_work(plan: Callable[[int], None]) -> None:
    compared = []
    for n in (FEW, MANY):
        Counted.compared = 0
        plan(n)
        compared.append(Counted.compared)
    assert compared[1] <= 8 * max(compared[0], FEW), compared
