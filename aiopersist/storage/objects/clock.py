"""The clock of a server that tells the time in whole seconds, with each answer.

An answer with the second `d` was made in `[d, d + 1)` by the server's clock, and between the sending of the
request and its arrival by ours: so it bounds the difference of the two clocks. Bounds of several answers
together are narrower. Where they contradict each other, a clock was set, and the last answer counts alone.
"""

from email.utils import parsedate_to_datetime

from aiopersist.runtime import Runtime


class ServerClock:
    """See the header."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._least: float | None = None
        """The server's clock is ahead of our monotonic one by at least so much; `_most`: by at most."""
        self._most = 0.0

    @property
    def is_known(self) -> bool:
        return self._least is not None

    @property
    def error_s(self) -> float:
        """By how much `now` may be wrong."""
        return 0.0 if self._least is None else (self._most - self._least) / 2

    def sent(self) -> float:
        """What `answered` is to be told of a request that is sent now."""
        return self._runtime.monotonic()

    def answered(self, date: str | None, sent: float) -> None:
        """An answer came just now, to a request of which `sent` gave that moment. `date`: its header, as of
        HTTP."""
        try:
            told = parsedate_to_datetime(date or "").timestamp()
        except ValueError:
            return
        least, most = told - self._runtime.monotonic(), told + 1 - sent
        if self._least is None or least > self._most or most < self._least:
            self._least, self._most = least, most
        else:
            self._least, self._most = max(least, self._least), min(most, self._most)

    def now(self) -> float:
        """The server's clock, once an answer has told it: between its bounds."""
        assert self._least is not None
        return self._runtime.monotonic() + (self._least + self._most) / 2
