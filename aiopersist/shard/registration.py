"""A registered writer, kept alive while somebody here needs it: the handle, its builders, and the
batches that were built under it and are not consumed yet; or batches that another process built.

Heartbeats go their own way, past the appends of the handle: an append that waits for a slow store must
not cost the registration. One that is lost is repeated by the next; none needs settling.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiopersist.errors import BatchExpired, LeaseExpired
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.lease import HEARTBEATS_PER_LEASE, keep_alive
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State
from aiopersist.state.writing import ExpireWriter, HeartbeatWriter, RegisterWriter

T = TypeVar("T")

LOST_MAX = 5  # registrations that a call may lose on its way, since the process stood still each time
BATCHES_MAX = 256  # batches built under one registration: the state keeps the ids of those handed over
LENT_BATCHES_MAX = 65_536  # of one that others build under: some MB of ids in rollups


async def begun_anew(job: Callable[[], Awaitable[T]]) -> T:
    """Do `job`, which works under a registration that it finds or makes; from its beginning, if that ran out
    on the way: the process stood still."""
    for _ in range(LOST_MAX - 1):
        try:
            return await job()
        except BatchExpired:
            pass
    return await job()


class Registration:
    """See the header. `writer` is the id that blob keys carry."""

    def __init__(self, shard: Shard, writer: str, lease_s: float) -> None:
        self.writer = writer
        self.handed_over: set[str] = set()
        """Ids of batches that left this process: its record must outlive this handle."""
        self.lent = False
        """Whether others, elsewhere, may build under it: then only its handle's end is its own."""
        self.built = 0
        """Batches that were begun under it here."""
        self.on_unused: Callable[[], object] = lambda: None
        """Called when nobody here needs it any more."""
        self._shard = shard
        self._lease_s = lease_s
        self._users = 0
        self._loop = asyncio.get_running_loop()
        self._beating: asyncio.Task[None] | None = None
        self._stopped = False
        self._retired = False

    @classmethod
    async def fresh(cls, shard: Shard, lease_s: float | None = None) -> "Registration":
        """A new one, with the lease of writers unless another is given; one commit. An id whose registration
        failed is never used again."""
        writer, slot = f"w{shard.stack.runtime.uuid()}", Slot()
        lease_s = shard.stack.settings.writer_lease_s if lease_s is None else lease_s
        try:
            await commit(shard.register, RegisterWriter(writer, lease_s), slot)
        except BaseException:
            if slot.busy:  # it may land, or land yet, and nobody knows of it
                shard.stack.supervisor.spawn(_undo(shard, writer, slot), "end a registration nobody knows of")
            raise
        return cls(shard, writer, lease_s)

    @classmethod
    def of_another(cls, shard: Shard, writer: str) -> "Registration":
        """That of a writer elsewhere; `renew` it first."""
        record = shard.state.writers.get(writer)
        return cls(shard, writer, shard.stack.settings.writer_lease_s if record is None else record.lease_s)

    async def renew(self) -> None:
        """A heartbeat, if one is due; `BatchExpired` if it is gone, as far as this process knows."""
        record = self._shard.state.writers.get(self.writer)
        now = await self._shard.stack.consensus.now()
        try:
            if record is None or now - record.heartbeat > self._lease_s / HEARTBEATS_PER_LEASE:
                await self._heartbeat()
        except LeaseExpired as error:
            text = f"writer {self.writer}, which built the batch, is no longer registered"
            raise BatchExpired(text, shard_id=self._shard.id) from error

    @property
    def alive(self) -> bool:
        """As far as this process knows."""
        return self.writer in self._shard.state.writers

    @property
    def in_use(self) -> bool:
        """Whether its record is needed by more than the handle that releases it."""
        return self._users > 0 or bool(self.handed_over)

    def hold(self) -> None:
        """One more needs it."""
        self._users += 1
        if self._beating is None and not self._stopped:
            self._beating = self._shard.stack.supervisor.background(
                keep_alive(self._shard.stack, self._lease_s, self._heartbeat), "heartbeats of a writer"
            )

    def release(self) -> None:
        """One less."""
        self._users -= 1
        if not self._users:
            self._end_heartbeats()
            self.on_unused()

    def release_from_anywhere(self) -> None:
        """`release`, from whatever thread the garbage collector runs in."""
        try:
            self._loop.call_soon_threadsafe(self.release)
        except RuntimeError:  # the loop is closed, and heartbeats have ended
            pass

    def retire(self) -> None:
        """The handle has a newer one. It is kept while batches of it are here, or were handed over and are
        not spent yet: heartbeats look. One that is full is kept by those who still build under it, or have
        batches of it."""
        if self.alive and not self.is_full:
            self._retired = True
        else:
            self.release()

    @property
    def is_full(self) -> bool:
        """Whether no further batches are to be built under it elsewhere."""
        return spent_under(self._shard.state, self.writer) >= LENT_BATCHES_MAX

    def stop(self) -> None:
        """No more heartbeats, whoever needs it: the lease ends it."""
        self._stopped = True
        self._end_heartbeats()

    async def expire(self) -> None:
        """End it at once: what was built under it can no longer be appended. One commit."""
        await commit(self._shard.register, ExpireWriter(self.writer), Slot())

    def _end_heartbeats(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None

    async def _heartbeat(self) -> None:
        is_needed = not self._retired or self.lent or self._users != 1 or not self.alive
        if not is_needed and spent_under(self._shard.state, self.writer) >= len(self.handed_over):
            await self.expire()
            self.release()  # the handle's hold; last, since it cancels this very task
            return
        await commit(self._shard.register, HeartbeatWriter(self.writer), Slot())


def spent_under(state: State, writer: str) -> int:
    """How many batches of that writer are known to have been appended or deleted."""
    return len(state.spent.get(writer, ()))


async def _undo(shard: Shard, writer: str, slot: Slot) -> None:
    await settle(slot)
    await commit(shard.register, ExpireWriter(writer), Slot())
