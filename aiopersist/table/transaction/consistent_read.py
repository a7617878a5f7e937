"""Brings several views to one moment, and tells whether they show one.

There are two proofs of that:

- *By times.* All writes of one commit have one time, and each table that it read takes part in it, so the
  order of times is a serial order. Views show a prefix of it if none has a change at or beyond the upper of
  another.
- *By heads.* If a read of all heads finds that none has moved since the read before, all views were valid at
  the moment at which the second read began.

A commit of this client moves all its views at once, so views that showed one moment still do.

If one table changes all the time and another one rests, both proofs may fail. Then an empty commit closes the
resting one up to now.
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

CLOSES_AFTER = 3  # rounds of reads of the heads
AHEAD_S = 0.01  # tables are closed up to now and this, so that later changes lie beyond; doubles each round
AHEAD_MAX_S = 0.5


class ConsistentRead:
    """See the header. One per client."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._foreign: dict[TableParticipant, int] = {}
        """The tables that show one moment, and the `foreign` of each view then."""
        self._turn = asyncio.Lock()

    def holds(self, participants: Collection[TableParticipant]) -> bool:
        """Whether these views show one moment."""
        return self._are_recorded(participants) or _is_prefix(participants)

    def _are_recorded(self, participants: Iterable[TableParticipant]) -> bool:
        for participant in participants:  # each read calls it, and a generator takes longer
            if self._foreign.get(participant) != participant.view.foreign_changes:
                return False
        return True

    async def make(self, participants: Collection[TableParticipant]) -> None:
        """Bring these views to one moment. One request for each view and round; one more round after each
        commit of others, and a commit if these do not pause."""
        if self._are_recorded(participants):
            return
        participants = dict.fromkeys(participants)
        async with self._turn:
            for number in count():
                if self.holds(participants):
                    break
                before = [participant.state.seqno for participant in participants]
                if len(participants) > 1:
                    await run_bounded(LOOKS_AT_ONCE, [participant.look for participant in participants])
                for participant in participants:
                    await participant.view.catch_up()
                if before == [participant.state.seqno for participant in participants]:
                    break
                if number >= CLOSES_AFTER:
                    await self._close(participants, min(AHEAD_S * 2 ** (number - CLOSES_AFTER), AHEAD_MAX_S))
            self._foreign = {participant: participant.view.foreign_changes for participant in participants}

    async def _close(self, participants: Collection[TableParticipant], ahead_s: float) -> None:
        """Close the tables whose upper is behind a change of another one."""
        changed = _last_change(participants)
        now = micros(await self._stack.clock.now() + ahead_s)
        for participant in participants:
            if not changed <= participant.view.upper:
                upper = changed.join(successor(now))
                await commit(participant.shard.register, CloseTo(upper))
                await participant.view.catch_up()


def _last_change(participants: Iterable[TableParticipant]) -> Antichain:
    """The frontier before which all changes in these views lie."""
    last = Antichain(0)
    for participant in participants:
        last = last.join(participant.view.changes_upper)
    return last


def _is_prefix(participants: Collection[TableParticipant]) -> bool:
    """Whether the views show all commits up to one time, and none beyond."""
    last = _last_change(participants)
    return all(last <= participant.view.upper for participant in participants)
