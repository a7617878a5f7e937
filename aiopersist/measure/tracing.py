"""Spans of a client's work, and of its requests.

This is the interface, and the form that does nothing: without a tracer provider of OpenTelemetry nothing is
imported or created, and each call costs a tenth of a microsecond.

Work for several callers, for example a group of writes, continues the trace of the first and links the others
(`origin`, `group`). Background work begins a trace of its own (`background_context`), since it outlives the
call that caused it.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

_NOTHING: AbstractContextManager[None] = nullcontext()


class Tracing:
    """No spans."""

    on = False
    """Whether there are spans."""

    def span(self, name: str, shard: str = "", *carriers: Mapping[str, str]) -> AbstractContextManager[None]:
        """A scope for a piece of work in one task. `carriers`: traces of other processes that it belongs to.
        It continues the first, unless a trace is under way here, and is linked to the others."""
        return _NOTHING

    def iteration(
        self, name: str, shard: str, items: AsyncGenerator[T, None], *carriers: Mapping[str, str]
    ) -> AsyncGenerator[T, None]:
        """The items, with a span from the first to the last, in whatever tasks they are taken."""
        return items

    def request(self, op: str, request: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Make a request to a store, with a span if it is within another span."""
        return request()

    def origin(self) -> Any:
        """The position of the caller in its trace, for `group`."""
        return None

    def group(self, origins: Iterable[Any]) -> AbstractContextManager[None]:
        """A scope for the common work of these callers."""
        return _NOTHING

    def background_context(self) -> Context | None:
        """A context for a task outside of the present trace; `None`: the present context."""
        return None


NO_TRACING = Tracing()
