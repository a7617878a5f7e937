"""The upkeep of one shard by one client, as single steps. When they run is decided
elsewhere (`background.py`); what they do is told in `compact.py` and `gc/`.

All steps work under one *registration* of a writer, since every blob and every claim carries one. If
something fails, or is cut off, the registration ends, and with it end the claims that were taken under
it: nobody waits for a lease.

What failed *rests*, longer each time: a blob that is lost must not keep the rest of the shard from
being compacted.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiopersist.compact import compact, compact_all, whole_bytes
from aiopersist.errors import BatchExpired, Error
from aiopersist.gc.collect import Collected, collect, held, horizon
from aiopersist.maintenance.due import all_inputs
from aiopersist.resource import RELEASE_DEADLINE_S
from aiopersist.rollup import write_rollup
from aiopersist.settings import MIB, Settings
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import COLLECTION, ReleaseClaim, Spec, TakeClaim, plan
from aiopersist.state.model import State
from aiopersist.state.retention import ApplyRetention

log = logging.getLogger("aiopersist")

REST_MIN_S = 0.5  # after a compaction that failed, or found that somebody else was at it
REST_MAX_S = 300.0
GARBAGE_SHARE = 4  # replaced bytes beside those in use, that are collected before the next rollup is due
GARBAGE_BYTES_MIN = MIB // 4
FORCED_MAX = 5  # registrations that a forced compaction may lose on its way


class Rest(NamedTuple):
    """Until when something is not tried again, and how long it rests if it fails then."""

    until: float
    next_s: float


class ShardUpkeep:
    """See the header."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._stack = shard.stack
        self._registering = asyncio.Lock()
        self._registration: Registration | None = None
        self._resting: dict[int, Rest] = {}  # by the first ordinal, or `COLLECTION`
        self._replaced_at: int | None = None  # the version since which blobs are replaced, not collected
        self._replaced_bytes = 0

    # --- steps -----------------------------------------------------------------------------------

    async def move_since(self, *, exact: bool) -> None:
        """Move since to where the policy wants it. At most one commit."""
        await commit(self.shard.register, ApplyRetention(exact), Slot())

    async def compact(
        self,
        wanted: Callable[[State, Settings], int] = all_inputs,
        *,
        much: bool | None = None,
        claims_all: bool = False,
    ) -> int:
        """Do what the spine asks for, where it makes one of as many batches as are `wanted`, until nothing is
        left; says how often something was compacted. `much`: only what takes the memory of a compaction,
        or only what does not. `claims_all`: take a claim also for what costs less than a claim. What
        failed rests."""
        done = 0
        while (spec := self._next(wanted, much)) is not None:
            self._rest(spec.first)
            async with self.registered() as registration:
                applied = await compact(self.shard, spec, registration, claims_all=claims_all)
            if applied:
                self._resting.pop(spec.first, None)
                self._replaced(spec)
                done += 1
        return done

    def _next(self, wanted: Callable[[State, Settings], int], much: bool | None) -> Spec | None:
        state, settings = self.shard.state, self._stack.settings

        def suits(spec: Spec) -> bool:
            is_much = spec.goodbytes > whole_bytes(settings)
            return much in (None, is_much) and not self.rests(spec.first)

        return plan(state, wanted(state, settings), suits)

    def _replaced(self, spec: Spec) -> None:
        """What `spec` names is garbage from now on."""
        self._replaced_at = self.shard.state.seqno
        self._replaced_bytes += spec.blob_bytes

    async def collect(self) -> Collected | None:
        """Write a rollup of now and collect what nobody needs any more; `None` if somebody else is at it. If
        it fails it rests."""
        self._rest(COLLECTION)
        async with self.registered() as registration:
            claim = TakeClaim(registration.writer, COLLECTION, COLLECTION)
            if not await commit(self.shard.register, claim, Slot()):
                return None
            await write_rollup(self.shard, registration.writer)
            collected = await collect(self.shard)
            reached = horizon(self.shard.state)
            if self._replaced_at is not None and reached is not None and self._replaced_at <= reached:
                self._replaced_at, self._replaced_bytes = None, 0
            await commit(self.shard.register, ReleaseClaim(registration.writer, COLLECTION), Slot())
        self._resting.pop(COLLECTION, None)
        return collected

    @property
    def owes_collection(self) -> bool:
        """Whether compactions of this process have left blobs."""
        return self._replaced_at is not None

    @property
    def owes_much(self) -> bool:
        """Whether compactions of this process have left blobs of many bytes, beside those in use."""
        live = sum(part.size for batch in self.shard.state.batches.values() for part in batch.parts)
        return self._replaced_bytes > max(live // GARBAGE_SHARE, GARBAGE_BYTES_MIN)

    def can_collect_more(self, state: State) -> bool:
        """Whether no reader holds any longer what compactions of this process have left."""
        if self._replaced_at is None:
            return False
        rollups = (seqno for seqno in state.rollups if seqno >= self._replaced_at)
        return min(rollups, default=self._replaced_at) <= held(state)

    # --- what somebody waits for -----------------------------------------------------------------

    async def force_compaction(self) -> None:
        """Make everything that is there one batch, and return when that is applied."""
        await self.shard.open()
        await self.move_since(exact=True)
        state = self.shard.state
        if not state.batches:
            return
        last, since = next(reversed(state.batches)), state.since
        for attempt in range(FORCED_MAX):
            try:
                async with self.registered() as registration:
                    await compact_all(self.shard, registration, last, since)
                return
            except BatchExpired:  # a registration that was lost on the way: with another one it goes on
                if attempt == FORCED_MAX - 1:
                    raise

    async def roll_up(self) -> None:
        """Write a rollup of now, unless a newer one is there."""
        async with self.registered() as registration:
            await write_rollup(self.shard, registration.writer)

    async def force_collection(self) -> Collected:
        """Write a rollup of now, and collect what nobody needs any more, whoever else is at it."""
        state = await self.shard.register.refresh()
        if state is not None and not state.finalized:
            await self.roll_up()
        return await collect(self.shard)

    # --- its registration ------------------------------------------------------------------------

    @asynccontextmanager
    async def registered(self) -> AsyncIterator[Registration]:
        """A registration to work under."""
        async with self._registering:
            if self._registration is None or not self._registration.alive:
                self._registration = await Registration.fresh(self.shard)
            registration = self._registration
            registration.hold()
        try:
            yield registration
        except BaseException:
            if self._registration is registration:
                self._registration = None
            self._stack.supervisor.spawn(registration.expire(), "end a registration with its claims")
            raise
        finally:
            registration.release()

    async def release(self) -> None:
        """End the registration; whatever comes later has another one."""
        registration, self._registration = self._registration, None
        if registration is None or not registration.alive:
            return
        try:
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await registration.expire()
        except (Error, TimeoutError) as error:
            log.warning("a registration is left to its lease: %s", error)

    # --- rest ------------------------------------------------------------------------------------

    def rests(self, first: int) -> bool:
        """Whether what begins there, or `COLLECTION`, is not to be tried now."""
        rest = self._resting.get(first)
        return rest is not None and self._stack.runtime.monotonic() < rest.until

    @property
    def rests_any(self) -> bool:
        """Whether anything failed, and is to be tried again."""
        return any(map(self.rests, self._resting))

    def _rest(self, first: int) -> None:
        """Do not try what begins there for a while, unless it turns out well."""
        for_s = self._resting[first].next_s if first in self._resting else REST_MIN_S
        until = self._stack.runtime.monotonic() + for_s
        there = {COLLECTION, *self.shard.state.batches}
        self._resting = {f: rest for f, rest in self._resting.items() if f in there}
        self._resting[first] = Rest(until, min(2 * for_s, REST_MAX_S))
