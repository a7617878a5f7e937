"""Spans of what a client does, and of the requests that it makes meanwhile.

This is the door, and the form that does nothing: without a tracer provider of OpenTelemetry nothing is
imported or created, and each call here costs a tenth of a microsecond.

Work that is done together for several callers, such as a group of writes, continues the trace of the first
and links the others (`origin`, `group`). Background work begins a trace of its own (`background_context`): it
outlives the call that caused it.
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
        """Surrounds one thing that is done, in one task. `carriers`: traces of other processes that it
        belongs to. It continues the first, unless a trace is under way here, and is linked to the others."""
        return _NOTHING

    def iteration(
        self, name: str, shard: str, items: AsyncGenerator[T, None], *carriers: Mapping[str, str]
    ) -> AsyncGenerator[T, None]:
        """The items, with a span from the first to the last one, in whatever tasks they are taken."""
        return items

    def request(self, op: str, request: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Make a request to a store, with a span if it is made within another one."""
        return request()

    def origin(self) -> Any:
        """Where the caller stands in its trace, for `group`."""
        return None

    def group(self, origins: Iterable[Any]) -> AbstractContextManager[None]:
        """Surrounds what is done together for those callers."""
        return _NOTHING

    def background_context(self) -> Context | None:
        """A context for a task that is no part of the present trace; `None`: the present one does."""
        return None


NO_TRACING = Tracing()
