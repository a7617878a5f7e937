"""The order of acknowledgements that run at the same time.

An acknowledgement moves the position past all steps before its own. While the transaction of an earlier step
is undecided, that step is not done: it may meet a conflict and run again, or fail. So

- a later acknowledgement waits until the earlier ones are decided, or shares a commit with them;
- if an earlier one fails, all calls that began before are refused (`WOULD_SKIP`), since their callers could
  not know of it. A call that begins afterwards continues: its caller knows, and skips the step;
- calls of several subscriptions that would wait for each other are refused when they begin. So is a call from
  the body of an earlier one, or from a task of this body: each would wait for the other.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.state.position import Position

_within: ContextVar[tuple[object, ...]] = ContextVar("acknowledging", default=())
"""The marks of the calls whose bodies, or tasks of them, run here. A mark keeps no call alive."""


class Order:
    """The running calls that acknowledge steps of one subscription."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.calls: dict[Acknowledging, Position] = {}


class Acknowledging:
    """One call that acknowledges a step of each of these subscriptions. It is undecided within its `with`."""

    def __init__(self, positions: Mapping[Order, Position]) -> None:
        self._positions = dict(positions)
        self._moved = asyncio.Event()
        self._queued = False
        self._mark = object()
        self._outer: tuple[object, ...] = ()
        self.is_decided = False
        """Whether it has happened; its caller may not know yet."""
        self.refusal: InvalidUsage | None = None
        """The error after an earlier one has failed."""

    def __enter__(self) -> Self:
        self._outer = _within.get()
        self._check_apart()
        if len(self._positions) > 1:
            self._check_uncrossed()
        for order, position in self._positions.items():
            order.calls[self] = position
        _within.set((*self._outer, self._mark))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _within.set(self._outer)
        if error is not None and not is_consumed(error):
            self._refuse_later()
        for order in self._positions:
            del order.calls[self]
        self._tell()

    @property
    def queued(self) -> bool:
        """Whether it waits for the group commit, which keeps the order of calls."""
        return self._queued

    @queued.setter
    def queued(self, queued: bool) -> None:
        self._queued = queued
        self._tell()

    def earlier(self) -> Iterator["Acknowledging"]:
        """The undecided calls with an earlier step."""
        for order, own in self._positions.items():
            for call, position in order.calls.items():
                if position.is_before(own) and not call.is_decided:
                    yield call

    async def turn(self, *, to_queue: bool = False) -> None:
        """Return once all earlier calls are decided, or `to_queue`. `WOULD_SKIP` if one has failed."""
        while True:
            self.check()
            waits_for = [call for call in self.earlier() if not (to_queue and call.queued)]
            if not waits_for:
                return
            await waits_for[-1]._moved.wait()

    def check(self) -> None:
        """`WOULD_SKIP` if an earlier call has failed since this one began."""
        if self.refusal is not None:
            raise self.refusal

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _refuse_later(self) -> None:
        for order, own in self._positions.items():
            text = f"an earlier step of subscription {order.key!r} failed while this call waited for it"
            for call, position in order.calls.items():
                if own.is_before(position) and call.refusal is None:
                    call.refusal = InvalidUsage(UsageKind.WOULD_SKIP, text)

    def _check_apart(self) -> None:
        """`WOULD_SKIP` if the body of an earlier call, or a task of that body, makes this one."""
        if any(call._mark in self._outer for call in self.earlier()):
            text = "the body of a transaction acknowledges a later step than it does: neither can go first"
            raise InvalidUsage(UsageKind.WOULD_SKIP, text)

    def _check_uncrossed(self) -> None:
        """`WOULD_SKIP` if two calls would wait for each other. This needs calls of several subscriptions:
        those of one have one order."""
        seen: set[Acknowledging] = set()
        todo: list[Acknowledging] = [self]
        while todo:
            call = todo.pop()
            if call is not self and self._is_before(call):
                text = "each of two calls acknowledges a step before one of the other's: neither can go first"
                raise InvalidUsage(UsageKind.WOULD_SKIP, text)
            waited_for = {one for one in call.earlier() if len(one._positions) > 1} - seen
            seen |= waited_for
            todo += waited_for

    def _is_before(self, other: "Acknowledging") -> bool:
        shared = self._positions.keys() & other._positions.keys()
        return any(self._positions[order].is_before(other._positions[order]) for order in shared)


def is_consumed(error: BaseException) -> bool:
    """Whether the error says that the step itself was acknowledged before."""
    return isinstance(error, InvalidUsage) and error.kind is UsageKind.CONSUMED
