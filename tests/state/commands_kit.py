"""Helpers that the tests of commands share."""

import json
from dataclasses import dataclass, field

from hypothesis import strategies as st

from aiopersist.state import diff as diffs
from aiopersist.state.command import Command, Commit, Context, Keep
from aiopersist.state.invariants import check_state, check_version
from aiopersist.state.lifecycle import Create
from aiopersist.state.model import Clock, State
from tests.state.values import SHARD, ZERO

LEASE_S = 10.0


@dataclass
class History:
    """A shard's versions: the writer's states beside those that a reader makes of the bytes."""

    state: State | None = None
    read: State | None = None
    now: float = 1000.0
    versions: list[bytes] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def run(self, command: Command) -> Commit | Keep:
        outcome = command(self.state, Context(now=self.now))
        if isinstance(outcome, Commit):
            self.write(outcome)
        return outcome

    def write(self, outcome: Commit) -> None:
        diff = diffs.diff_of(outcome.changes, self.state, commit=f"c{len(self.versions)}", at=self.now)
        after = diffs.apply(diff, self.state)
        check_version(diff, self.state, after)
        data = diffs.encode_diff(diff)
        json.loads(data)
        self.read = diffs.apply(diffs.decode_diff(data), self.read)
        assert self.read == after
        assert list(self.read.batches) == list(after.batches)
        check_state(after)
        self.state = after
        self.versions.append(data)
        self.states.append(after)

    @property
    def live(self) -> State:
        assert self.state is not None
        return self.state


def created(clock: Clock = Clock.LOGICAL) -> History:
    history = History()
    history.run(Create(SHARD, {"key": "str"}, ZERO, clock))
    return history


WRITERS, READERS = ("w1", "w2", "w3"), ("r1", "r2")


NAMES = st.sampled_from(WRITERS), st.sampled_from(READERS)
