"""One attempt to write a version, and the place where a handle keeps it until its outcome is known."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiopersist.errors import Indeterminate
from aiopersist.shard.register import Register
from aiopersist.state.command import Command
from aiopersist.state.diff import Diff
from aiopersist.state.model import State


class Unknowable(Indeterminate):
    """It was decided whether the version was written, and every proof of how is gone."""


@dataclass(slots=True, eq=False)
class Sending:
    """The statement that writes an attempt, or several at once, and how often it was sent: an answer to
    a second sending says nothing of the first."""

    statement: asyncio.Task[bool] | None = None
    sent: int = 0


class Slot:
    """A handle's place for the one attempt whose outcome is not known yet."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Attempt | None = None

    @property
    def busy(self) -> bool:
        """Whether an attempt is to be settled before anything else."""
        return self.pending is not None


@dataclass(slots=True, eq=False)
class Attempt:
    """One compare-and-set of version `expected + 1`."""

    register: Register
    command: Command
    slot: Slot
    before: State | None
    after: State
    expected: int | None
    diff: Diff
    data: bytes
    result: Any
    """What the command says happened, if this is what happened."""
    sending: Sending = field(default_factory=Sending)
    happened: bool | None = None
    """Known once it was settled."""

    @property
    def seqno(self) -> int:
        return 0 if self.expected is None else self.expected + 1
