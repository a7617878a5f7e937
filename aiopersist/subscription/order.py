"""The order of acknowledgements that are under way at the same time.

An acknowledgement moves the position past all steps before its own. While the transaction of an earlier step
is undecided, that step is not done yet: it may meet a conflict and run again, or fail. So

- a later acknowledgement waits until the earlier ones are decided, or shares a commit with them;
- if an earlier one fails, those that were called before it failed are refused (`WOULD_SKIP`): their callers
  could not know. A call that begins after that goes on: its caller knows, and skips the step;
- calls that acknowledge steps of several subscriptions, each of which would wait for another one, are refused
  as they begin; so is a call that the body of an earlier one makes, or a task that this body began: it would
  wait for the body, and the body may wait for it.
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.state.position import Position

_within: ContextVar[tuple[object, ...]] = ContextVar("acknowledging", default=())
"""The marks of the calls whose bodies run here. A task that a body begins has them, too; it keeps no call."""


class Order:
    """The calls under way that acknowledge steps of one subscription."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.calls: dict[Acknowledging, Position] = {}


class Acknowledging:
    """One call that acknowledges steps, one of each of these subscriptions. It is undecided within its
    `with`."""

    def __init__(self, positions: Mapping[Order, Position]) -> None:
        self._positions = dict(positions)
        self._moved = asyncio.Event()
        self._queued = False
        self._mark = object()
        self._outer: tuple[object, ...] = ()
        self.is_decided = False
        """Whether it has happened, though its caller may not know it yet."""
        self.refusal: InvalidUsage | None = None
        """Why it is refused, once an earlier one has failed."""

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
        """Whether it waits for the group commit, which takes calls in their order."""
        return self._queued

    @queued.setter
    def queued(self, queued: bool) -> None:
        self._queued = queued
        self._tell()

    def earlier(self) -> Iterator["Acknowledging"]:
        """The undecided calls with an earlier step."""
        for order, mine in self._positions.items():
            for call, position in order.calls.items():
                if position.is_before(mine) and not call.is_decided:
                    yield call

    async def turn(self, *, to_queue: bool = False) -> None:
        """Return once all earlier ones are decided; `to_queue`: or queue. `WOULD_SKIP` if one has failed."""
        while True:
            self.check()
            waits_for = [call for call in self.earlier() if not (to_queue and call.queued)]
            if not waits_for:
                return
            await waits_for[-1]._moved.wait()

    def check(self) -> None:
        """`WOULD_SKIP` if an earlier one has failed since this one began."""
        if self.refusal is not None:
            raise self.refusal

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    def _refuse_later(self) -> None:
        for order, mine in self._positions.items():
            text = f"an earlier step of subscription {order.key!r} failed while this call waited for it"
            for call, position in order.calls.items():
                if mine.is_before(position) and call.refusal is None:
                    call.refusal = InvalidUsage(UsageKind.WOULD_SKIP, text)

    def _check_apart(self) -> None:
        """`WOULD_SKIP` if the body of an earlier one makes this call, or a task of it."""
        if any(call._mark in self._outer for call in self.earlier()):
            text = "the body of a transaction acknowledges a later step than it does: neither can go first"
            raise InvalidUsage(UsageKind.WOULD_SKIP, text)

    def _check_uncrossed(self) -> None:
        """`WOULD_SKIP` if one that it would wait for would wait for it. Only calls with several subscriptions
        can: those of a single one stand in one order."""
        seen: set[Acknowledging] = set()
        todo: list[Acknowledging] = [self]
        while todo:
            call = todo.pop()
            if call is not self and self._is_before(call):
                text = "each of two calls acknowledges a step before one of the other's: neither can go first"
                raise InvalidUsage(UsageKind.WOULD_SKIP, text)
            found = {one for one in call.earlier() if len(one._positions) > 1} - seen
            seen |= found
            todo += found

    def _is_before(self, other: "Acknowledging") -> bool:
        shared = self._positions.keys() & other._positions.keys()
        return any(self._positions[order].is_before(other._positions[order]) for order in shared)


def is_consumed(error: BaseException) -> bool:
    """Whether the error says that the step itself was acknowledged before."""
    return isinstance(error, InvalidUsage) and error.kind is UsageKind.CONSUMED
