"""The clock of a server that tells the time in whole seconds, with each answer that is its own.

An answer with the second `d` was made in `[d, d + 1)` by the server's clock, and between the sending of the
request and its arrival by ours: so it bounds the difference of the two clocks. Bounds of several answers
together are narrower.

If answers contradict each other, a clock was set, or something on the way wrote the date. If they differ by a
few seconds, only the last answer counts. A larger step counts once `AGREE` answers in a row agree about it. A
step of more than `ahead_max_s` is ignored, since it would move the times of the location and end leases,
unless the clock of this machine says the same, as after it stood still for long.
"""

import logging
import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple

from aiopersist.base.runtime import Runtime
from aiopersist.storage.objects.answers import has_request_id, is_code

log = logging.getLogger("aiopersist").getChild("storage")

AGREE = 3  # answers in a row
STEP_S = 5.0  # the clocks of the servers of one store differ by less
AHEAD_MAX_S = 3600.0  # as in the settings, until they are known
LEAST, MOST = 0.0, 7.2e9  # what a clock may say, up to the year 2198
_YEAR = re.compile(r" (\d{4}) ")  # mail has years of two digits, too


class _Bounds(NamedTuple):
    """The server's clock is ahead of our monotonic one by at least, and at most, so many seconds."""

    least: float
    most: float

    @property
    def middle(self) -> float:
        return (self.least + self.most) / 2

    def distance(self, other: "_Bounds") -> float:
        """By how much they contradict each other; at most 0 if they do not."""
        return max(self.least - other.most, other.least - self.most)

    def narrowed(self, other: "_Bounds") -> "_Bounds":
        """Those of both; of the other alone if they contradict each other."""
        return other if self.distance(other) > 0 else _Bounds(max(self[0], other[0]), min(self[1], other[1]))


class ServerClock:
    """See the header."""

    def __init__(self, runtime: Runtime) -> None:
        self.ahead_max_s = AHEAD_MAX_S
        self._runtime = runtime
        self._bounds: _Bounds | None = None
        self._stepped: list[_Bounds] = []
        """The last answers, which contradict the bounds, and agree with each other."""
        self._has_refused = False

    @property
    def is_known(self) -> bool:
        return self._bounds is not None

    @property
    def is_in_doubt(self) -> bool:
        """Whether the last answer contradicts those before it, and too few have come since."""
        return bool(self._stepped)

    @property
    def error_s(self) -> float:
        """By how much `now` may be wrong."""
        return 0.0 if self._bounds is None else (self._bounds.most - self._bounds.least) / 2

    def sent(self) -> float:
        """What `answered` is to be told of a request that is sent now."""
        return self._runtime.monotonic()

    def heard(self, headers: Mapping[str, str], code: str, sent: float) -> None:
        """`answered`, if the answer with these headers, in lower case, and this code is the server's own."""
        if has_request_id(headers) or is_code(code):
            self.answered(headers.get("date"), sent)

    def answered(self, date: str | None, sent: float) -> None:
        """An answer of the server came just now, to a request of which `sent` gave that moment. `date`: its
        header, as of HTTP."""
        second = _moment(date)
        if second is None:
            return
        answer = _Bounds(second - self._runtime.monotonic(), second + 1 - sent)
        if self._bounds is None or self._bounds.distance(answer) <= STEP_S:
            self._bounds = answer if self._bounds is None else self._bounds.narrowed(answer)
            self._stepped, self._has_refused = [], False
            return
        if any(answer.distance(other) > STEP_S for other in self._stepped):
            self._stepped = []
        self._stepped.append(answer)
        if len(self._stepped) >= AGREE:
            self._step(self._bounds, answer)

    def _step(self, before: _Bounds, answer: _Bounds) -> None:
        """Several answers agree that the clock was set."""
        self._stepped = []
        step_s = answer.middle - before.middle
        machine = self._runtime.wall() - self._runtime.monotonic()
        is_mine = answer.distance(_Bounds(machine, machine)) <= self.ahead_max_s
        if before.distance(answer) <= self.ahead_max_s or is_mine:
            self._bounds = answer
            log.warning("the clock of the store was set by %s s", f"{step_s:+.0f}", extra={"seconds": step_s})
        elif not self._has_refused:
            self._has_refused = True
            text = "the store tells that its clock was set by %s s: not believed, since ours was not"
            log.error(text, f"{step_s:+.0f}", extra={"seconds": step_s})

    def now(self) -> float:
        """The server's clock, once an answer has told it: between its bounds."""
        assert self._bounds is not None
        return self._runtime.monotonic() + self._bounds.middle


def _moment(date: str | None) -> float | None:
    """The Unix seconds of a date of HTTP; `None` for any other text."""
    year = _YEAR.search(date or "")
    if year is None:
        return None
    try:
        time = parsedate_to_datetime(str(date))
    except (ValueError, TypeError, OverflowError):
        return None
    seconds = (time.replace(tzinfo=UTC) if time.tzinfo is None else time).timestamp()
    return seconds if time.year == int(year[1]) and LEAST < seconds < MOST else None
