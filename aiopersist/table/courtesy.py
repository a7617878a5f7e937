"""Lets other clients commit in between.

The client that has just committed knows the newest state; the others must read it first. So the winner of a
race would win the next one as well, and an operation of another client could wait for as long as the winner
has work. Therefore a client that meets others waits after each commit of its own, until it hears of theirs,
but no longer than some of its commits take. Operations that come meanwhile share the next commit, so little
is lost. A client that is alone never waits.
"""

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from aiopersist.frontier import Antichain
from aiopersist.shard.register import Register
from aiopersist.shard.stack import Stack

COMMITS = 3  # of this client; another one has to read, to plan and to write meanwhile
WAIT_MAX_S = 0.1


class Courtesy:
    """See the header. One per client."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._left: dict[Register, Antichain] = {}
        """The upper of each shard of the last commit, if another client is to go first."""
        self._wait_s = 0.0
        self._meets_others = False

    def lost(self) -> None:
        """Another client came first."""
        self._meets_others = True
        self._left.clear()

    def won(self, shards: Iterable[Register], upper: Antichain, took_s: float) -> None:
        """A commit left these shards at `upper`."""
        self._left = dict.fromkeys(shards, upper) if self._meets_others else {}
        self._wait_s = min(COMMITS * took_s, WAIT_MAX_S)

    async def after_you(self) -> None:
        """Wait until another client has moved one of the shards of the last commit. If none does in time, the
        others have gone."""
        left, self._left = self._left, {}
        if not left:
            return
        waits = [asyncio.ensure_future(_moved(register, upper)) for register, upper in left.items()]
        try:
            moved, _ = await asyncio.wait(waits, timeout=self._wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._meets_others = bool(moved)


async def _moved(register: Register, upper: Antichain) -> None:
    with suppress(Exception):  # the next commit finds it, too
        await register.wait(lambda state: None if state.upper == upper else True)
