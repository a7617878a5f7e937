"""The leases of readers.

A client has one leased reader per shard (`SharedHold`), for all its handles. The reader holds the blobs of
the versions that it may still read, and the history that open snapshots and listens need. Each of them *pins*
history from a frontier on, and the hold is the meet of all pins. An opening that needs older history than the
hold keeps commits the older hold. After a pin has ended, the next heartbeat moves the hold. After an expiry
the reader registers again by itself; only the snapshots and listens that were open at that moment are lost
(`LeaseExpired`).

A readonly client has no lease (`ReadonlyHold`): it reads the history that others hold.

A handle that was opened with `hold=` has a second reader of its own (`OwnHold`), perhaps under a name that a
restarted process takes over. Only its user moves it, and its expiry is final. It holds only history: its
snapshots and listens read under the shared reader, which holds the blobs. So if its process dies, or its
heartbeats are rare, no version and no replaced blob is kept for the length of its lease.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from aiopersist.base.errors import Error, LeaseExpired, OpaqueMismatch, ShardFinalized, SinceViolation
from aiopersist.base.frontier import Antichain, Time
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit, settle
from aiopersist.shard.lease import heartbeats
from aiopersist.shard.register import Register
from aiopersist.shard.stack import Stack
from aiopersist.state.command import Command
from aiopersist.state.model import LeasedReader
from aiopersist.state.reading import ExpireReader, RegisterReader, RenewReader, TakeNamedHold, named_reader


@dataclass(eq=False)
class HistoryPin:
    """The history that an open snapshot or listen needs, and the registration that holds it."""

    frontier: Antichain
    reader: str
    open: bool = True


@dataclass(eq=False)
class SharedHold:
    """The leased reader that all handles of a client on one shard share."""

    keeps: ClassVar[bool] = True
    """Whether open snapshots and listens stay readable until they are dropped, or the lease is lost."""

    stack: Stack
    register: Register
    reader: str = ""
    _pins: Counter[tuple[Time, ...]] = field(default_factory=Counter)
    """The number of pins at each frontier, by its elements."""
    _users: int = 0
    _slot: Slot = field(default_factory=Slot)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _beating: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """Add a handle. A commit, if it is the first one or the registration has run out. A cancelled call
        adds none, though its commit may happen."""
        self._users += 1
        try:
            await self.ensure()
        except BaseException:
            self.release_soon()
            raise

    async def release(self) -> None:
        """Remove a handle; the last one ends the registration."""
        self._users -= 1
        if not self._users and self.reader:
            reader, self.reader = self.reader, ""
            beating, self._beating = self._beating, None
            if beating is not None:
                beating.cancel()
            async with self._turn:
                if self._slot.busy or self._is_known(reader):
                    await self._commit(ExpireReader(reader))

    def release_soon(self) -> asyncio.Task[None]:
        """`release`; it continues if the caller is cancelled."""
        return self.stack.supervisor.spawn(self.release(), "release a reader")

    async def ensure(self) -> None:
        """Register, if necessary. No request, unless the lease has run out."""
        if self.registered and not await self._overdue():
            return
        async with self._turn:
            await self._ensure()

    async def _ensure(self) -> None:
        if self.registered and await self._overdue():
            try:
                await self._commit(RenewReader(self.reader, hold=self.since))
            except LeaseExpired:  # another commit has ended the registration, and the state shows that
                pass
        if not self.registered:
            await settle(self._slot)  # another call may have registered, and was cancelled
        lease_s = self.stack.settings.reader_lease_s
        while not self.registered:
            self.reader = self.stack.signed(f"r{self.stack.runtime.uuid()}")
            self._pins.clear()
            await self._commit(RegisterReader(self.reader, Antichain(), lease_s))
        if self._beating is None or self._beating.done():
            self._beating = heartbeats(self.stack, lease_s, self.heartbeat, "heartbeats of a reader")

    async def _overdue(self) -> bool:
        """Whether a commit may have ended the registration."""
        now = await self.stack.consensus.now()
        record = self._record
        return record is None or record.heartbeat + record.lease_s < now

    @property
    def _record(self) -> LeasedReader | None:
        state = self.register.state
        return None if state is None else state.readers.get(self.reader)

    def _is_known(self, reader: str) -> bool:
        state = self.register.state
        return state is not None and reader in state.readers

    @property
    def registered(self) -> bool:
        """Whether the reader is registered, as far as this process knows."""
        return self._is_known(self.reader)

    @property
    def since(self) -> Antichain:
        """The meet of all pins."""
        since = Antichain()
        for elements in self._pins:
            since = since.meet(Antichain(*elements))
        return since

    async def need(self, frontier: Antichain) -> HistoryPin:
        """Hold history at `frontier` until `drop`. A commit, unless the hold reaches back so far;
        `SinceViolation` if the shard's since has passed it."""
        async with self._turn:  # so that no heartbeat without this pin is under way
            while True:
                await self._ensure()
                self._add(frontier)
                pin = HistoryPin(frontier, self.reader)
                try:
                    record = self._record
                    if record is None or self._slot.busy or not record.since <= frontier:
                        await self._commit(RenewReader(self.reader, hold=self.since))
                except LeaseExpired:  # nothing was open under the registration: register again
                    self.drop(pin)
                except BaseException:
                    self.drop(pin)
                    raise
                else:
                    return pin

    def move(self, pin: HistoryPin, frontier: Antichain) -> None:
        """Move `pin` to `frontier`; the next heartbeat moves the hold."""
        if pin.open:
            self.drop(pin)
            pin.frontier, pin.open = frontier, True
            if pin.reader == self.reader:
                self._add(frontier)

    def _add(self, frontier: Antichain) -> None:
        elements = frontier.elements
        self._pins[elements] = self._pins.get(elements, 0) + 1

    def drop(self, pin: HistoryPin) -> None:
        """End `pin`; the next heartbeat moves the hold. Idempotent."""
        if pin.open and pin.reader == self.reader:
            left = self._pins.pop(pin.frontier.elements) - 1
            if left:
                self._pins[pin.frontier.elements] = left
        pin.open = False

    def check(self, reader: str) -> None:
        """`LeaseExpired` if `reader`, the registration of something open, has ended."""
        self._check_not_finalized()
        if not self._is_known(reader):
            raise LeaseExpired(
                f"the lease of reader {reader} ran out: its open snapshots and listens are lost",
                shard_id=self.register.shard,
            )

    def _check_not_finalized(self) -> None:
        state = self.register.state
        if state is not None and state.finalized:
            raise ShardFinalized("it is finalized", shard_id=self.register.shard)

    async def heartbeat(self) -> None:
        """Renew the lease, and move the hold to the meet of the pins."""
        async with self._turn:
            if self.reader:
                await self._commit(RenewReader(self.reader, hold=self.since))

    async def _commit(self, command: Command) -> None:
        await settle(self._slot)
        await commit(self.register, command, self._slot)


