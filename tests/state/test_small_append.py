"""Goal: the version of a small append that is made in one step is the one that the general way makes, of each
state of random lives; and where the general way refuses, or another rule bears, nothing is made."""

import random
from collections import Counter
from math import inf

import pytest

from aiopersist.frontier import Antichain
from aiopersist.state import diff as diffs
from aiopersist.state.command import Command, Commit, Context
from aiopersist.state.invariants import check_state, check_version
from aiopersist.state.model import Clock, State
from aiopersist.state.record import HollowPart
from aiopersist.state.seal import check_seal
from aiopersist.state.small_append import SmallAppend
from aiopersist.state.subscriptions import OpenSubscription
from aiopersist.state.writing import RegisterWriter
from tests.state.test_all_commands import Game
from tests.state.test_commands import ROOM, WRITERS, created


def part_of(rows: int, inline: bytes) -> HollowPart:
    return HollowPart(inline=inline, size=len(inline), rows=rows, checksum="c", schema_id=0)


class BothWays(Game):
    """Makes a small append of each state of a life in both ways, and writes none of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.history = created(Clock.LOGICAL if seed % 8 else Clock.WALL)
        self.apart = random.Random(seed)
        self.made: Counter[str] = Counter()

    def step(self, command: Command) -> None:
        self.compare(self.history.live)
        if (
            not isinstance(command, OpenSubscription) or self.apart.random() < 0.05
        ):  # else each shard has some
            super().step(command)

    def compare(self, state: State) -> None:
        rng, upper = self.apart, self.upper
        lower = upper + rng.choice([0, 0, 0, 0, 1, -1]) if 0 < upper < 2**60 else upper
        append = SmallAppend(
            rng.choice(WRITERS),
            "token",
            part_of(rng.choice([1, 2, 10, 100, 3000]), rng.randbytes(rng.randrange(60))),
            Antichain(lower),
            Antichain(lower + rng.randrange(4)),
            rng.choice([ROOM, 300]),
        )
        now, token = self.history.now, "token of 32 characters, and unique"
        version = append.version(state, now, token)
        if version is None:
            self.made["none"] += 1
            return
        outcome = append(state, Context(now=now))
        assert isinstance(outcome, Commit), "the general way refuses it"
        diff = diffs.diff_of(outcome.changes, state, commit=version.commit, at=now)
        after = diffs.apply(diff, state)
        check_version(diff, state, after)
        read = diffs.decode_diff(version.data)
        assert read == diff
        assert read.changes.model_fields_set == diff.changes.model_fields_set
        assert version.after == check_state(after)
        for name in diffs.MAPS:
            assert list(getattr(version.after, name)) == list(getattr(after, name)), name
        assert diffs.decode_commit(version.data) == version.commit
        assert version.commit.startswith(token)
        check_seal(version.data, version.commit, state.shard)
        assert append.happened(after)
        self.made["both"] += 1


@pytest.mark.parametrize("seeds", [range(60)], ids=["lives"])
def test_both_ways_make_the_same_version(seeds: range) -> None:
    made: Counter[str] = Counter()
    for seed in seeds:
        game = BothWays(seed)
        try:
            game.play()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        made += game.made
    assert made["both"] > 200 and made["none"] > 200, made


def test_what_json_cannot_say_is_left_to_the_general_way() -> None:
    history = created()
    history.run(RegisterWriter("w1", 60.0))
    append = SmallAppend("w1", "t", part_of(1, b"x"), Antichain(0), Antichain(1), ROOM)
    assert append.version(history.live, history.now, "c") is not None
    endless = history.live.writers["w1"].replace(lease_s=inf)
    state = history.live.replace(writers={"w1": endless})
    assert append.version(state, history.now, "c") is None
