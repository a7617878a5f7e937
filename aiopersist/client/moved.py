"""Deprecated names of version 0.1: forwards to `client.admin` and `client.workers`."""

from collections.abc import Awaitable, Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from aiopersist.client.admin import Admin
from aiopersist.client.workers import Workers

P = ParamSpec("P")
R = TypeVar("R")


def _moved(attribute: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    def call(client: Any, /, *arguments: P.args, **options: P.kwargs) -> R:
        return method(getattr(client, attribute), *arguments, **options)

    async def call_async(client: Any, /, *arguments: P.args, **options: P.kwargs) -> Any:
        return await cast(Awaitable[Any], call(client, *arguments, **options))

    forward = wraps(method)(call_async if iscoroutinefunction(method) else call)
    forward.__doc__ = f"Deprecated since 0.2: call `client.{attribute}.{method.__name__}`."
    return cast(Callable[Concatenate[Any, P], R], forward)


class MovedCalls:
    """See the header. Version 0.3 begins to warn; the release after it removes them."""

    overview = _moved("admin", Admin.overview)
    inspect = _moved("admin", Admin.inspect)
    retain = _moved("admin", Admin.retain)
    maintain = _moved("admin", Admin.maintain)
    force_compaction = _moved("admin", Admin.force_compaction)
    force_gc = _moved("admin", Admin.force_gc)
    subscriptions = _moved("admin", Admin.subscriptions)
    drop_subscription = _moved("admin", Admin.drop_subscription)
    drop = _moved("admin", Admin.drop)
    finalize = _moved("admin", Admin.finalize)
    erase = _moved("admin", Admin.erase)
    copy_shard = _moved("admin", Admin.copy_shard)
    fsck = _moved("admin", Admin.fsck)
    sweep_leaked_blobs = _moved("admin", Admin.sweep_leaked_blobs)
    usage = _moved("admin", Admin.usage)
    shared_read = _moved("workers", Workers.shared_read)
    read_piece = _moved("workers", Workers.read_piece)
    fetch_part = _moved("workers", Workers.fetch_part)
    register_writer = _moved("workers", Workers.register_writer)
    release_writer = _moved("workers", Workers.release_writer)
    builder_from_transmittable = _moved("workers", Workers.builder_from_transmittable)
    shared_compaction = _moved("workers", Workers.shared_compaction)
    compact_piece = _moved("workers", Workers.compact_piece)
