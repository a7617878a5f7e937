"""How background work treats exceptions: it counts them, logs them, and backs off.

- `Failures` counts all failures, and logs each kind (the work and the type) once per interval, so that work
  that always fails does not fill the log. The next line of a kind has the number of failures since.
- `Backoff` pauses a loop after a failure, longer each time, until a success.

So a bug, or an unexpected value, costs a few tries a minute, and never a busy loop.
"""

import logging
from ast import literal_eval
from collections.abc import Callable
from typing import NamedTuple

from aiopersist.base.errors import Error
from aiopersist.base.runtime import Runtime

log = logging.getLogger("aiopersist").getChild("background")

LOG_EVERY_S = 60.0  # for each kind: often enough to be noticed
KINDS_MAX = 1024  # bounds the memory: each work of each shard is a kind of its own


class _Logged(NamedTuple):
    """When a kind was logged, and how often it has failed since without a log."""

    at: float
    silent: int


class Failures:
    """The failures of one client's background work. `label_of` returns the label of a shard by its id."""

    def __init__(
        self, runtime: Runtime, label_of: Callable[[str], str | None] = lambda shard_id: None
    ) -> None:
        self.runtime = runtime
        self._label_of = label_of
        self.count = 0
        self._logged: dict[tuple[str, type[BaseException]], _Logged] = {}

    def report(self, what: str, error: BaseException) -> None:
        """`what` failed: count it, and log it unless its kind was logged within `LOG_EVERY_S`. An `Error`
        comes from a store or a race, and is a warning; any other is a bug, and is logged with its
        traceback."""
        self.count += 1
        kind, now = (what, type(error)), self.runtime.monotonic()
        last = self._logged.pop(kind, None)
        if last is not None and now - last.at < LOG_EVERY_S:
            self._logged[kind] = last._replace(silent=last.silent + 1)
            return
        if len(self._logged) >= KINDS_MAX:
            del self._logged[next(iter(self._logged))]
        self._logged[kind] = _Logged(now, 0)
        more = f" ({last.silent} more since the last line)" if last is not None and last.silent else ""
        extra = {"work": what, "error": type(error).__name__, "failures": 1 + (last.silent if last else 0)}
        if isinstance(error, Error):
            signed = self.labelled(error)
            log.warning("%s failed: %s%s", what, signed, more, extra={**extra, "shard": named(signed.label)})
        else:
            log.error("%s failed: %r%s", what, error, more, exc_info=error, extra=extra)

    def labelled(self, error: Error) -> Error:
        """`error` itself; its text now has the label of the shard."""
        if error.label is None and error.shard_id is not None:
            error.label = self._label_of(error.shard_id)
        return error


class Backoff:
    """The pauses of one loop that does `what`."""

    def __init__(self, failures: Failures, what: str) -> None:
        self._failures = failures
        self._what = what
        self._delays = failures.runtime.delays()

    async def failed(self, error: Exception) -> None:
        """Report the failure, and pause."""
        self._failures.report(self._what, error)
        await self.pause()

    async def pause(self) -> None:
        """Wait after a failure: some milliseconds at first, later up to 16 s."""
        await self._failures.runtime.sleep(next(self._delays))

    def succeeded(self) -> None:
        """The next failure counts as a first one."""
        self._delays = self._failures.runtime.delays()


def named(label: str | None) -> str | None:
    """The name of a shard from its label in messages."""
    name = (label or "").partition(" ")[2]
    return (literal_eval(name) if name[:1] in ("'", '"') else name) or None
