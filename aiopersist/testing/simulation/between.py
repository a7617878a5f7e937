"""Something between the machines and the stores, which answers in their place: a proxy, a gateway.

It passes a request on, and after the store has carried it out answers with an error of its own, dated by a
clock of its own. Or it passes the answer on, and dates it. The code that judges the answers of a real object
store judges these, too."""

import random  # noqa: TID251  # everything here comes from a seed
from email.utils import formatdate

from aiopersist.base.runtime import Runtime
from aiopersist.storage.objects.answers import refusal
from aiopersist.storage.objects.clock import ServerClock

STATUSES = (400, 403, 404, 408, 409, 412, 429, 500, 502, 503, 504)
WRONG_BY_S = (400 * 86400.0, -400 * 86400.0, 7200.0, 1800.0, -1800.0)
NO_DATES = ("", "never", "Sat, 01 Jan 99999 00:00:00 GMT", "Sat, 01 Jan 0000 00:00:00 GMT")
IN_A_ROW = (1, 1, 2, 5)  # answers with the same wrong date; those of 1800 s are never so many
OWN = {"x-amz-request-id": "1"}


class Between:
    """See the header. `wall`: the clock of the stores."""

    def __init__(self, dice: random.Random, wall: Runtime) -> None:
        self._dice = dice
        self._wall = wall

    def happens(self, rate: float) -> bool:
        """Draw whether it happens; at rate 0 nothing is drawn."""
        return rate > 0 and self._dice.random() < rate

    def error(self, op: str, *, writing: bool) -> Exception:
        """The error of this library for one that is not the store's."""
        status = self._dice.choice(STATUSES)
        return refusal(f"simulated: {op}: {status}", status, "", writing=writing)

    def wrong(self) -> list[float | str]:
        """By how much the dates of the next answers are wrong, or what they say."""
        by = self._dice.choice((*WRONG_BY_S, *NO_DATES))
        count = 2 if by in (1800.0, -1800.0) else self._dice.choice(IN_A_ROW)
        return [by] * count

    def date(self, wrong: float | str) -> str:
        """A date as of HTTP."""
        return wrong if isinstance(wrong, str) else formatdate(self._wall.wall() + wrong, usegmt=True)


class HeardClock:
    """The clock of the stores as one life of a machine hears it from the answers that it gets."""

    def __init__(self, between: Between, runtime: Runtime) -> None:
        self.clock = ServerClock(runtime)
        self._between = between
        self._wrong: list[float | str] = []

    def own(self, sent: float, rate: float) -> bool:
        """An answer of the store came. Returns whether its date is wrong, as it is at that rate."""
        if not self._wrong and self.clock.is_known and self._between.happens(rate):
            self._wrong = self._between.wrong()
        wrong = self._wrong.pop() if self._wrong else 0.0
        self.clock.heard({**OWN, "date": self._between.date(wrong)}, "", sent)
        return wrong != 0.0

    def foreign(self, sent: float) -> None:
        """An answer came that is not the store's."""
        self.clock.heard({"date": self._between.date(self._between.wrong()[0])}, "503", sent)
