"""Functions of the user that decide: plain ones, not coroutines."""

from collections.abc import Callable
from inspect import isawaitable, iscoroutine
from typing import Any, TypeVar

from aiopersist.errors import shown

T = TypeVar("T")


def decided(function: Callable[..., T], *arguments: Any) -> T:
    """What `function` says; `TypeError` if that has to be awaited: it would pass for true."""
    result = function(*arguments)
    if isawaitable(result):
        if iscoroutine(result):
            result.close()
        raise TypeError(f"{shown(function)} is a coroutine function, where a plain one is wanted")
    return result
