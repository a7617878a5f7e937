"""Goal: after any insertions and compactions, the spine covers each batch once, in order, with few batches
and little work."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from aiopersist.state.spine import FUEL, Spine, is_contiguous, level_of

SHARES = st.floats(0, 1)


class Game:
    """A spine and, beside it, the hollow batches with their lengths."""

    def __init__(self) -> None:
        self.spine = Spine({}, 0)
        self.lengths: dict[int, int] = {}
        self.inserted = 0
        self.work = 0

    def insert(self, length: int) -> None:
        ordinal = self.inserted
        self.inserted += 1
        self.lengths[ordinal] = length
        done = len(self.spine.finished)
        self.spine.insert(ordinal, length)
        self.work += sum(batch.len for batch in self.spine.finished[done:])
        self.check()

    def replace(self, first: int, last: int, after: int) -> None:
        inside = [o for o in self.lengths if first <= o <= last]
        before = sum(self.lengths[o] for o in inside)
        for o in inside[1:]:
            del self.lengths[o]
        self.lengths[inside[0]] = after
        self.spine.replace(inside[0], inside[-1], before, after)
        self.check()

    def check(self) -> None:
        assert is_contiguous(self.spine.levels, list(self.lengths))
        found = list(self.spine.batches())
        assert sum(batch.len for batch in found) == sum(self.lengths.values())
        for batch in found:
            assert batch.len == sum(n for o, n in self.lengths.items() if batch.first <= o <= batch.last)

    def bound(self) -> float:
        return 2 * (math.log2(max(sum(self.lengths.values()), len(self.lengths), 2)) + 1)


@settings(max_examples=200)
@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 5000)), max_size=300))
def test_few_batches_and_little_work(lengths: list[int]) -> None:
    game = Game()
    total = 0
    for length in lengths:
        game.insert(length)
        total += max(length, 1)
        assert len(list(game.spine.batches())) <= 2 * (math.log2(total) + 2)
    assert game.work <= 2 * total * (math.log2(max(total, 2)) + 2)


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 300), st.floats(0, 1), st.floats(0, 1)), max_size=200
    )
)
def test_any_neighbours_may_become_one(steps: list[tuple[int, int, float, float]]) -> None:
    """Goal: compactions of finished merges, flushes of any neighbours, all at once, in any order."""
    game = Game()
    for kind, length, where, share in steps:
        if kind or not game.lengths:
            game.insert(length)
            continue
        ordinals = list(game.lengths)
        first = int(where * (len(ordinals) - 1))
        last = first + int(share * (len(ordinals) - 1 - first))
        inside = sum(game.lengths[o] for o in ordinals[first : last + 1])
        game.replace(ordinals[first], ordinals[last], int(inside * share))


def test_what_is_finished_is_compacted_to_one_and_the_rest_stays_small() -> None:
    """Goal: if every finished merge is compacted, the hollow batches are as few as the spine's."""
    game = Game()
    for n in range(3000):
        game.insert(10)
        finished, game.spine.finished = game.spine.finished, []
        for batch in finished:
            ends = {b.first: b.last for b in game.spine.batches()}
            if batch.first in game.lengths and batch.last in game.lengths:
                inside = sum(x for o, x in game.lengths.items() if batch.first <= o <= batch.last)
                game.replace(batch.first, batch.last, inside)
            assert ends
        assert len(game.lengths) <= 2 * math.log2((n + 2) * 10) + 2, n


def test_the_oldest_moves_down_when_it_shrinks() -> None:
    game = Game()
    game.insert(1000)
    game.insert(10)
    game.replace(0, 0, 5)
    (top,) = [game.spine.levels[max(game.spine.levels)]]
    assert max(game.spine.levels) == level_of(10)
    assert [b.len for b in top.batches] == [5, 10]
    assert top.due is not None and top.due <= game.spine.fuel + 15
    assert FUEL >= 4


def test_a_merge_is_finished_when_it_has_its_fuel() -> None:
    """Goal: not before, and not only when the level is needed: compactions would come late."""
    spine = Spine({}, 0)
    for ordinal in range(2):
        spine.insert(ordinal, 8)
    due = spine.levels[3].due
    assert due == spine.fuel + 16
    spine.insert(2, 1)
    assert (spine.fuel, spine.finished) == (due - FUEL, [])
    spine.insert(3, 1)
    assert [(batch.first, batch.last, batch.len) for batch in spine.finished] == [(0, 1, 16)]


def test_what_was_compacted_lies_at_the_level_of_its_size() -> None:
    for after, level in ((16, 4), (9, 4), (8, 3)):
        spine = Spine({}, 0)
        for ordinal in range(2):
            spine.insert(ordinal, 8)
        spine.replace(0, 1, 16, after)
        assert list(spine.levels) == [level]


def test_levels() -> None:
    assert [level_of(n) for n in (0, 1, 2, 3, 4, 5, 8, 9)] == [0, 0, 1, 2, 2, 3, 3, 4]
