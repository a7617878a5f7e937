"""Lets other clients commit in between.

The client that has just committed knows the newest state; the others must read it first. So the winner of a
race would win the next one as well, and an operation of another client could wait for as long as the winner
has work. Therefore a client that meets others waits after each commit of its own, until it hears of theirs,
but no longer than some of its commits take. Operations that come meanwhile share the next commit, so little
is lost. A client that is alone never waits.

A large put may need longer than that, as it has to look keys up in blobs, and so may a transaction whose body
waits. After some vain tries it *asks* to be next, by a claim in the state of the shard, and the other clients
stand back until the claim is gone, but no longer than `STAND_BACK_S`. Then they release it: whoever asked may
be gone, and if not, asks again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

from aiopersist.errors import BatchExpired
from aiopersist.frontier import Antichain
from aiopersist.shard.commit import commit
from aiopersist.shard.register import Register
from aiopersist.shard.stack import Stack
from aiopersist.state.compaction import ClaimNext, ReleaseClaim
from aiopersist.state.model import NEXT, Claim
from aiopersist.write.session import Session

COMMITS = 3  # of this client; another one has to read, to plan and to write meanwhile
WAIT_MAX_S = 0.1
STAND_BACK_S = 1.0  # as long as a client's own operations wait for a transaction that runs alone


Ask = Callable[[Session], Awaitable[None]]


class Courtesy:
    """See the header. One per client."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._left: dict[Register, Antichain] = {}
        """The upper of each shard of the last commit, if another client is to go first."""
        self._wait_s = 0.0
        self._meets_others = False
        self._asking = 0

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

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Ask]:
        """As the function. Once it has asked, this client stands back for nobody: two that ask would wait for
        each other."""
        has_asked = False
        async with asking() as ask:

            async def noted(writing: Session) -> None:
                nonlocal has_asked
                self._asking += not has_asked
                has_asked = True
                await ask(writing)

            try:
                yield noted
            finally:
                self._asking -= has_asked

    async def stand_back(self, shards: Iterable[Register]) -> None:
        """As the function, unless this client asks itself."""
        if not self._asking:
            await stand_back(shards)


async def _moved(register: Register, upper: Antichain) -> None:
    with suppress(Exception):  # the next commit finds it, too
        await register.wait(lambda state: None if state.upper == upper else True)


async def stand_back(shards: Iterable[Register]) -> None:
    """Let those commit first who have asked for it. No request, unless one did."""
    for register in shards:
        claim = register.state and register.state.claims.get(NEXT)
        if claim:
            with suppress(Exception):  # the next commit finds it, too
                await _wait_for(claim, register)


async def _wait_for(claim: Claim, register: Register) -> None:
    try:
        async with asyncio.timeout(STAND_BACK_S):
            await register.wait(lambda state: state.claims.get(NEXT) != claim or None)
    except TimeoutError:
        await commit(register, ReleaseClaim(claim.writer, NEXT))


@asynccontextmanager
async def asking() -> AsyncIterator[Ask]:
    """A function that asks other clients to stand back from a shard, until the end of the context. A commit
    each time, if that is not known to them, and one at the end."""
    asked: dict[tuple[Register, str], None] = {}

    async def ask(writing: Session) -> None:
        register, writer = writing.shard.register, (await writing.ensure_registered()).writer
        with suppress(BatchExpired):  # the process stood still: the next time
            await commit(register, ClaimNext(writer))
            asked[register, writer] = None

    try:
        yield ask
    finally:
        for register, writer in asked:
            with suppress(Exception):  # others release it
                await commit(register, ReleaseClaim(writer, NEXT))
