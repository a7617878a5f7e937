"""A listen: all updates of a shard after a time, interval by interval.

A listen stands at a frontier `f`: everything before it was delivered. When the shard's upper `u` is beyond
`f`, it delivers the updates in `[f, u)`, in any order, and then the progress to `u`. The state that has `u`
tells which batches reach past `f`. That state is pinned until its updates are delivered.

*Product times* are advanced to `as_of` before they are compared with `f` and `u`. So compaction, which may
advance times up to the listen's hold, makes no difference. An advanced time may be past the upper of its
batch; `interval.py` finds the batches that may have updates of an interval.

The iterators are objects, not async generators, so a cancelled wait loses nothing. A task of the client
computes the next item and keeps it for the next call (`Puller`). The position moves only when an item is
delivered. If a store does not answer, the wait fails, and the next one continues.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from aiopersist.base.errors import LeaseExpired, SinceViolation, StorageUnavailable
from aiopersist.base.frontier import Antichain, Time, successor
from aiopersist.base.resource import Resource, Scope, in_order
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.updates import Updates
from aiopersist.parts.fetch import Selection
from aiopersist.read.bound import EarliestUpdates, StepBound
from aiopersist.read.cursor import Cursor, encode
from aiopersist.read.interval import batches_of, hold_for
from aiopersist.read.puller import Interruption, Puller
from aiopersist.read.session import ReadSession
from aiopersist.shard.hold import HistoryPin
from aiopersist.shard.instant import as_int, close_when_passed
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.record import HollowPart

K = TypeVar("K")
V = TypeVar("V")

SMALL_PARTS = 64  # inline parts in one `Updates`: for many tiny appends
MEMORY_SHARE = 2  # one byte in two of the memory of a read is for updates: their filter takes the other


@dataclass(frozen=True, slots=True)
class Progress:
    """Everything before `upper` was delivered. `cursor` resumes a listen here."""

    upper: Antichain
    cursor: str


@dataclass(frozen=True, slots=True)
class Step(Generic[K, V]):
    """The updates of one closed interval, and the frontier where it ends."""

    updates: Updates[K, V, Any]
    upper: Antichain
    cursor: str


@dataclass(frozen=True, slots=True)
class Start:
    """Where a listen begins."""

    frontier: Antichain
    as_of: Time | None
    until: Antichain | None = None
    snapshot: bool = False
    """Whether the snapshot at `as_of` comes first."""


class Listen(Resource, Generic[K, V]):
    """An async iterator of `Updates` and `Progress`. A wait may be cancelled and repeated, even after
    `StorageUnavailable`: it continues at the same position. While nothing is appended, all listens of a
    client together cost at most one request per `settings.watch_timeout_s`. An interval costs a read of the
    head, and one request per part that is not inline."""

    def __init__(self, session: ReadSession[K, V], need: HistoryPin, start: Start) -> None:
        fetch = session.fetch
        self._scope = Scope("the listen", session.scope, fetch.shard.id)
        self._session = session
        self._fetch = fetch
        self._hold = session.hold
        self._pin = need
        self._start = start
        self._frontier = Antichain(_snapshot_time(start.as_of)) if start.snapshot else start.frontier
        self._snapshot_due = start.snapshot
        self._puller: Puller[Updates[K, V, Any] | Antichain] = Puller(
            self._items(), fetch.stack.supervisor, "compute the next item of a listen"
        )
        self._undelivered: deque[Updates[K, V, Any]] = deque()
        """Updates of a step whose wait was cancelled."""
        self._check: Callable[[State], None] = lambda state: None
        """Called with each newer state during a wait; its error ends the listen."""
        self._bound: StepBound | None = None
        """Limits an interval; `None`: it reaches to the upper."""
        self._closing: list[asyncio.Task[None]] = []
        """Tasks that make the awaited instants complete."""
        session.opened[self] = None

    def _close(self, time: int) -> None:
        """While this is open, make the instant `time` complete as soon as it has passed."""
        shard = self._fetch.shard
        if not shard.stack.readonly:
            work = close_when_passed(shard, time)
            self._closing.append(shard.stack.supervisor.background(work, f"close {shard.label}"))

    def _close_until(self) -> None:
        """As `_close`, for the last time before `until`."""
        until = self._start.until
        if until is not None and until.elements and (time := as_int(until.elements[0])):
            self._close(time - 1)

    @property
    def as_of(self) -> Time | None:
        """Updates at times `<= as_of` are not delivered."""
        return self._start.as_of

    @property
    def frontier(self) -> Antichain:
        """Everything before this frontier was delivered."""
        return self._frontier

    @property
    def cursor(self) -> str:
        """Text from which a listen resumes at `frontier`."""
        state = self._state()
        product = isinstance(self.as_of, tuple)
        return encode(
            Cursor(
                shard=state.shard,
                frontier=self._frontier,
                as_of=self.as_of if product or self._snapshot_due else None,
                snapshot=self._snapshot_due,
                seqno=state.seqno,
                commit=state.commit,
            )
        )

    def __aiter__(self) -> "Listen[K, V]":
        return self

    async def __anext__(self) -> Updates[K, V, Any] | Progress:
        with self._scope.call():
            if self._undelivered:
                return self._undelivered.popleft()
            item = await self._puller.pull()
        return self._hand_over(item)

    def steps(self) -> "Steps[K, V]":
        """One `Step` per closed interval, instead of separate updates and progress."""
        return Steps(self._step)

    async def aclose(self) -> None:
        """Stop listening; idempotent."""
        self._scope.close()  # the handle may have closed it before
        self._hold.drop(self._pin)
        for task in self._closing:
            task.cancel()
        await self._puller.aclose()
        self._session.forget(self)

    async def _step(self) -> Step[K, V]:
        undelivered, schema = self._undelivered, self._fetch.schema  # all iterators of steps share it
        with self._scope.call():
            while isinstance(item := await self._puller.pull(), Updates):
                undelivered.append(item)
        updates: Updates[K, V, Any] = Updates(concat([u.to_arrow() for u in undelivered], schema), schema)
        undelivered.clear()
        progress = self._hand_over(item)
        assert isinstance(progress, Progress)
        return Step(updates, progress.upper, progress.cursor)

    def _hand_over(self, item: Updates[K, V, Any] | Antichain) -> Updates[K, V, Any] | Progress:
        if isinstance(item, Updates):
            return item
        self._frontier = item
        self._snapshot_due = False
        if item.elements:
            self._hold.move(self._pin, hold_for(item, self.as_of))
        else:
            self._hold.drop(self._pin)
        return Progress(item, self.cursor)

    def _state(self) -> State:
        state = self._fetch.shard.register.state
        assert state is not None
        return state

    async def _items(self) -> AsyncGenerator[Updates[K, V, Any] | Antichain | Interruption, None]:
        position, until = self._start.frontier, self._start.until
        product = isinstance(self.as_of, tuple)
        if self._start.snapshot:
            async with aclosing(self._session.contents(_snapshot_time(self.as_of))) as contents:
                async for updates in contents:
                    yield updates
            if not product:
                position = successor(_snapshot_time(self.as_of))
                yield position
        while position.elements and not (until is not None and until <= position):
            async with aclosing(self._next_interval(position, until)) as items:
                async for item in items:
                    if isinstance(item, Antichain):
                        position = item
                    yield item

    async def _next_interval(
        self, position: Antichain, until: Antichain | None
    ) -> AsyncGenerator[Updates[K, V, Any] | Antichain | Interruption, None]:
        """Waits for updates from `position` on; yields them, then the frontier where they end. With a bound:
        step by step. No frontier after an interruption, or if a newer state has other parts."""
        try:
            state = await self._fetch.shard.register.wait(partial(self._past, position))
        except StorageUnavailable as error:
            yield Interruption(error)
            return
        upper = until if until is not None and until <= state.upper else state.upper
        earliest = None
        if self._bound is not None:
            upper = self._bound.reach(state, position, upper)
            earliest = self._bound.earliest(upper)
        release = self._fetch.shard.register.pin(state.seqno)
        begun = False
        try:
            async with aclosing(self._interval(state, position, upper)) as interval:
                async for updates in interval:
                    if isinstance(updates, Interruption):
                        yield updates
                        continue
                    if earliest is not None:
                        table = updates.to_arrow()
                        await self._fetch.stack.compute_few(table.nbytes, earliest.add, table)
                        continue
                    begun = True
                    yield updates
        except LeaseExpired:
            if self._hold.keeps or begun:
                raise
            return  # no lease kept the parts, and none was delivered
        finally:
            release()
        if earliest is None:
            yield upper
            return
        async for item in self._steps_of(earliest):
            yield item

    async def _steps_of(
        self, earliest: EarliestUpdates
    ) -> AsyncGenerator[Updates[K, V, Any] | Antichain, None]:
        stack = self._fetch.stack
        for end in await stack.compute_few(earliest.size, earliest.ends):
            for table in await stack.compute_few(earliest.size, earliest.take, end):
                yield Updates(table, self._fetch.schema)
            yield end

    def _past(self, position: Antichain, state: State) -> State | None:
        self._check(state)
        self._hold.check(self._pin.reader)
        if not self._hold.keeps and not state.since <= hold_for(position, self.as_of):
            raise SinceViolation(self.as_of, state.since, shard_id=state.shard)
        return state if position < state.upper else None

    async def _interval(
        self, state: State, lower: Antichain, upper: Antichain
    ) -> AsyncGenerator[Updates[K, V, Any] | Interruption, None]:
        as_of, until = self.as_of, self._start.until
        upper = upper if until is None else upper.meet(until)
        selection = Selection(
            lower=lower,
            upper=upper,
            not_as_of=as_of,
            advance_to=Antichain(as_of) if isinstance(as_of, tuple) else None,
        )
        groups = _groups(batches_of(state, lower, upper, as_of))
        jobs = [partial(self._fetch.updates, group, selection, self._pin.reader) for group in groups]
        stack, fetched = self._fetch.stack, 0
        while fetched < len(jobs):  # after an interruption it continues with the first missing group
            rest = in_order(jobs[fetched:], stack.settings.fetch_max_outstanding_parts, stack.supervisor)
            try:
                async with aclosing(rest) as pieces:
                    async for updates in pieces:
                        fetched += 1
                        if len(updates):
                            yield updates
            except StorageUnavailable as error:
                yield Interruption(error)


class Steps(Generic[K, V]):
    """An async iterator of `Step`. A wait may be cancelled and repeated."""

    def __init__(self, step: Callable[[], Awaitable[Step[K, V]]]) -> None:
        self._step = step

    def __aiter__(self) -> "Steps[K, V]":
        return self

    async def __anext__(self) -> Step[K, V]:
        return await self._step()


def bound_steps(listen: Listen[Any, Any], bytes_max: int, memory_bytes: int | None = None) -> None:
    """From now on an interval has at most about `bytes_max`; one time is not divided. Int times only.
    `memory_bytes`: about so many are read ahead; `None`: a share of `settings.read_memory_bytes`."""
    most = listen._fetch.stack.settings.read_memory_bytes // MEMORY_SHARE
    listen._bound = StepBound(bytes_max, max(bytes_max, most if memory_bytes is None else memory_bytes))


def check_with(listen: Listen[Any, Any], check: Callable[[State], None]) -> None:
    """Call `check` with each newer state during a wait; its error ends the listen."""
    listen._check = check


def _snapshot_time(as_of: Time | None) -> Time:
    assert as_of is not None
    return as_of


def _groups(batches: list[HollowBatch]) -> list[list[tuple[HollowBatch, HollowPart]]]:
    """Parts that are fetched and delivered together: one blob, or up to `SMALL_PARTS` inline parts."""
    groups: list[list[tuple[HollowBatch, HollowPart]]] = []
    for batch in batches:
        for part in batch.parts:
            small = part.inline is not None
            if small and groups and len(groups[-1]) < SMALL_PARTS and groups[-1][-1][1].inline is not None:
                groups[-1].append((batch, part))
            else:
                groups.append([(batch, part)])
    return groups
