"""Stores that may only be read: a readonly client gets these, whatever its code does.

They stand directly before the stores, below retries and counts. Every write is `Unsupported`, which is
determinate and is not retried: nothing was sent.
"""

from collections.abc import Awaitable
from typing import NoReturn, TypeVar

from aiopersist.base.errors import Unsupported
from aiopersist.storage.wrapper import READS, Request, WrappedBlob, WrappedConsensus

T = TypeVar("T")


def refuse(what: str) -> NoReturn:
    """Raise the error that `what` writes, and the client is readonly."""
    raise Unsupported(f"{what} writes, and the client was opened with readonly=True")


class ReadonlyBlob(WrappedBlob):
    """The reads of `inner`."""

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return request() if op in READS else refuse(op)


class ReadonlyConsensus(WrappedConsensus):
    """The reads of `inner`."""

    def _request(self, op: str, request: Request[T], sent: int = 0) -> Awaitable[T]:
        return request() if op in READS else refuse(op)
