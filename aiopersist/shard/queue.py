"""The queue of a group commit: calls that wait at the same moment share a commit.

One task, the *leader*, carries out one group after the other while calls wait; meanwhile the next group
gathers. So a single call does not wait for others. The leader is a task of the client: a cancelled caller
does not affect the others.

The owner of the queue decides which calls make a group, and carries it out.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Generic, TypeVar

from aiopersist.base.supervisor import Supervisor

T = TypeVar("T")

GATHER_TURNS = 4  # turns of the loop: a caller may need some from an answer to its next call


class GroupQueue(Generic[T]):
    """See the header. `carry_out` takes a group and carries it out. If it returns `False`, no group was
    ready, and the leader ends until `begin`."""

    def __init__(
        self, supervisor: Supervisor, name: str, carry_out: Callable[[], Awaitable[bool | None]]
    ) -> None:
        self._supervisor = supervisor
        self._runtime = supervisor.failures.runtime
        self._name = name
        self._carry_out = carry_out
        self._leader: asyncio.Task[None] | None = None
        self.waiting: dict[T, None] = {}
        """The waiting calls, in order."""

    def add(self, call: T) -> None:
        """Add a call to the queue."""
        self.waiting[call] = None
        self.begin()

    def begin(self) -> None:
        """Carry out the waiting calls, from the next turn of the loop on: so calls of this turn join."""
        if self._leader is None or self._leader.done():
            self._leader = self._supervisor.spawn(self._lead(), self._name)

    async def _lead(self) -> None:
        while self.waiting and await self._carry_out() is not False:
            await self._gathered()

    async def _gathered(self) -> None:
        """Wait some turns for callers that continue after the answers of the last group. Otherwise the few
        calls that missed the last group would go first, the others after them, and so on for ever."""
        for _ in range(GATHER_TURNS):
            waiting = len(self.waiting)
            if not waiting:
                return
            await self._runtime.sleep(0)
            if len(self.waiting) <= waiting:
                return

    def take(self, most: int | None = None) -> list[T]:
        """Remove and return the first calls, at most `most`."""
        if most is None or most >= len(self.waiting):
            calls, self.waiting = list(self.waiting), {}
            return calls
        calls = list(islice(self.waiting, most))
        for call in calls:
            del self.waiting[call]
        return calls

    def withdraw(self, call: T) -> bool:
        """Remove a call; returns whether it was waiting."""
        return call in self.waiting and self.waiting.pop(call) is None

    async def idle(self, timeout_s: float) -> None:
        """Wait until no group is carried out, at most so long."""
        if self._leader is not None and not self._leader.done():
            await asyncio.wait([self._leader], timeout=timeout_s)

    async def stop(self) -> None:
        """Cancel the group that is carried out."""
        if self._leader is not None and not self._leader.done():
            self._leader.cancel()
            await asyncio.wait([self._leader])
