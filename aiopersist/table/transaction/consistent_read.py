"""Which views show one moment together.

There are two proofs of it:

- *By times.* All that one commit writes has one time, and each table that it read takes part in it; so the
  order of times is a serial order. Views show a prefix of it if none has a change at or beyond the upper of
  another.
- *By looks.* Where a look at all heads finds that none has moved since it was read before, each view was as
  it is at the moment at which the look began.

A commit of this client moves all its views at once, so views that showed one moment still do.

Where one table changes all the time and another one rests, neither proof may come about. Then the resting one
is closed up to now, by an empty commit.
"""

import asyncio
from collections.abc import Collection, Iterable
from itertools import count

from aiopersist.base.frontier import Antichain, successor
from aiopersist.base.resource import run_bounded
from aiopersist.shard.commit import commit
from aiopersist.shard.stack import Stack
from aiopersist.state.command import micros
from aiopersist.state.writing import CloseTo
from aiopersist.table.commit.group import LOOKS_AT_ONCE
from aiopersist.table.commit.participant import TableParticipant

CLOSES_AFTER = 3  # rounds of looks
AHEAD_S = 0.01  # of now, so that it takes time until others change beyond it; doubles with each round
AHEAD_MAX_S = 0.5


class ConsistentRead:
    """See the header. One per client."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._foreign: dict[TableParticipant, int] = {}
        """The views that show one moment, and how many commits of others each had taken."""
        self._turn = asyncio.Lock()

    def holds(self, members: Collection[TableParticipant]) -> bool:
        """Whether these views show one moment."""
        return self._are_known(members) or _is_prefix(members)

    def _are_known(self, members: Iterable[TableParticipant]) -> bool:
        for member in members:  # noqa: SIM110  # each read asks, and a generator takes longer
            if self._foreign.get(member) != member.view.foreign:
                return False
        return True

    async def make(self, members: Collection[TableParticipant]) -> None:
        """Bring these views to one moment. One request for each and round; a round more after each commit of
        others, and a commit where these do not pause."""
        if self._are_known(members):
            return
        known = dict.fromkeys(members)
        async with self._turn:
            for number in count():
                if self.holds(known):
                    break
                before = [member.state.seqno for member in known]
                if len(known) > 1:
                    await run_bounded(LOOKS_AT_ONCE, [member.look for member in known])
                for member in known:
                    await member.catch_up()
                if before == [member.state.seqno for member in known]:
                    break
                if number >= CLOSES_AFTER:
                    await self._close(known, min(AHEAD_S * 2 ** (number - CLOSES_AFTER), AHEAD_MAX_S))
            self._foreign = {member: member.view.foreign for member in known}

    async def _close(self, members: Collection[TableParticipant], ahead_s: float) -> None:
        """Close the tables that are behind a change of another one."""
        changed = _last_change(members)
        now = micros(await self._stack.clock.now() + ahead_s)
        for member in members:
            if not changed <= member.view.upper:
                upper = changed.join(successor(now))
                await commit(member.shard.register, CloseTo(upper))
                await member.catch_up()


def _last_change(members: Iterable[TableParticipant]) -> Antichain:
    """The frontier before which all changes in these views lie."""
    last = Antichain(0)
    for member in members:
        last = last.join(member.view.changed)
    return last


def _is_prefix(members: Collection[TableParticipant]) -> bool:
    """Whether the views show all commits up to some time, and none beyond."""
    last = _last_change(members)
    return all(last <= member.view.upper for member in members)
