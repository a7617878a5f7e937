"""Helpers that the tests of wall clocks share."""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import Runtime

MICROS = 1_000_000


class SetClock(Runtime):
    """The host's clock, which embedded stores tell, ahead of the true one as far as a test sets it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead_s


class Sites:
    """A location in memory, opened by clients with clocks of their own."""

    def __init__(self) -> None:
        self.url = f"mem://{uuid.uuid4().hex}"

    def open(self, clock: Runtime | None = None, **options: Any) -> Any:
        limits = {"watch_timeout_s": 0.02, **options.pop("limits", {})}
        options = {"maintenance": False, "runtime": clock or SetClock(), **options}
        return ap.open(self.url, settings=ap.Settings(**limits), **options)


def time_at(moment: datetime) -> int:
    """That moment as a time of a wall clock, exactly."""
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def now_of(client: ap.Client) -> datetime:
    return datetime.fromtimestamp(client.clock()[0], UTC)


def refused(kind: str) -> Any:
    """`pytest.raises` of `InvalidUsage` of that kind."""
    check: Callable[[Any], bool] = lambda error: error.kind == kind  # noqa: E731  # one line
    return pytest.raises(ap.InvalidUsage, check=check)
