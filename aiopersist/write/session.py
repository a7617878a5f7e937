"""The state that a write handle, its builders and its appends share: the registration, turns, and the outcome
of the last append.

Appends of one handle take turns. A cancelled append leaves its attempt in the slot, and the next call settles
that attempt first.
"""

import asyncio
from typing import Any

from aiopersist.base.errors import Indeterminate
from aiopersist.base.resource import Scope
from aiopersist.parts.flush import flush_inline
from aiopersist.parts.put import Uploaded
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.commit import settle
from aiopersist.shard.registration import Registration
from aiopersist.state.writing import repeat_of
from aiopersist.write.pending import Committed, NotCommitted, PendingAppend, UnsettledCall
from aiopersist.write.staged import StagingContext


class Session:
    """See the header. One per write handle, and per table that this client writes."""

    def __init__(self, context: StagingContext) -> None:
        self.context = context
        self.shard = context.shard
        self.schema = context.schema
        self.scope = Scope(f"the writer of {context.shard.label}", context.scope, context.shard.id)
        self.slot = Slot()
        self.unsettled: UnsettledCall | None = None
        """The last call whose caller did not get its outcome."""
        self.pending: PendingAppend | None = None
        """The append of the attempt in the slot, if its commit ended without an answer."""
        self.shard.stack.senders[self.idle] = self.shard.id
        self._turn = asyncio.Lock()
        self._appending: asyncio.Task[Any] | None = None
        """The task that has the turn."""
        self._settling = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._registration: Registration | None = None
        self._others: dict[str, Registration] = {}
        """By writer: of other processes, and earlier ones of this handle, while batches need them."""

    # --- registration ----------------------------------------------------------------------------

    @property
    def registration(self) -> Registration:
        """The current registration."""
        assert self._registration is not None
        return self._registration

    async def ensure_registered(self) -> Registration:
        """The current registration, or a new one if its lease ran out or it is full."""
        current = self._registration
        if current is not None and current.is_usable:
            return current
        async with self._registering:
            if self._registration is current:
                await self._register()
        return self.registration

    async def _register(self) -> None:
        self.scope.check_open()  # nobody would end it
        fresh, old = await Registration.fresh(self.shard), self._registration
        fresh.hold()
        self._registration = fresh
        if old is not None:
            self._remember(old)
            old.retire()

    def _remember(self, registration: Registration) -> Registration:
        """Keep `registration` while batches need it; returns the one that is kept for its writer."""
        writer = registration.writer
        registration.on_unused = lambda: self._others.pop(writer, None)
        return self._others.setdefault(writer, registration)

    async def begin_batch(self) -> Registration:
        """A registration for a new batch, held for the caller. Each serves at most `BATCHES_MAX` batches."""
        while not (current := await self.ensure_registered()).is_usable:
            pass  # other calls have used it up
        current.built += 1
        current.hold()
        return current

    async def registration_of(self, writer: str) -> Registration:
        """The registration of `writer`, which built a batch in another process; held for the caller.
        `BatchExpired` if it has ended. One read, and a commit if its heartbeat is due."""
        await self.shard.open()
        current = self.registration
        registration = current if writer == current.writer else self._others.get(writer)
        if registration is None:
            registration = self._remember(Registration.of_another(self.shard, writer))
        registration.hold()
        try:
            await registration.renew()
        except BaseException:
            registration.release()
            raise
        return registration

    # --- turns and outcomes ----------------------------------------------------------------------

    async def begin_turn(self) -> None:
        """Register if necessary, wait for a turn, settle the append before. `end_turn` must follow."""
        await self.ensure_registered()
        await self._turn.acquire()
        self._appending = asyncio.current_task()
        try:
            if self.pending is not None or self._settling.locked():
                await self._settle()
        except BaseException:
            self.end_turn()
            raise

    def end_turn(self) -> None:
        """Let the next append begin."""
        self._appending = None
        self._turn.release()

    async def idle(self) -> None:
        """Wait until no append of this handle runs, and no outcome is unknown."""
        async with self._turn:
            await self._settle()
        if self.scope.closed:
            self._forget()

    async def decided_call(self) -> UnsettledCall | None:
        """The last call whose caller did not get its outcome, once that is decided. Waits for a running
        append only if that is being cancelled."""
        while True:
            if self._appending is not None and self._appending.cancelling():
                await self.idle()
            await self._settle()
            call = self.unsettled
            if call is None or call.decided is None or call.decided.done():
                return call
            await asyncio.wait([call.decided])

    async def outcome(self) -> Committed | NotCommitted | None:
        """See `WriteHandle.settle`."""
        await self.idle()
        if (call := await self.decided_call()) is None:
            return None
        outcome = call.append.answer()
        is_known = bool(call.transactions or call.once.hashes)
        if is_known and isinstance(outcome, NotCommitted):  # another writer may have recorded it
            state, now = await self.shard.register.refresh(), await self.shard.register.now()
            if state is not None and repeat_of(state, now, call) is not None:
                await call.append.repeated()
                return Committed(state.upper)
        return outcome

    async def _settle(self) -> None:
        """Decide the pending append, if there is one, and tidy up after it."""
        if self.pending is None and not self._settling.locked():
            return
        async with self._settling:
            if (append := self.pending) is None:
                return
            try:
                attempt = await settle(self.slot)
            except Unknowable as error:
                self.pending, append.outcome = None, error
                await append.tidy()
                return
            self.pending = None
            if attempt is not None:
                await append.decide(attempt)

    # --- staging ---------------------------------------------------------------------------------

    async def flush_inline(self) -> bool:
        """Flush the inline parts of the state to a blob; whether there were any. One append in some thousands
        pays for it: a blob and a commit. The next call settles a cancelled flush, as it does an append."""
        uploads: list[Uploaded] = []
        try:
            writer = (await self.ensure_registered()).writer
            return await flush_inline(self.shard, writer, self.slot, uploads)
        except BaseException:
            if self.slot.busy:
                self.pending = PendingAppend(self, uploads=uploads, outcome=None)
            raise

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """See `WriteHandle.aclose`."""
        await self.shard.stack.supervisor.released(*self.closing())

    def closing(self) -> list[asyncio.Task[None]]:
        """Close the session; the tasks that finish the work."""
        if not self.scope.close():
            return []
        for registration in self._others.values():
            registration.stop()
        if self._registration is None:
            self._forget()
            return []
        self._registration.release()
        self._registration.stop()
        work = self._release(self._registration)
        return [self.shard.stack.supervisor.spawn(work, "release a writer")]

    def _forget(self) -> None:
        """Remove the session from the senders: it has no unknown outcome, and will have none."""
        self.shard.stack.senders.pop(self.idle, None)

    async def _release(self, registration: Registration) -> None:
        try:
            await self.idle()
        except Indeterminate:
            return
        if not registration.in_use:
            await registration.expire()
