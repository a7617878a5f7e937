"""What a write handle, its builders and its appends share: registration, turns, and the memory of what
came of the last append.

Appends of one handle take turns. A cancelled append leaves its attempt in the slot, which whoever
comes next settles first.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiopersist.data.types.schema import Schema
from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.parts.flush import flush_inline, must_flush
from aiopersist.parts.put import Uploaded
from aiopersist.parts.upload import Upload
from aiopersist.resource import RELEASE_DEADLINE_S, Scope
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.commit import settle
from aiopersist.shard.registration import BATCHES_MAX, Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.model import HollowBatch
from aiopersist.state.writing import repeated
from aiopersist.write.batch import Batch, Origin
from aiopersist.write.doubt import Case, Committed, Doubt, NotCommitted


class Staging:
    """What a builder needs: where its parts go, and whose life it shares."""

    def __init__(self, origin: Origin, scope: Scope) -> None:
        self.origin = origin
        self.shard: Shard = origin.shard
        self.schema: Schema[Any, Any, Any] = origin.schema
        self.scope = scope

    def upload_under(self, lower: Antichain, registration: Registration) -> Upload:
        """A batch in the making under that registration."""
        return Upload(self.shard, self.schema, self.origin.schema_id, registration.writer, lower)

    def batch(self, registration: Registration, hollow: HollowBatch) -> Batch:
        """`hollow`, which was uploaded under `registration`, as a batch."""
        return Batch(self.origin, registration, hollow, str(self.shard.stack.runtime.uuid()))


class Session(Staging):
    """See the header. One per write handle."""

    def __init__(self, origin: Origin) -> None:
        super().__init__(origin, Scope(f"the writer of {origin.shard.label}", origin.scope, origin.shard.id))
        self.slot = Slot()
        self.case: Case | None = None
        """The last append whose caller does not know its outcome."""
        self.pending: Doubt | None = None
        """Of the attempt in the slot, once its append has ended without an answer."""
        self._turn = asyncio.Lock()
        self._appending: asyncio.Task[Any] | None = None
        """Whose turn it is."""
        self._settling = asyncio.Lock()
        self._registering = asyncio.Lock()
        self._registration: Registration | None = None
        self._others: dict[str, Registration] = {}
        """Of writers elsewhere, and earlier ones of ours, while batches of them are here."""

    # --- registration ----------------------------------------------------------------------------

    @property
    def registration(self) -> Registration:
        """The current one."""
        assert self._registration is not None
        return self._registration

    async def ensure_registered(self) -> Registration:
        """A writer whose lease ran out registers anew: what was staged under the old id stays under it."""
        mine = self._registration
        if mine is None or not mine.alive or mine.built >= BATCHES_MAX or mine.is_full:
            async with self._registering:
                if self._registration is mine:
                    await self._register()
        return self.registration

    async def _register(self) -> None:
        fresh, old = await Registration.fresh(self.shard), self._registration
        fresh.hold()
        self._registration = fresh
        if old is not None:
            self._remember(old)
            old.retire()

    def _remember(self, registration: Registration) -> Registration:
        """Until nobody here needs it; or another of that writer which is known already."""
        writer = registration.writer
        registration.on_unused = lambda: self._others.pop(writer, None)
        return self._others.setdefault(writer, registration)

    async def begin_batch(self) -> Registration:
        """The registration to build a batch under, held for the caller; of each only so many are built."""
        while (mine := await self.ensure_registered()).built >= BATCHES_MAX:
            pass  # others were as fast
        mine.built += 1
        mine.hold()
        return mine

    async def registration_of(self, writer: str) -> Registration:
        """That of the writer of a batch which comes from elsewhere, by a fresh look, held for the caller;
        `BatchExpired` if it is gone. A commit more if nobody has renewed it for a while."""
        await self.shard.open()
        mine = self.registration
        known = mine if writer == mine.writer else self._others.get(writer)
        if known is None:
            known = self._remember(Registration.of_another(self.shard, writer))
        known.hold()
        try:
            await known.renew()
        except BaseException:
            known.release()
            raise
        return known

    # --- turns and outcomes ----------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The handle's turn for one append, with the one before it settled and a registration."""
        await self.ensure_registered()
        async with self._turn:
            self._appending = asyncio.current_task()
            try:
                await self._settle()
                yield
            finally:
                self._appending = None

    async def idle(self) -> None:
        """Wait until no append of this handle is under way, nor any outcome unknown."""
        async with self._turn:
            await self._settle()

    async def settled(self) -> Case | None:
        """The last append whose caller was not told, once it is decided. Those under way are not waited
        for, unless they are being cancelled."""
        while True:
            if self._appending is not None and self._appending.cancelling():
                await self.idle()
            await self._settle()
            case = self.case
            if case is None or case.decided is None or case.decided.done():
                return case
            await asyncio.wait([case.decided])

    async def outcome(self) -> Committed | NotCommitted | None:
        """See `WriteHandle.settle`."""
        await self.idle()
        if (case := await self.settled()) is None:
            return None
        outcome = case.doubt.answer()
        if case.transactions and isinstance(outcome, NotCommitted):  # another recorded it: it happened
            state = await self.shard.register.refresh()
            if state is not None and repeated(state, case.transactions):
                await case.doubt.repeated()
                return Committed(state.upper)
        return outcome

    async def _settle(self) -> None:
        """Decide the pending append, if there is one, and tidy up after it."""
        async with self._settling:
            if (doubt := self.pending) is None:
                return
            try:
                attempt = await settle(self.slot)
            except Unknowable as error:
                self.pending, doubt.outcome = None, error
                await doubt.tidy()
                return
            self.pending = None
            if attempt is not None:
                await doubt.decide(attempt)

    # --- staging ---------------------------------------------------------------------------------

    async def make_room(self) -> None:
        """Flush inline parts to a blob if the state holds too many: one append of some thousands pays for
        it, with a blob and a commit more."""
        if must_flush(self.shard):
            await self.flush_inline()

    async def flush_inline(self) -> bool:
        """`flush_inline`; a cancelled one is settled and tidied up after as an append is."""
        uploads: list[Uploaded] = []
        try:
            writer = (await self.ensure_registered()).writer
            return await flush_inline(self.shard, writer, self.slot, uploads)
        except BaseException:
            if self.slot.busy:
                self.pending = Doubt(uploads=uploads, outcome=None)
            raise

    # --- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """See `WriteHandle.aclose`."""
        if not self.scope.close():
            return
        for registration in self._others.values():
            registration.stop()
        if self._registration is None:
            return
        self._registration.release()
        self._registration.stop()
        release = self.shard.stack.supervisor.spawn(self._release(self._registration), "release a writer")
        await asyncio.wait([release], timeout=RELEASE_DEADLINE_S)

    async def _release(self, registration: Registration) -> None:
        try:
            async with self._turn:
                await self._settle()
        except Indeterminate:
            return
        if not registration.in_use:
            await registration.expire()
