"""Calls of functions of users: plain functions or coroutine functions, and errors for the other kind.

A change that the body of a transaction makes without the transaction stays if the body raises, and happens
again if the body runs again. The log warns of it. It is no error, since a body may wait for its own client.
Only calls in the body's own task count: work in another task is meant to be separate.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import isawaitable, iscoroutine
from typing import Any, TypeVar

from aiopersist.base.errors import shown

T = TypeVar("T")
log = logging.getLogger("aiopersist").getChild("table")


def call_plain(function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function`; `TypeError` if it is awaitable, which would count as true."""
    result = function(*arguments)
    if isawaitable(result):
        if iscoroutine(result):
            result.close()
        raise TypeError(f"{shown(function)} is a coroutine function, where a plain function is needed")
    return result


async def call_async(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """The result of `function`; `TypeError` if it is no coroutine function."""
    result: Any = function(*arguments) if callable(function) else None
    if not isawaitable(result):
        raise TypeError(f"{shown(function)} is no coroutine function: give one that `async def` makes")
    awaited: T = await result
    return awaited


@dataclass(eq=False)
class _Body:
    client: object
    task: "asyncio.Task[Any] | None"
    warned: set[str] = field(default_factory=set)


_running: ContextVar[_Body | None] = ContextVar("body", default=None)


@contextmanager
def body_of(client: object) -> Iterator[None]:
    """The scope in which the body of a transaction of that client runs, in this task."""
    token = _running.set(_Body(client, asyncio.current_task()))
    try:
        yield
    finally:
        _running.reset(token)


def warn_in_body(client: object, call: str, instead: str, depth: int = 3) -> None:
    """Warn, once for a run, if the body of a transaction of that client makes this call. The log has the
    position `depth` frames away, this one included."""
    body = _running.get()
    if body is None or body.client is not client or body.task is not asyncio.current_task():
        return
    if call not in body.warned:
        body.warned.add(call)
        text = (
            "%s in the body of a transaction is no part of it: it stays if the body raises, and happens "
            "again if the body runs again. Write %s; or do it in a task of its own"
        )
        log.warning(text, call, instead, extra={"call": call}, stacklevel=depth)
