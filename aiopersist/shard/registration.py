"""A registered writer. Heartbeats keep it alive as long as this process needs it: for the handle, its
builders, and unconsumed batches that were built under it, perhaps in another process.

Heartbeats do not wait for the appends of the handle: a slow append must not cost the registration. The next
heartbeat repeats a lost one, so none needs settling.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from aiopersist.base.errors import BatchExpired, Error, LeaseExpired
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.lease import HEARTBEATS_PER_LEASE, heartbeats
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State
from aiopersist.state.writing import ExpireWriter, HeartbeatWriter, RegisterWriter

T = TypeVar("T")

LOST_MAX = 5  # registrations that one call may lose, when the process stands still or the connection is bad
BATCHES_MAX = 256  # batches built under one registration: the state keeps the ids of the handed-over ones
LENT_BATCHES_MAX = 65_536  # the same if other processes build under it: some MB of ids in rollups


async def begun_anew(job: Callable[[], Awaitable[T]], lost: type[Error] = BatchExpired) -> T:
    """Do `job`, which works under a registration. After an error `lost` begin again: the registration ran out
    because the process stood still."""
    for _ in range(LOST_MAX - 1):
        with suppress(lost):
            return await job()
    return await job()


class Registration:
    """See the header. `writer` is the id in the keys of blobs."""

    def __init__(self, shard: Shard, writer: str, lease_s: float) -> None:
        self.writer = writer
        self.handed_over: set[str] = set()
        """Ids of batches that left this process: for them the registration must outlive the handle."""
        self.lent = False
        """Whether other processes may build under it. Then heartbeats keep it while the handle is open."""
        self.built = 0
        """The number of batches that this process began under it."""
        self.on_unused: Callable[[], object] = lambda: None
        """Called when this process needs it no longer."""
        self._shard = shard
        self._lease_s = lease_s
        self._users = 0
        self._loop = asyncio.get_running_loop()
        self._beating: asyncio.Task[None] | None = None
        self._stopped = False
        self._retired = False

    @classmethod
    async def fresh(cls, shard: Shard, lease_s: float | None = None) -> "Registration":
        """A new registration, by default with the lease of writers. One commit. After a failure, or an
        unknown outcome, the id is not used again: a few other ids are tried."""
        lease_s = shard.stack.settings.writer_lease_s if lease_s is None else lease_s
        return await begun_anew(partial(cls._of_a_new_id, shard, lease_s), Unknowable)

    @classmethod
    async def _of_a_new_id(cls, shard: Shard, lease_s: float) -> "Registration":
        writer, slot = f"w{shard.stack.runtime.uuid()}", Slot()
        try:
            await commit(shard.register, RegisterWriter(writer, lease_s), slot)
        except BaseException:
            if slot.busy:  # the commit may have happened, or may still happen, and no handle has the id
                shard.stack.supervisor.spawn(
                    _undo(shard, writer, slot), "end a registration that no handle knows"
                )
            raise
        return cls(shard, writer, lease_s)

    @classmethod
    def of_another(cls, shard: Shard, writer: str) -> "Registration":
        """The registration of a writer in another process; `renew` it first."""
        record = shard.state.writers.get(writer)
        return cls(shard, writer, shard.stack.settings.writer_lease_s if record is None else record.lease_s)

    async def renew(self) -> None:
        """A heartbeat, if one is due; `BatchExpired` if the registration is known to have ended."""
        record = self._shard.state.writers.get(self.writer)
        now = await self._shard.stack.consensus.now()
        try:
            if record is None or now - record.heartbeat > self._lease_s / HEARTBEATS_PER_LEASE:
                await self._heartbeat()
        except LeaseExpired as error:
            text = f"writer {self.writer}, which built the batch, is no longer registered: build it again"
            raise BatchExpired(text, shard_id=self._shard.id) from error

    @property
    def alive(self) -> bool:
        """Whether the writer is registered, as far as this process knows."""
        state = self._shard.register.state
        return state is not None and self.writer in state.writers

    @property
    def is_usable(self) -> bool:
        """Whether further batches can be appended and built under it."""
        state, writer = self._shard.register.state, self.writer
        return (
            state is not None
            and writer in state.writers
            and self.built < BATCHES_MAX
            and (not state.consumed or not self.is_full)
        )

    @property
    def in_use(self) -> bool:
        """Whether it has users besides the handle that releases it."""
        return self._users > 0 or bool(self.handed_over)

    def hold(self) -> None:
        """Add a user: a handle, a builder, or a batch."""
        self._users += 1
        if self._beating is None and not self._stopped:
            stack = self._shard.stack
            self._beating = heartbeats(stack, self._lease_s, self._heartbeat, "heartbeats of a writer")

    def release(self) -> None:
        """Remove a user."""
        self._users -= 1
        if not self._users:
            self._end_heartbeats()
            self.on_unused()

    def release_from_anywhere(self) -> None:
        """`release` from any thread, for the garbage collector."""
        try:
            self._loop.call_soon_threadsafe(self.release)
        except RuntimeError:  # the loop is closed, and heartbeats have ended
            pass

    def retire(self) -> None:
        """The handle has a newer registration. Heartbeats keep this one as long as it has batches in this
        process, or handed-over batches that are not consumed. If it is full, only its users keep it."""
        if self.alive and not self.is_full:
            self._retired = True
        else:
            self.release()

    @property
    def is_full(self) -> bool:
        """Whether other processes may build no further batches under it."""
        return spent_under(self._shard.state, self.writer) >= LENT_BATCHES_MAX

    def stop(self) -> None:
        """Stop the heartbeats, even if the registration is in use: its lease runs out."""
        self._stopped = True
        self._end_heartbeats()

    async def expire(self) -> None:
        """End the registration at once: its batches can no longer be appended. One commit."""
        await commit(self._shard.register, ExpireWriter(self.writer))

    def _end_heartbeats(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def _heartbeat(self) -> None:
        is_needed = not self._retired or self.lent or self._users != 1 or not self.alive
        if not is_needed and spent_under(self._shard.state, self.writer) >= len(self.handed_over):
            await self.expire()
            self.release()  # the handle's use; last, since this cancels the present task
            return
        await commit(self._shard.register, HeartbeatWriter(self.writer))


def spent_under(state: State, writer: str) -> int:
    """The number of batches of `writer` that the state knows as appended or deleted."""
    return len(state.consumed.get(writer, ()))


async def _undo(shard: Shard, writer: str, slot: Slot) -> None:
    await settle(slot)
    await commit(shard.register, ExpireWriter(writer))
