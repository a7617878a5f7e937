"""Goal: what a process remembers of the versions that it followed is what the versions themselves say; and
what it did not follow it does not claim to know."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from aiopersist.state import drops
from aiopersist.state.command import Command
from aiopersist.state.drops import Drops
from aiopersist.state.model import State
from aiopersist.state.names import live_parts
from aiopersist.state.trail import Trail
from tests.state.command_game import Game
from tests.state.test_commands import SHARD
from tests.state.test_compaction import batch, state


class Life(Game):
    """A life of a shard, with each of its states, and processes that follow it in steps of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.states: list[State] = [self.history.live]

    def step(self, command: Command) -> None:
        super().step(command)
        if self.history.live is not self.states[-1]:
            self.states.append(self.history.live)

    def trail(self, first: int, last: int) -> set[str]:
        trail = Trail(self.states[first])
        trail.add(self.history.versions[first : last + 1], SHARD)
        return trail.dropped


def followed(states: list[State], steps: random.Random) -> tuple[Drops, int]:
    """What is known after some of the states, and the newest of them that was seen."""
    found, at = Drops(), steps.randrange(max(len(states) // 2, 1))
    found.begin(states[at])
    while at < len(states) - 1 and steps.random() < 0.98:
        after = min(at + steps.choice([1, 1, 1, 1, 1, 1, 1, 2, 5]), len(states) - 1)
        if steps.random() < 0.02:
            found.begin(states[after])
        else:
            found.follow(states[at], states[after])
        at = after
    return found, at


def check_life(seed: int, known: Counter[bool]) -> None:
    life = Life(seed)
    life.play()
    rng = random.Random(seed)
    assert len(life.states) == len(life.history.versions)
    for _ in range(10):
        found, newest = followed(life.states, rng)
        for _ in range(10):
            first = rng.randrange(newest + 1)
            last = rng.randrange(first, newest + 1)
            if life.states[newest].collected > first or life.states[newest].finalized:
                continue  # it is collected, or nothing is left of it
            dropped = found.between(first, last)
            known[dropped is not None] += 1
            assert dropped is None or dropped == life.trail(first, last), (first, last, newest)
            assert dropped is None or not dropped & live_parts(life.states[last])


@pytest.mark.parametrize("seeds", [range(150)], ids=["lives"])
def test_what_was_followed_is_known(seeds: range) -> None:
    known: Counter[bool] = Counter()
    for seed in seeds:
        try:
            check_life(seed, known)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert known[True] > 1000 and known[False] > 1000, known


def after(before: State, seqno: int, ordinal: int) -> State:
    """A later version, at which a batch was replaced."""
    new = batch(100 + seqno, 101 + seqno, 1)  # its bounds name its blob
    return before.replace(seqno=seqno, dropped_at=seqno, batches={**before.batches, ordinal: new})


def test_a_jump_is_not_known() -> None:
    """Goal: a part that was added and dropped between two versions was never seen."""
    first = state(0, [3, 3])
    second = after(first, first.seqno + 1, 0)
    found = Drops()
    assert found.between(first.seqno, first.seqno) is None
    found.begin(first)
    found.follow(first, second)
    assert found.between(first.seqno, second.seqno) == {f"{SHARD}/w/0-0"}
    assert found.between(second.seqno, second.seqno) == set()
    far = after(second, second.seqno + 2, 1)
    found.follow(second, far)
    assert found.between(first.seqno, far.seqno) is found.between(second.seqno, far.seqno) is None
    assert found.between(far.seqno, far.seqno) == set()


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a process beside which nobody collects remembers some, then begins anew; what is collected
    goes."""
    monkeypatch.setattr(drops, "KEYS_MAX", 3)
    found, states = Drops(), [state(0, [3])]
    found.begin(states[0])
    for seqno in range(1, 6):
        states.append(after(states[-1], states[0].seqno + seqno, 0))
        found.follow(states[-2], states[-1])
    newest = states[-1].seqno
    assert found.between(states[0].seqno, newest) is None
    assert found.between(newest, newest) == set()
    found.begin(states[0])
    for before, now in pairwise(states[:3]):
        found.follow(before, now.replace(collected=before.seqno))
    assert found.between(states[0].seqno, states[2].seqno) == live_parts(states[1])


def test_a_part_that_another_batch_took_over_is_still_named() -> None:
    """Goal: a compaction that is bounded in runs keeps some parts as they are."""
    before = state(0, [3, 3])
    kept = before.batches[0].parts
    merged = before.batches[1].replace(parts=(*before.batches[1].parts, *kept))
    found = Drops()
    found.begin(before)
    seqno = before.seqno + 1
    found.follow(before, before.replace(seqno=seqno, dropped_at=seqno, batches={1: merged}))
    assert found.between(before.seqno, seqno) == set()
