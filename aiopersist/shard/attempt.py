"""One attempt to write a version, and the slot of a handle that keeps it until its outcome is known."""

import asyncio
from typing import Any

from msgspec import Struct

from aiopersist.base.errors import Error, Indeterminate
from aiopersist.shard.register import Register
from aiopersist.state.command import Command, Commit, Context
from aiopersist.state.diff import Diff, apply, diff_of
from aiopersist.state.invariants import check_version
from aiopersist.state.model import State
from aiopersist.state.seal import sealed


class Unknowable(Indeterminate):
    """The outcome is decided, but every proof of it is gone."""


class Slot:
    """The place of the one attempt whose outcome the handle does not know yet."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Attempt | None = None

    @property
    def busy(self) -> bool:
        """Whether an attempt must be settled before anything else."""
        return self.pending is not None


class Attempt(Struct, eq=False):
    """A command for a shard, by the handle of the slot, and the version last made of it: one compare-and-set
    of version `expected + 1`."""

    register: Register
    command: Command
    slot: Slot
    before: State | None = None
    expected: int | None = None
    error: Error | None = None
    """The refusal of the command."""
    diff: Diff | None = None
    """The version to write; `None` if none is needed."""
    data: bytes = b""
    """The bytes of the version, as they are sent."""
    commit: str = ""
    after: State | None = None
    """The state after the version."""
    result: Any = None
    """The result of the command if the attempt happened."""
    statement: asyncio.Task[bool] | None = None
    """The task of the last sending, if it has one. All shards of a commit share it."""
    sent: int = 0
    """How often it was sent. The answer to a second sending tells nothing about the first."""
    happened: bool | None = None
    """Known once the attempt was settled."""

    @property
    def seqno(self) -> int:
        return 0 if self.expected is None else self.expected + 1

    def plan(self, now: float) -> bool:
        """Run the command on the newest known state, and encode the version that it needs, if any. Returns
        whether it is refused."""
        register = self.register
        self.before = state = register.state
        self.expected = None if state is None else state.seqno
        pins = register.pins
        pinned = min(pins) if pins else None
        outcome = self.command(state, Context(now, pinned, register.stack.clock.seen))
        self.result, self.diff, self.error = outcome.result, None, None
        if isinstance(outcome, Commit):
            self.diff = diff_of(outcome.changes, state, commit=register.stack.runtime.token(), at=now)
            self.data = sealed(self.diff, register.shard)
        else:
            self.error = outcome.error
        return self.error is not None

    def refusal(self) -> Error:
        """The refusal of the command, with the label of the shard."""
        error = self.error
        assert error is not None
        error.shard_id, error.label = self.register.shard, self.register.label_of()
        return error

    def take(self, diff: Diff) -> None:
        """Make the next state from `diff`, decoded from the bytes of the version, as readers do."""
        self.commit, self.after, self.sent, self.statement = diff.commit, apply(diff, self.before), 0, None
        check_version(diff, self.before, self.after)
