"""The one in-memory state of a shard, and the one loop that changes it.

A `Register` holds the newest state that this process knows of a shard, shared by all handles. It
only moves forward. It changes in two ways:

1. *Refresh*: read the head and the versions since ours. One read serves all who asked before it
   was sent, so each sees everything that was written before it asked (linearizable).
2. *Commit*: run a command on the state, write its diff by compare-and-set, on a mismatch refresh
   and run it again. This is the only caller of `Consensus.compare_and_set` for a shard.

**Outcomes.** An attempt writes version `e + 1`, with a commit id of its own. The statement runs in
a task of the client: a caller that is cancelled stops waiting, the statement goes on. Where the
answer is lost, the attempt is *settled* before its slot does anything else (`_settle`):
- version `e + 1` is there: its commit id says whether it is ours;
- it is vacant: nothing is known, since the statement may still be on its way. So the same bytes
  are sent again, to the same version, until it exists. After a cancellation the caller no longer
  wants it: then the version is occupied by a heartbeat (`Occupy`), which decides it as well;
- it was truncated: the state tells, if the command leaves a proof there (`happened`).

**Turns.** Commits of one process wait for each other for a moment (`TURN_S`), since of several
statements for one version only one can win; but a statement that hangs blocks nobody else.

**Waiting.** Waiters are woken by every new state, from own commits without any I/O. While there
are waiters one task follows the shard: it asks for a hint, reads, and waits for the hint; so no
version can slip in between. A lost hint costs `settings.watch_timeout_s`.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from aiopersist.errors import (
    Corruption,
    Error,
    Indeterminate,
    InvalidUsage,
    ShardFinalized,
    StorageUnavailable,
)
from aiopersist.shard.attempt import Attempt, Slot, Unknowable
from aiopersist.shard.log import consensus_key, load, replay
from aiopersist.shard.stack import Stack
from aiopersist.state.command import Command, Commit, Context, Keep
from aiopersist.state.diff import apply, decode_diff, encode_diff, seal
from aiopersist.state.invariants import check_version
from aiopersist.state.model import State
from aiopersist.state.writing import Occupy

T = TypeVar("T")

TURN_S = 0.25  # long for a statement, short for a caller: past it commits race instead of waiting
LINGER_S = 1.0  # how long a shard is followed after its last waiter was served
ANSWER_S = 1.0  # how long settling waits for the statement's own answer before it looks


class Register:
    """See the header. `state` is `None` only until the shard was found or created."""

    def __init__(self, stack: Stack, shard: str) -> None:
        self.shard = shard
        self.state: State | None = None
        self.pins: Counter[int] = Counter()
        self.on_commit: Callable[[State], None] = lambda state: None
        """Called after each own commit, without an await: says what upkeep is due."""
        self._stack = stack
        self._key = consensus_key(shard)
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
            task = self._reading = self._stack.supervisor.spawn(self._read(), "read a shard's head")
        else:
            if self._queued is None or self._queued.done():
                self._queued = self._stack.supervisor.spawn(self._read_after(self._reading), "read again")
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
            self._install(await load(self._stack, self.shard))
            return
        head = await self._stack.consensus.head(self._key)
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
        read = await replay(self._stack, self.shard, now, head)
        self._install(read if read is not None else await load(self._stack, self.shard))

    def _restored(self, what: str, state: State) -> Corruption:
        return Corruption(
            f"{state!r} was read, now {what}: was it restored from a backup?", shard_id=self.shard
        )

    def _install(self, state: State | None) -> None:
        if state is None or (self.state is not None and state.seqno <= self.state.seqno):
            return
        self.state = state
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    # --- waiting ---------------------------------------------------------------------------------

    async def wait(self, ready: Callable[[State], T | None]) -> T:
        """The first result of `ready(state)` that is not `None`, looked at whenever the state is newer.
        `ready` may raise. While it waits
        one task per shard reads the head every `settings.watch_timeout_s`."""
        loop = asyncio.get_running_loop()
        while True:
            if (state := self.state) is not None:
                if state.finalized:
                    raise ShardFinalized(f"shard {self.shard} is finalized", shard_id=self.shard)
                if (result := ready(state)) is not None:
                    return result
            waiter = loop.create_future()
            self._waiters.add(waiter)
            self._arrival.set()
            if self._following is None or self._following.done():
                self._following = self._stack.supervisor.background(self._follow(), "follow a shard")
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    async def _follow(self) -> None:
        spawn, watch = self._stack.supervisor.spawn, self._stack.consensus.watch
        hint = spawn(watch(self._key), "watch a shard", abandon=True)
        try:
            while await self._wanted():
                try:
                    await self._stack.runtime.sleep(0)  # the hint is asked for before the state is read
                    await self.refresh()
                except Error as error:
                    self._fail_waiters(error)
                    continue
                timeout_s = self._stack.settings.watch_timeout_s
                await asyncio.wait([hint], timeout=timeout_s)
                if hint.done():
                    if hint.exception() is not None:  # no hint: it costs what a lost one costs
                        await self._stack.runtime.sleep(timeout_s)
                    hint = spawn(watch(self._key), "watch a shard", abandon=True)
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

    def _fail_waiters(self, error: Error) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # --- pins ------------------------------------------------------------------------------------

    def pin(self, state: State) -> Callable[[], None]:
        """Keep the blobs that `state` names for this process's readers, until the result is called."""
        self.pins[state.seqno] += 1
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self.pins[state.seqno] -= 1
                if not self.pins[state.seqno]:
                    del self.pins[state.seqno]

        return release

    # --- committing ------------------------------------------------------------------------------

    async def commit(self, command: Command, slot: Slot) -> Any:
        """Apply `command` and return its result, or raise its refusal. `Indeterminate` only if the store
        fails for longer than it is retried, or the version and every proof of it are gone; then, and
        after a cancellation, the attempt stays in `slot` until `settle`."""
        fresh = False
        while True:
            mine = await self._take_turn()
            try:
                context = await self._context()
                state = self.state
                outcome = command(state, context)
                if isinstance(outcome, Keep):
                    if outcome.error is None:
                        return outcome.result
                    if fresh:
                        outcome.error.shard_id = self.shard
                        raise outcome.error
                elif await self._attempt(command, state, outcome, context.now, slot):
                    return outcome.result
            finally:
                if mine:
                    self._turn.release()
            await self.refresh()
            fresh = True

    async def _take_turn(self) -> bool:
        """Wait for the turn, but not for long; whether it was taken."""
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

    async def _context(self) -> Context:
        return Context(now=await self._stack.consensus.now(), pinned=min(self.pins, default=None))

    async def _attempt(
        self, command: Command, state: State | None, outcome: Commit, now: float, slot: Slot
    ) -> bool:
        """Write the version after `state`; whether it is ours."""
        diff = seal(outcome.changes, state, commit=self._stack.runtime.token(), at=now)
        after = apply(diff, state)
        check_version(diff, state, after)
        expected = None if state is None else state.seqno
        slot.pending = Attempt(expected, diff.commit, encode_diff(diff), command, outcome.result)
        try:
            ours = await self._send(slot.pending)
        except StorageUnavailable:  # determinate
            slot.pending = None
            raise
        slot.pending = None
        if ours:
            if self.state is state:
                self._install(after)
            self.on_commit(after)
        return ours

    async def _send(self, attempt: Attempt) -> bool:
        """Whether version `attempt.seqno` is this attempt's. `StorageUnavailable` only if it surely did
        not happen; anything else, a cancellation too, leaves it unknown."""
        runtime, limit_s = self._stack.runtime, self._stack.settings.retry_timeout_s
        began, delays = runtime.monotonic(), runtime.delays()
        while True:
            attempt.sent += 1
            statement = attempt.statement = self._stack.supervisor.spawn(
                self._stack.consensus.compare_and_set(self._key, attempt.expected, attempt.data),
                "write a version",
            )
            cause: Exception | None = None
            try:
                ours: bool = await asyncio.shield(statement)
                if ours or attempt.sent == 1:
                    return ours
            except StorageUnavailable as error:
                if attempt.sent == 1:
                    raise
                cause = error
            except (Corruption, InvalidUsage):
                raise
            except Exception as error:
                cause = error
            decided = await self._look(attempt, cause)
            if decided is not None:
                return decided
            delay = next(delays)
            if limit_s is not None and runtime.monotonic() - began + delay > limit_s:
                text = f"version {attempt.seqno} may still be written: it was sent {attempt.sent} times"
                raise Indeterminate(text, shard_id=self.shard) from cause
            await runtime.sleep(delay)

    async def _look(self, attempt: Attempt, cause: BaseException | None) -> bool | None:
        """Whether the attempt happened, by what is there now; `None` if its version is vacant."""
        try:
            while not (versions := await self._stack.consensus.scan(self._key, attempt.seqno, 1)):
                head = await self._stack.consensus.head(self._key)
                seqno = None if head is None else head.seqno
                if seqno == attempt.expected:
                    return None
                if seqno is None or seqno < attempt.seqno:
                    await self.refresh()  # says that the store was restored
            if versions[0].seqno == attempt.seqno:
                return decode_commit(versions[0].data) == attempt.commit
            state = await self.refresh()
        except StorageUnavailable as error:
            raise Indeterminate(
                f"version {attempt.seqno} may have been written, its answer and the store were lost: {error}",
                shard_id=self.shard,
            ) from cause
        happened = getattr(attempt.command, "happened", lambda state: False)(state)
        if happened is None:
            raise Unknowable(
                f"version {attempt.seqno} may have been written: it is no longer there, nor is its writer",
                shard_id=self.shard,
            ) from cause
        return bool(happened)

    async def settle(self, slot: Slot) -> Attempt | None:
        """Decide the pending attempt of `slot` and return it; `None` if there is none."""
        attempt = slot.pending
        if attempt is None:
            return None
        try:
            attempt.happened = await self._settle(attempt)
        except Unknowable:
            slot.pending = None  # decided long ago, only nobody can tell how
            raise
        slot.pending = None
        if attempt.happened:
            await self.refresh()
        return attempt

    async def _settle(self, attempt: Attempt) -> bool:
        statement = attempt.statement
        if statement is not None:
            await asyncio.wait([statement], timeout=ANSWER_S)
            if statement.done() and not statement.cancelled():
                error = statement.exception()
                if error is None and (statement.result() or attempt.sent == 1):
                    return bool(statement.result())
                if isinstance(error, StorageUnavailable) and attempt.sent == 1:
                    return False
        while (decided := await self._look(attempt, None)) is None:
            await self._occupy(attempt)
        return decided

    async def _occupy(self, attempt: Attempt) -> None:
        """Write version `attempt.seqno` as a heartbeat, unless it is there."""
        context, state = await self._context(), self.state
        if state is None or state.seqno != attempt.expected:
            await self.refresh()
            return
        command = Occupy(getattr(attempt.command, "writer", ""))
        await self._attempt(command, state, command(state, context), context.now, Slot())


def decode_commit(data: bytes) -> str:
    """The commit id of a version."""
    return decode_diff(data).commit
