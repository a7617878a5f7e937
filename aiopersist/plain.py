"""Calls of functions that a user gives: plain functions, or coroutine functions, not the other kind."""

from collections.abc import Awaitable, Callable
from inspect import isawaitable, iscoroutine
from typing import Any, TypeVar

from aiopersist.errors import shown

T = TypeVar("T")


def call_plain(function: Callable[..., T], *arguments: Any) -> T:
    """The result of `function`; `TypeError` if it is awaitable, which would pass for true."""
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
