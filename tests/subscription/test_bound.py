"""Goal: of updates that come in any order those of the earliest times are kept, as many as fit, and steps
divide them by time."""

import random

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.read.bound import EarliestUpdates

STEP, MEMORY = 400, 4000
ROW = 24  # bytes


def some_updates(numbers: list[int], times: list[int]) -> pa.Table:
    return pa.table([numbers, times, [1] * len(times)], ["key", "time", "diff"])


@pytest.mark.parametrize("seed", range(40))
def test_the_earliest_are_kept(seed: int) -> None:
    dice = random.Random(seed)
    last = dice.choice([0, 1, 3, 100, 2**63 - 1])
    times = [dice.randint(0, last) for _ in range(dice.randrange(1500))]
    upper = dice.choice([ap.Antichain(), ap.Antichain(min(last + 1, 2**63 - 1))])
    times = [time for time in times if ap.Antichain(time) < upper]
    earliest = EarliestUpdates(upper, STEP, MEMORY)
    position = 0
    while position < len(times):
        some = range(position, min(position + dice.randrange(1, 60), len(times)))
        earliest.add(some_updates(list(some), [times[number] for number in some]))
        position = some.stop
    assert earliest.size < MEMORY + 60 * ROW or len(set(times)) < 5
    assert earliest.upper == upper or earliest.size > MEMORY / 2 or len(set(times)) < 5
    kept = {number for number, time in enumerate(times) if ap.Antichain(time) < earliest.upper}
    found: set[int] = set()
    lower = ap.Antichain(0)
    for end in earliest.ends():
        tables = earliest.take(end)
        numbers = {number for table in tables for number in table.column("key").to_pylist()}
        inside = [times[number] for number in numbers]
        assert all(lower <= ap.Antichain(time) and ap.Antichain(time) < end for time in inside)
        assert len(inside) * ROW <= 2 * STEP or len(set(inside)) == 1
        found |= numbers
        lower = end
    assert (found, lower, earliest.size) == (kept, earliest.upper, 0)
