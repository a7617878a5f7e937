"""One attempt to write a version, and the slot where a handle keeps it until its outcome is known."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aiopersist.errors import Indeterminate
from aiopersist.shard.register import Register
from aiopersist.state.command import Command
from aiopersist.state.model import State


class Unknowable(Indeterminate):
    """Whether the version was written is decided, but every proof of the outcome is gone."""


@dataclass(slots=True, eq=False)
class SentStatement:
    """The statement that writes one attempt, or several at once, and how often it was sent: the answer to
    a second sending says nothing about the first."""

    statement: asyncio.Task[bool] | None = None
    sent: int = 0


class Slot:
    """Where a handle keeps the one attempt whose outcome it does not know yet."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Attempt | None = None

    @property
    def busy(self) -> bool:
        """Whether an attempt must be settled before anything else."""
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
    commit: str
    data: bytes
    result: Any
    """The result of the command if the attempt happened."""
    sending: SentStatement = field(default_factory=SentStatement)
    happened: bool | None = None
    """Known once the attempt was settled."""

    @property
    def seqno(self) -> int:
        return 0 if self.expected is None else self.expected + 1
