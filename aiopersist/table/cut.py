"""Which views show one moment together.

A commit of this client moves all its views at once, so views that showed one moment still do. A commit of
another process reaches them one by one. After that, a look at all of them finds out: where no head has moved
since it was read before, each was as it is known at the moment at which the look began.
"""

import asyncio
from collections.abc import Iterable

from aiopersist.resource import run_bounded
from aiopersist.table.group import LOOKS_AT_ONCE
from aiopersist.table.member import TableMember


class Cut:
    """See the header. One per client."""

    def __init__(self) -> None:
        self._foreign: dict[TableMember, int] = {}
        """The views that show one moment, and how many commits of others each had taken."""
        self._turn = asyncio.Lock()

    def holds(self, members: Iterable[TableMember]) -> bool:
        """Whether these views show one moment."""
        return all(self._foreign.get(member) == member.view.foreign for member in members)

    async def make(self, members: Iterable[TableMember]) -> None:
        """Bring these views to one moment. One request for each and round; a round more after each commit of
        others."""
        async with self._turn:
            known = dict.fromkeys(members)
            while not self.holds(known):
                before = [member.state.seqno for member in known]
                if len(known) > 1:
                    await run_bounded(LOOKS_AT_ONCE, [member.look for member in known])
                for member in known:
                    await member.catch_up()
                if before == [member.state.seqno for member in known]:
                    self._foreign = {member: member.view.foreign for member in known}
