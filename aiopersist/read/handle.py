"""The read handle: snapshots, listens, and the hold that keeps history for them."""

import asyncio
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any, Generic, TypeVar

from aiopersist.base.errors import InvalidUsage, SinceViolation, UsageKind
from aiopersist.base.frontier import Antichain, Time, last_before, minimum, successor
from aiopersist.base.resource import Opening, Resource, Scope
from aiopersist.data.types.schema import Schema
from aiopersist.read import cursor as cursors
from aiopersist.read.interval import hold_for
from aiopersist.read.listen import Listen, Start
from aiopersist.read.session import ReadSession
from aiopersist.read.snapshot import Snapshot
from aiopersist.read.tagged import check_alone
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.hold import OwnHold
from aiopersist.shard.instant import as_int, close_if_passed
from aiopersist.shard.shard import Shard

K = TypeVar("K")
V = TypeVar("V")


class ReadHandle(Resource, Generic[K, V]):
    """Reads one shard. Serves many tasks at once."""

    def __init__(self, session: ReadSession[K, V]) -> None:
        self._session = session
        self._shard = session.shard
        self._schema = session.schema
        self._scope = session.scope
        self._own_turn = asyncio.Lock()

    @classmethod
    async def _open(
        cls,
        shard: Shard,
        schema: Schema[K, V, Any],
        scope: Scope,
        *,
        hold: Antichain | None,
        hold_name: str | None,
        lease_s: float | None,
    ) -> "ReadHandle[K, V]":
        """Join the process's reader of the shard (a commit for the first handle), and register an own hold if
        `hold` or `hold_name` asks for one (another commit)."""
        lease = shard.stack.settings.reader_lease_s if lease_s is None else lease_s
        await shard.hold.acquire()
        try:
            own = None
            if hold is not None or hold_name is not None:
                least = minimum(schema.time_length)
                if hold is not None and hold.elements:
                    least.less_equal(hold.elements[0])  # raises INVALID_TIME for another shape
                own = await OwnHold.open(shard.stack, shard.register, hold, hold_name, lease)
            return cls(ReadSession(shard, schema, scope, own))
        except BaseException:
            shard.hold.release_soon()
            raise

    @property
    def shard_id(self) -> ShardId:
        return self._shard.id

    @property
    def reader_id(self) -> str:
        """The id of its own hold, else of the reader that all handles of the process share."""
        own = self._session.own
        return own.reader if own is not None else self._shard.hold.reader

    @property
    def _has_hold(self) -> bool:
        return self._session.own is not None

    @property
    def since(self) -> Antichain:
        """The frontier that this handle holds; without an own hold the shard's since, as last seen."""
        own = self._session.own
        return own.since if own is not None else self._shard.state.since

    @property
    def upper(self) -> Antichain:
        """The shard's upper, as last seen by this process."""
        return self._shard.state.upper

    async def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, by a linearizable read: one request."""
        with self._scope.call():
            await self._session.confirm()
            return (await self._shard.open()).upper

    async def downgrade_since(self, frontier: Antichain | Time) -> Antichain:
        """Give up history before `frontier`: move this handle's hold there, and the shard's since to the meet
        of all holds. Returns the hold; an earlier frontier only renews the lease. One commit."""
        with self._scope.call():
            target = self._session.frontier(frontier)
            async with self._own_turn:
                own = self._session.own = self._session.own or await self._hold_since()
            return await own.renew(target)

    async def _hold_since(self) -> OwnHold:
        """A hold at the shard's since. Tries again if since moves before the hold is registered."""
        shard = self._shard
        while True:
            since = (await shard.open()).since
            try:
                lease_s = shard.stack.settings.reader_lease_s
                return await OwnHold.open(shard.stack, shard.register, since, None, lease_s)
            except SinceViolation:
                continue

    # --- snapshots and listens -------------------------------------------------------------------

    def snapshot(
        self, as_of: Time | datetime | None = None, wait: bool = True, *, tag: str | None = None
    ) -> Opening[Snapshot[K, V]]:
        """The contents at the time `as_of`. Waits until `upper` has passed `as_of`; with `wait=False` raises
        `NotReadable` instead. `SinceViolation` at once if history at `as_of` is no longer held. No request if
        this process knows that the time is complete.

        `None` is the greatest complete time, by one linearizable read; `NotReadable` if nothing was appended.

        On a wall clock `as_of` may be an aware `datetime`, as any time argument may. A moment that has passed
        is complete at once: if nobody has written since, this makes an empty append (one commit more). A
        readonly client waits instead. `INVALID_TIME` for a naive `datetime`, or on a logical clock.

        `tag`: the contents that the tag of that name keeps, even if their history is gone; `UnknownTag`. Two
        requests. They stay readable until the snapshot is closed, also if the tag is dropped meanwhile."""
        if tag is not None:
            check_alone(as_of)
            return Opening(partial(self._session.tagged, tag), "reader.snapshot(...)")
        return Opening(lambda: self._session.snapshot(as_of, wait), "reader.snapshot(...)")

    def listen(
        self,
        as_of: Time | datetime | None = None,
        cursor: str | None = None,
        until: Antichain | Time | datetime | None = None,
    ) -> Opening[Listen[K, V]]:
        """All updates whose time is not `<= as_of`, as they come. Without `as_of` and `cursor` it begins at
        the shard's upper, by one linearizable read. Ends after the progress to the empty frontier, or after
        the first progress at or past `until`."""
        return Opening(lambda: self._open_listen(as_of, cursor, until), "reader.listen(...)")

    def subscribe(
        self, as_of: Time | datetime | None = None, cursor: str | None = None
    ) -> Opening[Listen[K, V]]:
        """The snapshot at `as_of` as updates at `as_of`, then all later updates: no gap, no overlap."""
        return Opening(lambda: self._open_subscribe(as_of, cursor), "reader.subscribe(...)")

    async def _open_listen(
        self, as_of: Time | datetime | None, cursor: str | None, until: Antichain | Time | datetime | None
    ) -> Listen[K, V]:
        with self._scope.call():
            end = None if until is None else self._session.frontier(until)
            await self._session.confirm()
            listen = await self._started(as_of, cursor, end)
            if isinstance(until, datetime):
                listen._close_until()
            return listen

    async def _started(
        self, as_of: Time | datetime | None, cursor: str | None, end: Antichain | None
    ) -> Listen[K, V]:
        if cursor is not None:
            return await self._resume(as_of, cursor, end)
        if as_of is not None:
            as_of = self._session.time(as_of)
            product = isinstance(as_of, tuple)
            first = minimum(self._schema.time_length) if product else successor(as_of)
            return await self._listen(Start(first, as_of, end))
        if self._schema.time_length is not None:
            raise InvalidUsage(UsageKind.INVALID_TIME, "with product times a listen needs as_of")
        return await self._from_upper(lambda upper: Start(upper, _before(upper), end))

    async def _open_subscribe(self, as_of: Time | datetime | None, cursor: str | None) -> Listen[K, V]:
        with self._scope.call():
            await self._session.confirm()
            if cursor is not None:
                return await self._resume(as_of, cursor, None)
            if as_of is None:
                if self._schema.time_length is not None:
                    raise InvalidUsage(UsageKind.INVALID_TIME, "with product times a subscribe needs as_of")
                return await self._from_upper(_contents_before)
            time = self._session.time(as_of)
            return await self._listen_to_contents(time, instant=isinstance(as_of, datetime))

    async def _listen_to_contents(
        self, as_of: Time, until: Antichain | None = None, *, instant: bool
    ) -> Listen[K, V]:
        """The contents at `as_of`, then later updates. An `instant` is complete as soon as it has passed."""
        closed = not instant or await close_if_passed(self._shard, as_int(as_of))
        listen = await self._listen(_contents(as_of, until))
        if not closed:
            listen._close(as_int(as_of))
        return listen

    async def _from_upper(self, begin: Callable[[Antichain], Start]) -> Listen[K, V]:
        """Listen from the shard's upper on. Tries again if it moves before the hold is registered."""
        while True:
            upper = (await self._shard.open()).upper
            try:
                return await self._listen(begin(upper))
            except SinceViolation:
                if self._shard.state.upper == upper:
                    raise

    async def _resume(
        self, as_of: Time | datetime | None, text: str, until: Antichain | None
    ) -> Listen[K, V]:
        if as_of is not None:
            raise InvalidUsage(UsageKind.INVALID_CURSOR, "a cursor has its own as_of: give one of them")
        cursor = cursors.decode(text, self._shard.id)
        state = await self._session.check_cursor(cursor)
        if cursor.snapshot:
            assert cursor.as_of is not None
            return await self._listen_to_contents(cursor.as_of, until, instant=state.is_wall)
        at = _before(cursor.frontier) if self._schema.time_length is None else cursor.as_of
        return await self._listen(Start(cursor.frontier, at, until))

    async def _listen(self, start: Start) -> Listen[K, V]:
        hold = _hold_of(start)
        at = start.as_of if start.as_of is not None else hold.elements[0] if hold.elements else None
        pin = await self._session.need(hold, at)
        try:
            return Listen(self._session, pin, start)
        except BaseException:  # closed meanwhile
            self._shard.hold.drop(pin)
            raise

    # --- the end ---------------------------------------------------------------------------------

    async def release(self) -> None:
        """End this handle's hold at once, a named one too, and close the handle."""
        if self._session.own is not None:
            with self._scope.call():
                await self._session.own.release()
        await self.aclose()

    async def aclose(self) -> None:
        """Close its snapshots and listens, and end its hold; a named hold stays until its lease ends.
        Idempotent."""
        if not self._scope.close():
            return
        release = self._shard.stack.supervisor.spawn(self._session.release(), "release a reader")
        await self._shard.stack.supervisor.released(release)

    def __repr__(self) -> str:
        return f"<ReadHandle of {self._shard.id}: since {self.since}, upper {self.upper}>"


def session_of(handle: ReadHandle[K, V]) -> ReadSession[K, V]:
    """The session that the handle shares with its snapshots and listens."""
    return handle._session


async def listen_from(handle: ReadHandle[K, V], frontier: Antichain) -> Listen[K, V]:
    """All updates at or beyond `frontier`, of a shard with int times."""
    with handle._scope.call():
        return await handle._listen(Start(frontier, _before(frontier)))


def _before(upper: Antichain) -> int | None:
    """The int time before `upper`; `None` at the minimum."""
    last = last_before(upper)
    return last if last >= 0 else None


def _contents(as_of: Time, until: Antichain | None = None) -> Start:
    """Begin with the contents at `as_of`."""
    first = minimum(len(as_of)) if isinstance(as_of, tuple) else Antichain(as_of)
    return Start(first, as_of, until, snapshot=True)


def _contents_before(upper: Antichain) -> Start:
    """Begin with the contents at the greatest time before `upper`, if there is one."""
    return Start(upper, None) if upper == minimum(None) else _contents(last_before(upper))


def _hold_of(start: Start) -> Antichain:
    if start.snapshot and start.as_of is not None:
        return Antichain(start.as_of)
    return hold_for(start.frontier, start.as_of)
