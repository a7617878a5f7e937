"""One fault in a call of the library: at its n-th call to a store, or at its n-th wait.

*At a store call.* It is refused, it is lost before or after it happened, or happens once nobody waits for it;
it is lost while others go on and collect what tells of it; it raises what nobody foresaw; the store is gone
from then on; the caller is cancelled while it is on its way; or the process stood still before it, for longer
than any lease, unnoticed or with others sweeping up meanwhile.

*At a wait.* The caller is cancelled while it waits for the n-th time, in the very turn of the loop in which
the answer arrives, or at that wait and at each one that follows as it cleans up.
"""

import asyncio
import types
from collections.abc import Awaitable, Coroutine, Generator
from enum import StrEnum
from typing import Any, NamedTuple

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.stash.model import Fence, Loaded, Opener, Select, Sending, StoreChange, Verdict
from aiopersist.stash.store import Store
from tests.support.location import WayBlob, WayConsensus
from tests.support.shards import Call

PAUSE_S = 1e6  # longer than any lease, shorter than what is kept of transactions
WAITS_MAX = 20_000  # of one call: one that waits more often does not end


class Unforeseen(RuntimeError):
    """What no `except` of the library names."""


class Fault(StrEnum):
    """What becomes of the store call whose turn it is."""

    REFUSED = "refused"
    DROPPED = "dropped"
    LOST = "lost"
    RAISES = "raises"
    RAISES_LATE = "raises late"
    GONE = "gone"
    LOST_AND_GONE = "lost and gone"
    LATE = "late"
    VERY_LATE = "very late"
    LOST_AND_PASSED = "lost and passed"
    DROPPED_AND_PASSED = "dropped and passed"
    CANCELLED = "cancelled"
    PAUSED = "paused"
    SWEPT = "swept"


class Cut(StrEnum):
    """When the caller is cancelled."""

    WAITING = "waiting"
    ANSWERED = "answered"
    AGAIN = "again and again"


class Trouble:
    """Between a client and its stores; it passes for the `Faults` of its stores. Calls are counted from
    `begin` to `end`; the one of number `at` meets the fault."""

    losing_hints = False

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.at = 0
        self.calls = 0
        self.op = ""
        """Of the call that met the fault."""
        self.ahead_s = 0.0
        """Of the clock, for all clients."""
        self.sweep: Call = lambda: asyncio.sleep(0)
        """What others do while the process stands still."""
        self.pass_by: Call = lambda: asyncio.sleep(0)
        """What others do while an answer is lost."""
        self._late: list[Call] = []
        self._counting = self._gone = False
        self._task: asyncio.Task[Any] | None = None

    def begin(self, fault: Fault | None, at: int) -> None:
        self.fault, self.at, self.calls, self._counting = fault, at, 0, True
        self._task = asyncio.current_task()

    def end(self) -> None:
        self._counting = self._gone = False

    async def land(self) -> None:
        """What was late happens."""
        late, self._late = self._late, []
        for act in late:
            await act()

    async def call(self, op: str, act: Call, what: Any = None) -> Any:
        if not self._counting:
            return await act()
        if self._gone:
            raise StorageUnavailable(f"injected: {op}: the store is gone")
        self.calls += 1
        if self.calls != self.at or self.fault is None:
            return await act()
        self.op = op
        return await self._meet(self.fault, op, act)

    async def _meet(self, fault: Fault, op: str, act: Call) -> Any:
        self._gone = fault in (Fault.GONE, Fault.LOST_AND_GONE)
        if fault in (Fault.REFUSED, Fault.GONE):
            raise StorageUnavailable(f"injected: {op} is refused")
        if fault in (Fault.LATE, Fault.VERY_LATE) and op != "watch":  # a hint would be waited for
            self._late.append(act)
        if fault is Fault.DROPPED_AND_PASSED:
            await self._others(self.pass_by)
        if fault in (Fault.DROPPED, Fault.DROPPED_AND_PASSED, Fault.LATE, Fault.VERY_LATE):
            raise Indeterminate(f"injected: {op} does not arrive")
        if fault is Fault.RAISES:
            raise Unforeseen(op)
        if fault in (Fault.PAUSED, Fault.SWEPT):
            self.ahead_s += PAUSE_S
        if fault is Fault.SWEPT:
            await self._others(self.sweep)
        if fault is Fault.CANCELLED:
            assert self._task is not None
            self._task.cancel()
            await asyncio.sleep(0)  # it goes on meanwhile
        result = await act()
        if fault is Fault.RAISES_LATE:
            raise Unforeseen(op)
        if fault is Fault.LOST_AND_PASSED:
            await self._others(self.pass_by)
        if fault in (Fault.LOST, Fault.LOST_AND_GONE, Fault.LOST_AND_PASSED):
            raise Indeterminate(f"injected: the answer to {op} is lost")
        return result

    async def _others(self, act: Call) -> None:
        self._counting = False
        await act()
        self._counting = True