class ReadonlyHold(SharedHold):
    """Replaces the lease in a readonly client. History and blobs may be deleted at any moment; then a read
    plans again on a newer state, or raises."""

    keeps = False
    reader: str = "readonly"  # no registration has this id

    async def acquire(self) -> None:
        """No registration."""

    async def release(self) -> None:
        """No registration."""

    async def ensure(self) -> None:
        """No lease."""

    @property
    def registered(self) -> bool:
        return self.register.state is not None

    async def need(self, frontier: Antichain) -> HistoryPin:
        """`SinceViolation` if the last known since of the shard has passed it."""
        state = self.register.state
        if state is not None and not state.since <= frontier:
            raise SinceViolation(frontier.elements[0], state.since, shard_id=self.register.shard)
        return HistoryPin(frontier, self.reader)

    def move(self, pin: HistoryPin, frontier: Antichain) -> None:
        pin.frontier = frontier

    def drop(self, pin: HistoryPin) -> None:
        pin.open = False

    def check(self, reader: str) -> None:
        """`ShardFinalized`; there is no lease."""
        self._check_not_finalized()

    async def heartbeat(self) -> None:
        """No lease."""


@dataclass(eq=False)
class OwnHold:
    """The reader of one handle that was opened with `hold=`."""

    stack: Stack
    register: Register
    reader: str
    since: Antichain
    lease_s: float
    owner: str | None = None
    _slot: Slot = field(default_factory=Slot)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _beating: asyncio.Task[None] | None = None
    _lost: Error | None = None

    @classmethod
    async def open(
        cls, stack: Stack, register: Register, since: Antichain | None, name: str | None, lease_s: float
    ) -> "OwnHold":
        """Register a hold at `since`; or take over the hold of that name at its frontier (a new one begins at
        `since`, or at the shard's since). One commit. A cancelled opening leaves no hold; a named hold waits
        for its next owner, as long as its lease."""
        fresh = stack.signed(str(stack.runtime.uuid()))
        if name is None:
            assert since is not None
            hold = cls(stack, register, f"r{fresh}", since, lease_s)
            command = RegisterReader(hold.reader, since, lease_s, reads=False)
            try:
                await commit(register, command, hold._slot)
            except BaseException:  # the commit may have happened, and no handle has the id
                stack.supervisor.spawn(hold.release(), "release a hold")
                raise
        else:
            hold = cls(stack, register, named_reader(name), Antichain(), lease_s, owner=fresh)
            hold.since = await commit(register, TakeNamedHold(name, fresh, since, lease_s), hold._slot)
        hold._beating = heartbeats(stack, lease_s, hold.heartbeat, "heartbeats of a hold")
        return hold

    def check(self) -> None:
        """`LeaseExpired` if the registration has ended, as far as this process knows."""
        state = self.register.state
        if self._lost is None and state is not None and not state.finalized:
            record = state.readers.get(self.reader)
            if record is None:
                self._lost = LeaseExpired(
                    f"the lease of reader {self.reader} ran out", shard_id=self.register.shard
                )
        if self._lost is not None:
            raise self._lost

    async def heartbeat(self) -> None:
        await self.renew(None)

    async def renew(self, advance_to: Antichain | None) -> Antichain:
        """Heartbeat, and move the hold to its join with `advance_to`. One commit."""
        async with self._turn:
            await settle(self._slot)
            command = RenewReader(self.reader, self.owner, advance_to=advance_to)
            self.since = await commit(self.register, command, self._slot)
            return self.since

    async def confirm(self) -> None:
        """Raise unless a fresh look shows that the hold exists and is ours: the first call after a takeover
        must notice it. One request."""
        state = await self.register.refresh()
        self.check()
        record = state.readers.get(self.reader) if state else None
        if record is not None and record.owner != self.owner:
            raise OpaqueMismatch(self.owner, record.owner, shard_id=self.register.shard)

    async def release(self) -> None:
        """End the registration; since does not change."""
        self.stop()
        async with self._turn:
            await settle(self._slot)
            await commit(self.register, ExpireReader(self.reader, self.owner), self._slot)

    def stop(self) -> None:
        """Stop the heartbeats: the lease runs out by itself."""
        if self._beating is not None:
            self._beating.cancel()
