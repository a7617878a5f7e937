"""What waits while something fails says so in the log: nobody can help a caller that hangs in silence."""

import logging
from collections.abc import Callable

from aiopersist.runtime import Runtime

log = logging.getLogger("aiopersist")

LOG_AFTER_S = 5.0  # a restart of a database is shorter: not worth a line


class Patience:
    """One wait, which begins now. `what` says what waits, for the log: once, after `LOG_AFTER_S`."""

    def __init__(self, what: Callable[[], str], runtime: Runtime) -> None:
        self._what = what
        self._runtime = runtime
        self._began = runtime.monotonic()
        self._told = False

    def note(self, why: object) -> None:
        """It has to wait longer."""
        waited_s = self._runtime.monotonic() - self._began
        if waited_s > LOG_AFTER_S and not self._told:
            self._told = True
            log.warning("%s has waited for %.0f s and goes on: %s", self._what(), waited_s, why)
