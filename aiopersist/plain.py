"""Calls of functions that a user gives: plain functions, not coroutine functions."""

from collections.abc import Callable
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