class TroubledConsensus(WayConsensus):
    async def now(self) -> float:
        trouble: Any = self.faults
        return float(await super().now() + trouble.ahead_s)

    async def clock(self) -> float:
        trouble: Any = self.faults
        return float(await super().clock() + trouble.ahead_s)


TroubledBlob = WayBlob


class TroubledStore(Store):
    """Of a stash."""

    def __init__(self, inner: Store, trouble: Trouble) -> None:
        self.inner, self.trouble = inner, trouble

    async def take(self, opener_id: str, token: str, nonce: str | None) -> Fence:
        return await self._call("take", lambda: self.inner.take(opener_id, token, nonce))

    async def enroll(self, opener_id: str, token: str) -> None:
        await self._call("enroll", lambda: self.inner.enroll(opener_id, token))

    async def load(self, select: Select) -> Loaded | None:
        return await self._call("load", lambda: self.inner.load(select))

    async def commit(self, opener: Opener, change: StoreChange, sending: Sending) -> Verdict:
        return await self._call("commit", lambda: self.inner.commit(opener, change, sending))

    async def token(self, opener_id: str) -> str | None:
        return await self._call("token", lambda: self.inner.token(opener_id))

    async def consolidate(self, opener: Opener, collection_id: int) -> int | None:
        return await self._call("consolidate", lambda: self.inner.consolidate(opener, collection_id))

    async def forget(self, opener_id: str) -> None:
        await self._call("forget", lambda: self.inner.forget(opener_id))

    async def wish(self, opener_id: str, for_s: float, waited_s: float) -> None:
        await self._call("wish", lambda: self.inner.wish(opener_id, for_s, waited_s))

    def stand_back_s(self, opener_id: str, waited_s: float) -> float:
        return self.inner.stand_back_s(opener_id, waited_s)

    async def aclose(self) -> None:
        await self.inner.aclose()

    async def _call(self, op: str, act: Call) -> Any:
        """A store of a stash is the library's own: it raises nothing else."""
        try:
            return await self.trouble.call(op, act)
        except Unforeseen as error:
            raise Indeterminate(f"{op} failed") from error


class Waits:
    """Counts the waits of a call, and cuts it off at the one of number `at`."""

    def __init__(self, cut: Cut | None = None, at: int = 0) -> None:
        self.cut, self.at, self.number = cut, at, 0

    def __call__(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return self._stepped(work)

    @types.coroutine
    def _stepped(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        task, value, error = asyncio.current_task(), None, None
        assert task is not None
        while True:
            try:
                waited = work.send(value) if error is None else work.throw(error)
            except StopIteration as end:
                return end.value
            self.number += 1
            assert self.number < WAITS_MAX, "it does not end"
            if self._is_due:
                self._cancel(task, waited)
            value, error = None, None
            try:
                value = yield waited
            except BaseException as thrown:
                error = thrown

    @property
    def _is_due(self) -> bool:
        return self.number == self.at or (self.cut is Cut.AGAIN and 0 < self.at < self.number)

    def _cancel(self, task: "asyncio.Task[Any]", waited: Any) -> None:
        if self.cut is Cut.ANSWERED and isinstance(waited, asyncio.Future):
            waited.add_done_callback(lambda _: task.cancel())  # told before the task is
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


class Met(NamedTuple):
    """What came of a call that met trouble."""

    raised: BaseException | None
    reached: bool
    """Whether it made so many calls, or waits."""


async def troubled(
    trouble: Trouble, work: Coroutine[Any, Any, Any], fault: Fault | Cut | None, at: int
) -> Met:
    """Do `work`, with that fault at that place."""
    waits = Waits(fault, at) if isinstance(fault, Cut) else Waits()

    async def call() -> None:
        trouble.begin(fault if isinstance(fault, Fault) else None, at)
        await waits(work)

    task = asyncio.create_task(call())
    await asyncio.wait([task])
    trouble.end()
    raised = asyncio.CancelledError() if task.cancelled() else task.exception()
    return Met(raised, waits.number >= at if isinstance(fault, Cut) else bool(trouble.op))
