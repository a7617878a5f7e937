"""A long wait is written to the log, so that a user finds out why a call hangs."""

import logging
from collections.abc import Callable

from aiopersist.base.runtime import Runtime

log = logging.getLogger("aiopersist").getChild("storage")

LOG_AFTER_S = 5.0  # a restart of a database is shorter, and not worth a line


class StallLog:
    """One wait, which begins now. The log names it by `what()`: once, after `LOG_AFTER_S`; then
    `on_stall` is called, too."""

    def __init__(
        self, what: Callable[[], str], runtime: Runtime, on_stall: Callable[[], None] = lambda: None
    ) -> None:
        self._what = what
        self._on_stall = on_stall
        self._runtime = runtime
        self._began = runtime.monotonic()
        self._logged = False

    def note(self, why: object) -> None:
        """Say that the wait goes on, and why."""
        waited_s = self._runtime.monotonic() - self._began
        if waited_s > LOG_AFTER_S and not self._logged:
            self._logged = True
            self._on_stall()
            what = self._what()
            extra = {"work": what, "seconds": waited_s, "error": type(why).__name__}
            if not isinstance(why, BaseException):
                del extra["error"]
            log.warning("%s has waited for %.0f s and goes on: %s", what, waited_s, why, extra=extra)
