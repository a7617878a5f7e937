"""Notices what blocks the event loop, however busy the machine is."""

import asyncio
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Self

COMPUTES_MAX_S = 1.0  # in one callback, of processor time
STANDS_MAX_S = 3.0  # the same by the clock, less what waited for a core: others may hold the interpreter


class LoopWatch:
    """Notices when a callback computes for longer than `COMPUTES_MAX_S`, or stands for longer than
    `STANDS_MAX_S`.

    A thread counts what the loop's thread did since the loop last answered, in ticks. What a busy machine
    does is left out: a tick counts for at most a tenth of a second, less the time in which the loop's
    thread was ready and waited for a core. The stack of that thread is kept when a limit is passed.
    """

    TICK_S = 0.05

    def __init__(self) -> None:
        self.blocked_at: str | None = None
        self._computed_s = self._stood_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._beat()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._timer.cancel()
        self._thread.join()

    def _beat(self) -> None:
        self._computed_s = self._stood_s = 0.0
        self._timer = self._loop.call_later(self.TICK_S, self._beat)

    def _watch(self) -> None:
        before, (ran, queued) = time.monotonic(), self._scheduled_s()
        while not self._done.wait(self.TICK_S):
            now, (ran_now, queued_now) = time.monotonic(), self._scheduled_s()
            self._computed_s += ran_now - ran
            self._stood_s += max(0.0, min(now - before, 2 * self.TICK_S) - (queued_now - queued))
            before, ran, queued = now, ran_now, queued_now
            if not self._loop.is_running():  # a fixture that starts a server, say
                self._computed_s = self._stood_s = 0.0
            if self._blocks() and self.blocked_at is None:
                frame = sys._current_frames().get(self._loop_thread)
                self.blocked_at = "".join(traceback.format_stack(frame)[-8:]) if frame else "?"

    def _blocks(self) -> bool:
        return self._computed_s > COMPUTES_MAX_S or self._stood_s > STANDS_MAX_S

    def _scheduled_s(self) -> tuple[float, float]:
        """How long the loop's thread has run, and waited for a core; 0 where the system tells neither."""
        try:
            ran, queued, _ = map(int, self._schedstat.read_text().split())
        except OSError:
            return 0.0, 0.0
        return ran / 1e9, queued / 1e9

    def told(self) -> str:
        """What it has noticed."""
        limits = f"computed for more than {COMPUTES_MAX_S} s, or stood for more than {STANDS_MAX_S} s"
        return f"a callback {limits}, in:\n{self.blocked_at}"
