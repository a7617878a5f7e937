"""The in-memory state of a shard, which all handles of a process share.

The state only moves forward, in three ways:
- A *refresh* reads the head and the versions after our state. One read serves all callers that asked before
  it was sent, so each caller sees all earlier writes: a refresh is linearizable.
- A commit of this client installs the state that it wrote (`shard/commit.py`).
- A look at many shards *offers* the head that it read, and so does the answer to a lost commit. An offer
  serves no caller of `refresh`: it may have been read before the caller asked.

**Waiting.** Every new state wakes the waiters; after a commit of this client without any I/O. While there are
waiters, the client's follower brings news of the shard (`shard/follow.py`). A lost hint costs
`settings.watch_timeout_s`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeAlias, TypeVar

from aiopersist.base.errors import Corruption, ShardFinalized
from aiopersist.shard.log import consensus_key, load, replay
from aiopersist.shard.stack import Stack
from aiopersist.state.diff import decode_commit, finalized
from aiopersist.state.drops import Drops
from aiopersist.state.model import State
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.wishes import Losses

T = TypeVar("T")

Waiter: TypeAlias = "asyncio.Future[None]"

WOKEN_AT_ONCE = 16  # waiters in a turn of the loop; each runs for about 0.1 ms
TURN_S = 0.25  # long for a statement, short for a caller; afterwards commits race instead of waiting


class Register:
    """See the header. `state` is `None` only until the shard was found or created."""

    def __init__(self, stack: Stack, shard: str) -> None:
        self.shard = shard
        self.state: State | None = None
        self.is_wall = False
        """Whether its times are those of the consensus store's clock, if that is known."""
        self.label_of: Callable[[], str] = lambda: f"shard {shard}"
        """The label of the shard for users."""
        self.losses = Losses()
        """Lost races of commits."""
        self.refusals = Losses()
        """Lost races of appends, which their callers plan again: an attempt may take several commits."""
        self.refused_at: object = None
        """The upper that the last lost append expected."""
        self.is_own = False
        """Whether a commit of this client made the newest known state."""
        self.drops = Drops()
        """The parts that earlier versions dropped."""
        self.pins: Counter[int] = Counter()
        self.on_commit: Callable[[State], None] | None = None
        """Called, without an await, with the state after our own commits: begins due maintenance."""
        self.on_news: Callable[[State], None] | None = None
        """Called, without an await, with each newer state."""
        self.stack = stack
        self.key = consensus_key(shard)
        self._turn = asyncio.Lock()
        self._queueing = 0
        self._reading: asyncio.Task[None] | None = None
        self._queued: asyncio.Task[None] | None = None
        self._waiters: dict[Waiter, object] = {}
        """In order of arrival, with the slot whose commits do not wake them: see `wait`."""

    @property
    def seqno(self) -> int | None:
        """The version of the newest known state."""
        return None if self.state is None else self.state.seqno

    async def now(self) -> float:
        """The consensus store's clock. No request; one a minute if the times depend on it."""
        return await (self.stack.clock if self.is_wall else self.stack.consensus).now()

    def label(self) -> str:
        """The shard's name in logs."""
        return self.label_of()

    # --- reading ---------------------------------------------------------------------------------

    async def refresh(self) -> State | None:
        """The state at a moment after this call began, or newer. One request if at most one version is new,
        shared by all callers that ask meanwhile."""
        spawn = self.stack.supervisor.spawn
        if self._reading is None or self._reading.done():
            task = self._reading = spawn(self._read(), "read a shard's head", eager=True)
        else:
            if self._queued is None or self._queued.done():
                self._queued = spawn(self._read_after(self._reading), "read again")
            task = self._queued
        await asyncio.shield(task)
        return self.state

    async def lost(self, head: Versioned) -> bool:
        """Our commit lost its race: take the version in the answer. Returns whether it is newer."""
        sent = self.state
        if sent is None or head.seqno <= sent.seqno:
            return False
        await self.offer(sent, head)
        return True

    async def _read_after(self, reading: asyncio.Task[None]) -> None:
        await asyncio.wait([reading])
        self._reading, self._queued = self._queued, None
        await self._read()

    async def _read(self) -> None:
        sent = self.state
        if sent is None:
            self.install(await load(self.stack, self.shard))
            return
        await self.offer(sent, await self.stack.consensus.head(self.key))

    async def offer(self, sent: State, head: Versioned | None) -> None:
        """Take `head` as the newest version. It was read after `sent` was known here, or is newer."""
        if sent.finalized and (head is None or head.seqno < sent.seqno):  # its tombstone may be deleted
            return
        if head is None and await self._may_be_forgotten(sent):
            self.install(finalized(sent))
            return
        if head is None or head.seqno < sent.seqno:
            raise self._restored(f"its head is {head.seqno if head else 'gone'}", sent)
        now = self.state
        assert now is not None  # `sent` was known, and states only move forward
        if head.seqno < now.seqno:
            return
        if head.seqno == now.seqno:
            if decode_commit(head.data) != now.commit:
                raise self._restored(f"its version {head.seqno} is another one", now)
            return
        read = await replay(self.stack, self.shard, now, head)
        if read is not None:
            self.install(read, after=now)
        else:
            self.install(await load(self.stack, self.shard))

    async def _may_be_forgotten(self, state: State) -> bool:
        """Whether the shard may have been finalized after `state`, so long ago that its tombstone is gone."""
        return await self.stack.consensus.now() - state.at > self.stack.settings.tombstone_retention_s

    def _restored(self, what: str, state: State) -> Corruption:
        return Corruption(
            f"{state!r} was read, now {what}: was it restored from a backup?", shard_id=self.shard
        )

    def install(self, state: State | None, after: State | None = None, *, by: object = None) -> None:
        """Install `state`, if it is newer. Its history was read from the state `after` on. `by`: the slot of
        its commit in this client."""
        newest = self.state
        if state is None or (newest is not None and state.seqno <= newest.seqno):
            return
        self.is_own = by is not None
        if newest is not None and newest is after:
            self.drops.follow(newest, state)
        else:
            self.drops.begin(state)
        self.state, self.is_wall = state, state.is_wall
        if self.is_wall:
            self.stack.clock.saw(state.upper)
        if woken := [waiter for waiter, own in self._waiters.items() if own is None or own is not by]:
            self._wake(iter(woken), lambda waiter: waiter.set_result(None))
        if self.on_news is not None:
            self._notify(self.on_news, state)

    def committed(self, before: State | None, after: State, by: object) -> None:
        """A commit of this client, through the slot `by`, made `after` durable, which follows `before`."""
        self.losses.in_a_row = 0
        if before is None or after.upper != before.upper:
            self.refusals.in_a_row = 0
        if self.state is before:
            self.install(after, after=before, by=by)
        if self.on_commit is not None:
            self._notify(self.on_commit, after)

    def _notify(self, listener: Callable[[State], None], state: State) -> None:
        """Call `listener`, and keep its error, or the caller would take a durable commit for failed."""
        try:
            listener(state)
        except Exception as error:
            self.stack.supervisor.failures.report(f"telling of a version of {self.label_of()}", error)

    # --- waiting ---------------------------------------------------------------------------------

    async def wait(self, ready: Callable[[State], T | None], *, own: object = None) -> T:
        """The first result of `ready(state)` that is not `None`; `ready` is called with each newer state, and
        may raise. Meanwhile the client's follower looks at the shard when a hint comes, and every
        `settings.watch_timeout_s`. Commits through the slot `own` do not wake the caller, who knows of
        them."""
        loop = asyncio.get_running_loop()
        while True:
            if (state := self.state) is not None:
                if state.finalized:
                    raise ShardFinalized("it is finalized", shard_id=self.shard)
                if (result := ready(state)) is not None:
                    return result
            waiter = loop.create_future()
            self._waiters[waiter] = own
            try:
                self.stack.follower.follow(self)
                await waiter
            finally:
                self._waiters.pop(waiter, None)

    @property
    def has_waiters(self) -> bool:
        """Whether there are waiters."""
        return bool(self._waiters)

    def fail(self, error: Exception) -> None:
        """Raise `error` in the waiters: a look failed."""
        self._wake(iter(list(self._waiters)), lambda waiter: waiter.set_exception(error))

    def _wake(self, waiters: Iterator[Waiter], settle: Callable[[Waiter], None]) -> None:
        """Wake some waiters in this turn of the loop, the others in later turns: there may be thousands, and
        other tasks must not wait for all of them."""
        first = list(islice(waiters, WOKEN_AT_ONCE))
        for waiter in first:
            if not waiter.done():
                settle(waiter)
        if len(first) == WOKEN_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._wake, waiters, settle)

    @property
    def waiters(self) -> int:
        """The number of waiters for news."""
        return len(self._waiters)

    @property
    def queueing(self) -> int:
        """The number of commits that wait for their turn."""
        return self._queueing

    # --- pins ------------------------------------------------------------------------------------

    def pin(self, seqno: int) -> Callable[[], None]:
        """Keep the blobs of versions from `seqno` on for our readers, until the result is called."""
        self.pins[seqno] += 1
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self.pins[seqno] -= 1
                if not self.pins[seqno]:
                    del self.pins[seqno]

        return release

    # --- turns -----------------------------------------------------------------------------------

    async def take_turn(self) -> bool:
        """Wait for the turn to commit, at most `TURN_S`; returns whether the caller has it. Turns save
        statements, since only one of several for the same version can win. With the limit, a hanging
        statement does not block the others."""
        if not self._turn.locked() and not self._queueing:  # else the waiting callers go first
            return await self._turn.acquire()
        self._queueing += 1
        try:
            async with asyncio.timeout(TURN_S):
                return await self._turn.acquire()
        except TimeoutError:
            return False
        finally:
            self._queueing -= 1

    def release_turn(self) -> None:
        """Let the next caller commit."""
        self._turn.release()
