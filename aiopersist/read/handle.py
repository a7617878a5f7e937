"""The read handle: snapshots, listens, and the hold that keeps history for them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.updates import Updates
from aiopersist.errors import Corruption, InvalidUsage, NotReadable, SinceViolation, UsageKind
from aiopersist.frontier import TIME_MAX, Antichain, Time, frontier, minimum, shaped, successor
from aiopersist.parts.fetch import Fetch
from aiopersist.read import cursor as cursors
from aiopersist.read.interval import hold_for
from aiopersist.read.listen import Listen, Start
from aiopersist.read.snapshot import Snapshot
from aiopersist.resource import RELEASE_DEADLINE_S, Opening, Resource, Scope
from aiopersist.shard.catalog import ShardId
from aiopersist.shard.hold import Need, OwnHold
from aiopersist.shard.log import version_at
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State

K = TypeVar("K")
V = TypeVar("V")


class ReadHandle(Resource, Generic[K, V]):
    """Reads one shard. Serves many tasks at once."""

    def __init__(self, shard: Shard, schema: Schema[K, V, Any], scope: Scope, own: OwnHold | None) -> None:
        self._shard = shard
        self._stack = shard.stack
        self._schema = schema
        self._scope = Scope(f"the reader of {shard.label}", scope, shard.id)
        self._fetch = Fetch(shard, schema)
        self._own = own
        self._own_turn = asyncio.Lock()
        self._opened: set[Snapshot[K, V] | Listen[K, V]] = set()  # until each is closed, wanted or not

    @classmethod
    async def open(
        cls,
        shard: Shard,
        schema: Schema[K, V, Any],
        scope: Scope,
        *,
        hold: Antichain | None,
        hold_name: str | None,
        lease_s: float | None,
    ) -> "ReadHandle[K, V]":
        """Join the process's reader of the shard (a commit for the first), and register a hold of its own
        if one is asked for (another commit)."""
        lease = shard.stack.settings.reader_lease_s if lease_s is None else lease_s
        await shard.hold.acquire()
        try:
            own = None
            if hold is not None or hold_name is not None:
                least = minimum(schema.time_length)
                if hold is not None and hold.elements:
                    least.less_equal(hold.elements[0])  # raises INVALID_TIME for another shape
                own = await OwnHold.open(shard.stack, shard.register, hold, hold_name, lease)
            return cls(shard, schema, scope, own)
        except BaseException:
            shard.stack.supervisor.spawn(shard.hold.release(), "release a reader")
            raise

    @property
    def shard_id(self) -> ShardId:
        return self._shard.id

    @property
    def reader_id(self) -> str:
        """Of its own hold, or of the reader that all handles of the process share."""
        return self._own.reader if self._own is not None else self._shard.hold.reader

    @property
    def since(self) -> Antichain:
        """What this handle holds; without a hold the shard's since, as last seen."""
        return self._own.since if self._own is not None else self._shard.state.since

    @property
    def upper(self) -> Antichain:
        """The shard's upper, as last seen by this process."""
        return self._shard.state.upper

    async def fetch_recent_upper(self) -> Antichain:
        """The shard's upper, by a linearizable read: one request."""
        with self._scope.call():
            await self._confirm()
            return (await self._shard.open()).upper

    async def downgrade_since(self, frontier: Antichain | Time) -> Antichain:
        """Give up history before `frontier`: move this handle's hold forward (an older frontier only
        heartbeats), and so the shard's since to the meet of all holds. Returns the hold. One commit."""
        with self._scope.call():
            target = self._frontier(frontier)
            async with self._own_turn:
                own = self._own = self._own or await self._hold_since()
            return await own.renew(target)

    async def _hold_since(self) -> OwnHold:
        """A hold at the shard's since, which may move until it is there."""
        lease_s = self._stack.settings.reader_lease_s
        while True:
            since = (await self._shard.open()).since
            try:
                return await OwnHold.open(self._stack, self._shard.register, since, None, lease_s)
            except SinceViolation:
                continue

    # --- snapshots -------------------------------------------------------------------------------

    def snapshot(self, as_of: Time | None = None, wait: bool = True) -> Opening[Snapshot[K, V]]:
        """The contents at the time `as_of`; `None` is the greatest complete time, by one linearizable
        read, or `NotReadable` at once if nothing was appended yet. Waits until `upper` has passed `as_of`,
        or raises `NotReadable` with `wait=False`. `SinceViolation` at once if history at `as_of` is no
        longer held. No request for a time that is known to be complete."""
        return Opening(lambda: self._open_snapshot(as_of, wait), "reader.snapshot(...)")

    async def _open_snapshot(self, as_of: Time | None, wait: bool) -> Snapshot[K, V]:
        with self._scope.call():
            if as_of is not None:
                self._time(as_of)
            elif self._schema.time_length is not None:
                raise InvalidUsage(UsageKind.INVALID_TIME, "product times have no greatest one: say as_of")
            await self._confirm()
            need: Need | None = None
            if as_of is None:
                await self._any_complete()
            else:
                need = await self._complete(as_of, wait)
            try:
                return await self._snapshot(as_of, need)
            except BaseException:
                if need is not None:
                    self._shard.hold.drop(need)
                raise

    async def _snapshot(self, as_of: Time | None, need: Need | None) -> Snapshot[K, V]:
        hold = self._shard.hold
        await hold.ensure()
        while not hold.registered:
            await hold.ensure()
        state = self._shard.state  # no await from here to the pin
        if as_of is None:
            as_of = _last(state.upper)
        self._check_since(state, as_of)
        closed = self._opened.discard
        snapshot: Snapshot[K, V] = Snapshot(self._scope, self._fetch, hold, state, as_of, need, closed)
        self._opened.add(snapshot)
        return snapshot

    async def _any_complete(self) -> None:
        """`NotReadable` unless there is a complete time, by a fresh look. Int times only."""
        state = await self._shard.open()
        if state.upper == minimum(None):
            raise NotReadable(None, state.upper, shard_id=self._shard.id)

    async def _complete(self, as_of: Time, wait: bool) -> Need | None:
        """Wait until `upper` has passed `as_of`; meanwhile history there is held."""
        if _readable(self._shard.state, as_of):
            return None
        state = await self._shard.open()
        self._check_since(state, as_of)
        if not state.upper.less_equal(as_of):
            return None
        if not wait:
            raise NotReadable(as_of, state.upper, shard_id=self._shard.id)
        need = await self._need(Antichain(as_of), as_of)
        try:
            await self._shard.register.wait(partial(self._passed, as_of, need))
        except BaseException:
            self._shard.hold.drop(need)
            raise
        return need

    def _passed(self, as_of: Time, need: Need, state: State) -> bool | None:
        self._shard.hold.check(need.reader)
        return None if state.upper.less_equal(as_of) else True

    # --- listens ---------------------------------------------------------------------------------

    def listen(
        self,
        as_of: Time | None = None,
        cursor: str | None = None,
        until: Antichain | Time | None = None,
    ) -> Opening[Listen[K, V]]:
        """All updates whose time is not `<= as_of`, as they come. Without `as_of` and `cursor` from the
        shard's upper on, by one linearizable read. Ends with the empty frontier, or with the first
        progress at or past `until`."""
        return Opening(lambda: self._open_listen(as_of, cursor, until), "reader.listen(...)")

    def subscribe(self, as_of: Time | None = None, cursor: str | None = None) -> Opening[Listen[K, V]]:
        """The snapshot at `as_of` as updates at `as_of`, then what comes after: no gap, no overlap."""
        return Opening(lambda: self._open_subscribe(as_of, cursor), "reader.subscribe(...)")

    async def _open_listen(
        self, as_of: Time | None, cursor: str | None, until: Antichain | Time | None
    ) -> Listen[K, V]:
        with self._scope.call():
            end = None if until is None else self._frontier(until)
            await self._confirm()
            if cursor is not None:
                return await self._resume(as_of, cursor, end)
            if as_of is not None:
                self._time(as_of)
                product = isinstance(as_of, tuple)
                first = minimum(self._schema.time_length) if product else successor(as_of)
                return await self._listen(Start(first, as_of, end))
            if self._schema.time_length is not None:
                raise InvalidUsage(UsageKind.INVALID_TIME, "with product times a listen needs as_of")
            return await self._from_upper(lambda upper: Start(upper, _before(upper), end))

    async def _open_subscribe(self, as_of: Time | None, cursor: str | None) -> Listen[K, V]:
        with self._scope.call():
            await self._confirm()
            if cursor is not None:
                return await self._resume(as_of, cursor, None)
            if as_of is None:
                if self._schema.time_length is not None:
                    raise InvalidUsage(UsageKind.INVALID_TIME, "with product times a subscribe needs as_of")
                return await self._from_upper(
                    lambda upper: Start(upper, None) if upper == minimum(None) else _contents(_last(upper))
                )
            self._time(as_of)
            return await self._listen(_contents(as_of))

    async def _from_upper(self, begin: Callable[[Antichain], Start]) -> Listen[K, V]:
        """Listen from the shard's upper on. Both frontiers may move until the hold is there."""
        while True:
            upper = (await self._shard.open()).upper
            try:
                return await self._listen(begin(upper))
            except SinceViolation:
                if self._shard.state.upper == upper:
                    raise

    async def _resume(self, as_of: Time | None, text: str, until: Antichain | None) -> Listen[K, V]:
        if as_of is not None:
            raise InvalidUsage(UsageKind.INVALID_CURSOR, "a cursor has its own as_of: do not give both")
        cursor = cursors.decode(text, self._shard.id)
        state = await self._shard.open()
        if cursor.seqno > state.seqno or not await version_at(
            self._stack, self._shard.id, cursor.seqno, cursor.commit
        ):
            raise Corruption(
                f"the cursor was taken at version {cursor.seqno} ({cursor.commit}), which is not there: "
                "was the store restored from a backup?",
                shard_id=self._shard.id,
            )
        if cursor.snapshot:
            assert cursor.as_of is not None
            return await self._listen(_contents(cursor.as_of, until))
        as_of = _before(cursor.frontier) if self._schema.time_length is None else cursor.as_of
        return await self._listen(Start(cursor.frontier, as_of, until))

    async def _listen(self, start: Start) -> Listen[K, V]:
        hold = _hold_of(start)
        at = start.as_of if start.as_of is not None else hold.elements[0] if hold.elements else None
        need = await self._need(hold, at)

        async def snapshot() -> AsyncGenerator[Updates[K, V, Any], None]:
            assert start.as_of is not None
            async with self.snapshot(start.as_of) as taken:
                async for updates in taken.updates():
                    yield updates

        shared, closed = self._shard.hold, self._opened.discard
        try:
            listen: Listen[K, V] = Listen(self._scope, self._fetch, shared, need, start, snapshot, closed)
        except BaseException:  # closed meanwhile
            shared.drop(need)
            raise
        self._opened.add(listen)
        return listen

    async def _need(self, hold: Antichain, as_of: Time | None) -> Need:
        try:
            return await self._shard.hold.need(hold)
        except SinceViolation as error:
            raise SinceViolation(as_of, error.since, shard_id=self._shard.id) from None

    # --- the end ---------------------------------------------------------------------------------

    async def release(self) -> None:
        """End this handle's hold at once, a named one too, and close it."""
        if self._own is not None:
            with self._scope.call():
                await self._own.release()
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of what is open and of the hold; a named hold is left to its lease. Idempotent."""
        if not self._scope.close():
            return
        release = self._stack.supervisor.spawn(self._release(), "release a reader")
        await asyncio.wait([release], timeout=RELEASE_DEADLINE_S)

    async def _release(self) -> None:
        async with AsyncExitStack() as steps:  # the last one first; each of them, whatever fails
            steps.push_async_callback(self._shard.hold.release)
            if self._own is not None:
                if self._own.owner is None:
                    steps.push_async_callback(self._own.release)
                else:
                    steps.callback(self._own.stop)
            for opened in self._opened:
                steps.push_async_callback(opened.aclose)

    # --- checks ----------------------------------------------------------------------------------

    async def _confirm(self) -> None:
        """With a hold of its own every call after its end is told so: one request."""
        if self._own is not None:
            await self._own.confirm()

    def _check_since(self, state: State, as_of: Time) -> None:
        if not state.since.less_equal(as_of):
            raise SinceViolation(as_of, state.since, shard_id=self._shard.id)

    def _time(self, time: object) -> Time:
        if isinstance(time, Antichain):
            raise InvalidUsage(
                UsageKind.INVALID_TIME, f"as_of is one time, not the frontier {time}", time=time
            )
        found = frontier(time)  # type: ignore[arg-type]  # checked there
        minimum(self._schema.time_length).less_equal(found.elements[0])
        return found.elements[0]

    def _frontier(self, value: Antichain | Time) -> Antichain:
        return shaped(value, self._schema.time_length)

    def __repr__(self) -> str:
        return f"<ReadHandle of {self._shard.id}: since {self.since}, upper {self.upper}>"


def _readable(state: State, as_of: Time) -> bool:
    return state.since.less_equal(as_of) and not state.upper.less_equal(as_of)


def _last(upper: Antichain) -> int:
    """The greatest complete int time; `upper` is not the minimum."""
    time = upper.time
    assert not isinstance(time, tuple)
    return TIME_MAX if time is None else time - 1


def _before(upper: Antichain) -> int | None:
    """The int time before `upper`; `None` at the minimum."""
    last = _last(upper)
    return last if last >= 0 else None


def _contents(as_of: Time, until: Antichain | None = None) -> Start:
    """Begin with the contents at `as_of`."""
    first = minimum(len(as_of)) if isinstance(as_of, tuple) else Antichain(as_of)
    return Start(first, as_of, until, snapshot=True)


def _hold_of(start: Start) -> Antichain:
    if start.snapshot and start.as_of is not None:
        return Antichain(start.as_of)
    return hold_for(start.frontier, start.as_of)
