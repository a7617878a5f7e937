"""Bugs of what is concluded from answers that are not the store's. Worlds have them from `MORE_FROM` on."""

from typing import Any

import pytest

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.objects import answers, clock
from aiopersist.testing.simulation import between
from tests.worlds.everything import MORE_FROM
from tests.worlds.planted import Bug


def a_status_that_decides(patch: pytest.MonkeyPatch) -> None:
    """What something between says is taken for a refusal of the store."""

    def by_status(text: str, status: int, code: str, *, writing: bool) -> Exception:
        if status in (408, 429, 503):
            return StorageUnavailable(text)
        return answers.refusal(text, status, code, writing=writing)

    patch.setattr(between, "refusal", by_status)


def a_date_that_counts_alone(patch: pytest.MonkeyPatch) -> None:
    """The clock is set by the last answer, whatever it says."""

    def answered(self: Any, date: str | None, sent: float) -> None:
        told = clock._moment(date)
        if told is not None:
            now = self._runtime.monotonic()
            self._bounds = clock._Bounds(told - now, told + 1 - sent)

    patch.setattr(clock.ServerClock, "answered", answered)


BUGS = [
    Bug("answers", a_status_that_decides, "", MORE_FROM),
    Bug("answers", a_date_that_counts_alone, "counter putter mover guard", MORE_FROM),
]
