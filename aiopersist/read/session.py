"""The state that a read handle, its snapshots and its listens share: the shard, the holds, and the list of
open snapshots and listens."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from aiopersist.base.errors import InvalidUsage, NotReadable, SinceViolation, UsageKind
from aiopersist.base.frontier import Antichain, Time, frontier, last_before, minimum, shaped
from aiopersist.base.resource import Resource, Scope
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.updates import Updates
from aiopersist.parts.fetch import Fetch, Selection
from aiopersist.read.cursor import Cursor, OfAnotherHistory, check_shape
from aiopersist.read.interval import parts_since
from aiopersist.read.snapshot import Snapshot, groups
from aiopersist.read.tagged import TaggedContents, read_tag
from aiopersist.shard.hold import HistoryPin, OwnHold
from aiopersist.shard.instant import as_int, close_if_passed, closed_when_passed, time_of
from aiopersist.shard.log import version_at
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

K = TypeVar("K")
V = TypeVar("V")


class ReadSession(Generic[K, V]):
    """See the header. One per read handle. Uses the process's reader of the shard."""

    def __init__(self, shard: Shard, schema: Schema[K, V, Any], scope: Scope, own: OwnHold | None) -> None:
        self.shard = shard
        self.schema = schema
        self.scope = Scope(f"the reader of {shard.label}", scope, shard.id)
        self.fetch = Fetch(shard, schema)
        self.hold = shard.hold
        """Shared by all handles of the process."""
        self.own = own
        """The handle's own hold, if it has one."""
        self.opened: dict[Resource, None] = {}
        """Open snapshots and listens."""

    async def release(self) -> None:
        """Close the open snapshots and listens, and release the holds, except a named one."""
        async with AsyncExitStack() as steps:  # the last step runs first; all run, even if one fails
            steps.push_async_callback(self.hold.release)
            if self.own is not None:
                if self.own.owner is None:
                    steps.push_async_callback(self.own.release)
                else:
                    steps.callback(self.own.stop)
            for opened in self.opened:
                steps.push_async_callback(opened.aclose)

    def forget(self, closed: Resource) -> None:
        """It is closed."""
        self.opened.pop(closed, None)

    # --- holds -----------------------------------------------------------------------------------

    async def confirm(self) -> None:
        """Raise if the handle's own hold has ended. One request; none without such a hold."""
        if self.own is not None:
            await self.own.confirm()

    async def need(self, hold: Antichain, as_of: Time | None) -> HistoryPin:
        """Let the process's reader hold history at `hold`. `SinceViolation`, which names `as_of`, if that is
        gone; `CLOSED` once the handle is closed, since nobody would release the hold."""
        self.scope.check_open()
        try:
            return await self.hold.need(hold)
        except SinceViolation as error:
            raise SinceViolation(as_of, error.since, shard_id=self.shard.id) from None

    # --- snapshots -------------------------------------------------------------------------------

    async def snapshot(self, as_of: Time | datetime | None, wait: bool) -> Snapshot[K, V]:
        """See `ReadHandle.snapshot`."""
        with self.shard.stack.tracing.span("snapshot", self.shard.known_as), self.scope.call():
            closes = isinstance(as_of, datetime)
            if as_of is not None:
                as_of = self.time(as_of)
            elif self.schema.time_length is not None:
                raise InvalidUsage(UsageKind.INVALID_TIME, "product times have no greatest time: give as_of")
            await self.confirm()
            pin: HistoryPin | None = None
            if as_of is None:
                await self._any_complete()
            else:
                if closes:
                    await close_if_passed(self.shard, as_int(as_of))
                pin = await self._complete(as_of, wait, closes=closes)
            try:
                return await self._snapshot(as_of, pin)
            except BaseException:
                if pin is not None:
                    self.hold.drop(pin)
                raise

    async def tagged(self, tag: str) -> Snapshot[K, V]:
        """The contents that the tag of that name keeps. One request, and one for the head."""
        with self.shard.stack.tracing.span("snapshot", self.shard.known_as), self.scope.call():
            await self.confirm()
            await self.shard.open()
            state = await self._held()
            release = self.shard.register.pin(state.seqno)
            try:
                tagged = await read_tag(self.shard, state, tag)
                return self._opened(state, tagged.as_of, None, tagged)
            finally:
                release()

    async def contents(self, as_of: Time) -> AsyncGenerator[Updates[K, V, Any], None]:
        """The snapshot at `as_of` as updates at `as_of`, in bounded memory."""
        async with await self.snapshot(as_of, wait=True) as snapshot:
            async for updates in snapshot.updates():
                yield updates

    async def _snapshot(self, as_of: Time | None, pin: HistoryPin | None) -> Snapshot[K, V]:
        state = await self._held()
        if as_of is None:
            as_of = last_before(state.upper)
        self._check_since(state, as_of)
        return self._opened(state, as_of, pin)

    async def _held(self) -> State:
        """The newest known state. The process's reader holds it until the next await, so pin it before."""
        await self.hold.ensure()
        while not self.hold.registered:
            await self.hold.ensure()
        return self.shard.state

    def _opened(
        self, state: State, as_of: Time, pin: HistoryPin | None, tagged: TaggedContents | None = None
    ) -> Snapshot[K, V]:
        snapshot: Snapshot[K, V] = Snapshot(
            self.scope, self.fetch, self.hold, state, as_of, pin, self.forget, tagged
        )
        self.opened[snapshot] = None
        return snapshot

    async def _any_complete(self) -> None:
        """`NotReadable` unless some time is complete, by a fresh look. Int times only."""
        state = await self.shard.open()
        if state.upper == minimum(None):
            raise NotReadable(None, state.upper, shard_id=self.shard.id)

    async def _complete(self, as_of: Time, wait: bool, *, closes: bool) -> HistoryPin | None:
        """Wait until `upper` has passed `as_of`; hold its history meanwhile. `closes`: it is an instant, and
        becomes complete as soon as it has passed."""
        state = self.shard.state
        if state.since.less_equal(as_of) and not state.upper.less_equal(as_of):
            return None
        state = await self.shard.open()
        self._check_since(state, as_of)
        if not state.upper.less_equal(as_of):
            return None
        if not wait:
            raise NotReadable(as_of, state.upper, shard_id=self.shard.id)
        pin = await self.need(Antichain(as_of), as_of)
        try:
            async with closed_when_passed(self.shard, as_int(as_of) if closes else None):
                await self.shard.register.wait(partial(self._passed, as_of, pin))
        except BaseException:
            self.hold.drop(pin)
            raise
        return pin

    def _passed(self, as_of: Time, pin: HistoryPin, state: State) -> bool | None:
        self.hold.check(pin.reader)
        return None if state.upper.less_equal(as_of) else True

    # --- updates ---------------------------------------------------------------------------------

    async def updates_since(self, lower: Antichain, state: State, reader: str) -> "pa.Table":
        """The updates from `lower` to the upper of `state`, in any order; `reader` holds them. Int times
        only. One request for each part in a blob."""
        release = self.shard.register.pin(state.seqno)
        try:
            selection = Selection(lower=lower, upper=state.upper)
            parts = groups(parts_since(state, lower))
            tables = [await self.fetch.table(group, selection, reader) for group in parts]
        finally:
            release()
        return concat(tables, self.schema)

    # --- checks ----------------------------------------------------------------------------------

    async def check_cursor(self, cursor: Cursor) -> State:
        """The newest state. `OfAnotherHistory` if its log does not have the version of `cursor`,
        `INVALID_CURSOR` for times of another shape."""
        shard = self.shard
        check_shape(cursor, self.schema.time_length)
        state = await shard.open()
        if cursor.seqno > state.seqno or not await version_at(
            shard.stack, shard.id, cursor.seqno, cursor.commit
        ):
            raise OfAnotherHistory(
                f"the cursor is from version {cursor.seqno} ({cursor.commit}), which is not in the store: "
                "was the store restored from a backup?",
                shard_id=shard.id,
            )
        return state

    def _check_since(self, state: State, as_of: Time) -> None:
        if not state.since.less_equal(as_of):
            raise SinceViolation(as_of, state.since, shard_id=self.shard.id)

    def time(self, time: object) -> Time:
        """`time`, perhaps an instant, as a time of the schema; else `INVALID_TIME`."""
        time = time_of(time, self.shard)
        if isinstance(time, Antichain):
            text = f"as_of is one time, not the frontier {time}"
            raise InvalidUsage(UsageKind.INVALID_TIME, text, time=time)
        as_frontier = frontier(time)  # type: ignore[arg-type]  # checked there
        minimum(self.schema.time_length).less_equal(as_frontier.elements[0])
        return as_frontier.elements[0]

    def frontier(self, value: Antichain | Time | datetime) -> Antichain:
        """`value`, perhaps an instant, as a frontier of the schema's times; else `INVALID_TIME`."""
        return shaped(time_of(value, self.shard), self.schema.time_length)
