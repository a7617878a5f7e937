"""The one in-memory state of a shard, shared by all handles of a process.

It only moves forward, in two ways: a *refresh* reads the head and the versions since ours (one read
serves all who asked before it was sent, so each sees everything that was written before it asked:
linearizable); and a commit of our own installs what it wrote (`shard/commit.py`).

**Waiting.** Waiters are woken by every new state, from own commits without any I/O. While there
are waiters one task follows the shard: it asks for a hint, reads, and waits for the hint; so no
version can slip in between. A lost hint costs `settings.watch_timeout_s`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from aiopersist.errors import Corruption, ShardFinalized
from aiopersist.failures import Backoff
from aiopersist.shard.log import consensus_key, load, replay
from aiopersist.shard.stack import Stack
from aiopersist.state.diff import decode_diff, finalized
from aiopersist.state.model import State

T = TypeVar("T")

TURN_S = 0.25  # long for a statement, short for a caller: past it commits race instead of waiting
LINGER_S = 1.0  # how long a shard is followed after its last waiter was served


class Register:
    """See the header. `state` is `None` only until the shard was found or created."""

    def __init__(self, stack: Stack, shard: str) -> None:
        self.shard = shard
        self.state: State | None = None
        self.label_of: Callable[[], str] = lambda: f"shard {shard}"
        """What the user calls it."""
        self.pins: Counter[int] = Counter()
        self.on_commit: Callable[[State], None] = lambda state: None
        """Told of each own commit, without an await: says what upkeep is due."""
        self.on_news: Callable[[State], None] = lambda state: None
        """Told of each newer state, without an await."""
        self.stack = stack
        self.key = consensus_key(shard)
        self._turn = asyncio.Lock()
        self._queueing = 0
        self._reading: asyncio.Task[None] | None = None
        self._queued: asyncio.Task[None] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._arrival = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    # --- reading ---------------------------------------------------------------------------------

    async def refresh(self) -> State | None:
        """The state as it was at some moment after this call began, or newer. One request when nothing
        or one version is new; shared with all who ask meanwhile."""
        if self._reading is None or self._reading.done():
            task = self._reading = self.stack.supervisor.spawn(self._read(), "read a shard's head")
        else:
            if self._queued is None or self._queued.done():
                self._queued = self.stack.supervisor.spawn(self._read_after(self._reading), "read again")
            task = self._queued
        await asyncio.shield(task)
        return self.state

    async def _read_after(self, reading: asyncio.Task[None]) -> None:
        await asyncio.wait([reading])
        self._reading, self._queued = self._queued, None
        await self._read()

    async def _read(self) -> None:
        sent = self.state
        if sent is None:
            self.install(await load(self.stack, self.shard))
            return
        head = await self.stack.consensus.head(self.key)
        if sent.finalized and (head is None or head.seqno < sent.seqno):  # for good, be its tombstone gone
            return
        if head is None and await self._may_be_forgotten(sent):
            self.install(finalized(sent))
            return
        if head is None or head.seqno < sent.seqno:
            raise self._restored(f"its head is {head.seqno if head else 'gone'}", sent)
        now = self.state
        assert now is not None
        if head.seqno < now.seqno:
            return
        if head.seqno == now.seqno:
            if decode_commit(head.data) != now.commit:
                raise self._restored(f"its version {head.seqno} is another one", now)
            return
        read = await replay(self.stack, self.shard, now, head)
        self.install(read if read is not None else await load(self.stack, self.shard))

    async def _may_be_forgotten(self, state: State) -> bool:
        """Whether it may have been finalized since `state`, for so long that its tombstone is gone."""
        return await self.stack.consensus.now() - state.at > self.stack.settings.tombstone_retention_s

    def _restored(self, what: str, state: State) -> Corruption:
        return Corruption(
            f"{state!r} was read, now {what}: was it restored from a backup?", shard_id=self.shard
        )

    def install(self, state: State | None) -> None:
        """`state` is known from now on, if it is newer than what was."""
        if state is None or (self.state is not None and state.seqno <= self.state.seqno):
            return
        self.state = state
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._tell(self.on_news, state)

    def committed(self, before: State | None, after: State) -> None:
        """`after`, which followed `before`, is durable: a commit of our own."""
        if self.state is before:
            self.install(after)
        self._tell(self.on_commit, after)

    def _tell(self, listener: Callable[[State], None], state: State) -> None:
        """A version that is durable stays so, whatever a listener does with it: its failure is not the
        caller's, who would take the commit for failed."""
        try:
            listener(state)
        except Exception as error:
            self.stack.supervisor.failures.tell(f"telling of a version of {self.label_of()}", error)

    # --- waiting ---------------------------------------------------------------------------------

    async def wait(self, ready: Callable[[State], T | None]) -> T:
        """The first result of `ready(state)` that is not `None`, looked at whenever the state is newer.
        `ready` may raise. While it waits
        one task per shard reads the head every `settings.watch_timeout_s`."""
        loop = asyncio.get_running_loop()
        while True:
            if (state := self.state) is not None:
                if state.finalized:
                    raise ShardFinalized("it is finalized", shard_id=self.shard)
                if (result := ready(state)) is not None:
                    return result
            waiter = loop.create_future()
            self._waiters.add(waiter)
            self._arrival.set()
            if self._following is None or self._following.done():
                self._following = self.stack.supervisor.background(self._follow(), "follow a shard")
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    async def _follow(self) -> None:
        spawn, watch = self.stack.supervisor.spawn, self.stack.consensus.watch
        hint = spawn(watch(self.key), "watch a shard", abandon=True)
        backoff = Backoff(self.stack.supervisor.failures, f"following {self.label_of()}")
        try:
            while await self._wanted():
                try:
                    await self.stack.runtime.sleep(0)  # the hint is asked for before the state is read
                    await self.refresh()
                except Exception as error:  # whatever it is: who waits must hear of it
                    self._fail_waiters(error)
                    await backoff.failed(error)
                    continue
                backoff.succeeded()
                timeout_s = self.stack.settings.watch_timeout_s
                await asyncio.wait([hint], timeout=timeout_s)
                if hint.done():
                    if hint.exception() is not None:  # no hint: it costs what a lost one costs
                        await self.stack.runtime.sleep(timeout_s)
                    hint = spawn(watch(self.key), "watch a shard", abandon=True)
        finally:
            hint.cancel()

    async def _wanted(self) -> bool:
        """Whether anybody waits; a waiter that was just served has a moment to come back."""
        if not self._waiters:
            self._arrival.clear()
            try:
                async with asyncio.timeout(LINGER_S):
                    await self._arrival.wait()
            except TimeoutError:
                pass
        return bool(self._waiters)

    def _fail_waiters(self, error: Exception) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # --- pins ------------------------------------------------------------------------------------

    def pin(self, seqno: int) -> Callable[[], None]:
        """Keep the blobs that are named from version `seqno` on for this process's readers, until the result
        is called."""
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
        """Wait for the turn to commit, but not for long; whether it was taken. Of several statements for
        one version only one can win; but a statement that hangs blocks nobody else."""
        if not self._turn.locked() and not self._queueing:  # whoever was woken first goes first
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
        """Let the next one commit."""
        self._turn.release()


def decode_commit(data: bytes) -> str:
    """The commit id of a version."""
    return decode_diff(data).commit
