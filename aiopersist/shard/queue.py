"""The queue of a group commit: calls that wait at the same moment share a commit.

One task, the *leader*, carries out one group after the other while calls wait; the next group gathers
meanwhile. So a call alone waits for nobody. It is a task of the client: a caller that is cancelled takes
nothing from the others.

What a group is, and how it is carried out, the owner of the queue says.
"""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Generic, TypeVar

from aiopersist.base.supervisor import Supervisor

T = TypeVar("T")

GATHER_TURNS = 4  # of the loop: a call may take some from an answer to the next call


class GroupQueue(Generic[T]):
    """See the header. `carry_out` takes a group and carries it out. `False`: none was ready, so the leader
    ends, until `begin`."""

    def __init__(
        self, supervisor: Supervisor, name: str, carry_out: Callable[[], Awaitable[bool | None]]
    ) -> None:
        self._supervisor = supervisor
        self._runtime = supervisor.failures.runtime
        self._name = name
        self._carry_out = carry_out
        self._leader: asyncio.Task[None] | None = None
        self.waiting: dict[T, None] = {}
        """The calls, in their order."""

    def add(self, call: T) -> None:
        """It waits from now on."""
        self.waiting[call] = None
        self.begin()

    def begin(self) -> None:
        """Carry out what waits, from the next turn of the loop on: calls of this one belong to the group."""
        if self._leader is None or self._leader.done():
            self._leader = self._supervisor.spawn(self._lead(), self._name)

    async def _lead(self) -> None:
        while self.waiting and await self._carry_out() is not False:
            await self._gathered()

    async def _gathered(self) -> None:
        """Where calls wait, those come, too, that go on with the answers of the last group. Else the few that
        missed it would go by themselves, the others after them, and so for ever."""
        for _ in range(GATHER_TURNS):
            waiting = len(self.waiting)
            if not waiting:
                return
            await self._runtime.sleep(0)
            if len(self.waiting) <= waiting:
                return

    def take(self, most: int | None = None) -> list[T]:
        """The first ones, `most` at most: they wait no longer."""
        if most is None or most >= len(self.waiting):
            taken, self.waiting = list(self.waiting), {}
            return taken
        taken = list(islice(self.waiting, most))
        for call in taken:
            del self.waiting[call]
        return taken

    def withdraw(self, call: T) -> bool:
        """It waits no longer; whether it did."""
        return call in self.waiting and self.waiting.pop(call) is None

    async def idle(self, timeout_s: float) -> None:
        """Wait until nothing is carried out, for so long at most."""
        if self._leader is not None and not self._leader.done():
            await asyncio.wait([self._leader], timeout=timeout_s)

    async def stop(self) -> None:
        """Cancel what is carried out."""
        if self._leader is not None and not self._leader.done():
            self._leader.cancel()
            await asyncio.wait([self._leader])
