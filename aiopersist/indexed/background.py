"""The background task of an `Indexed`: a regular step while anything changes, and the compactions that it
requests. A failure, with any exception, is logged and counted, and the work is repeated after a pause.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from aiopersist.base.failures import Backoff
from aiopersist.indexed.core import Core
from aiopersist.indexed.errors import Fenced
from aiopersist.indexed.maintenance import CompactionRequest, CompactionResponse, StreamsMaintenance

log = logging.getLogger("aiopersist").getChild("maintenance")


class Background:
    """See the header."""

    def __init__(self, core: Core, maintenance: StreamsMaintenance) -> None:
        self._core = core
        self._stack = core.stack
        self._maintenance = maintenance
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(core.stack.settings.compactions_max)
        self._is_owed = False  # whether a round is due without a change: after a failure or an answer
        self._failing: dict[str, Backoff] = {}  # by stream with failing compactions

    def start(self) -> None:
        """Begin the rounds; `stop` ends them."""
        self._begin(self._run(), "steps of an Indexed")

    def stop(self) -> None:
        """Cancel the running rounds and compactions."""
        for task in self._tasks:
            task.cancel()

    async def _run(self) -> None:
        settings, runtime = self._stack.settings, self._stack.runtime
        seen, changed_at = -1, runtime.monotonic()
        backoff = Backoff(
            self._stack.supervisor.failures, f"a step of {self._core.shard.label}, which is repeated,"
        )
        while self._core.fenced is None:
            await runtime.sleep(settings.indexed_step_s)
            now, idle_s = runtime.monotonic(), settings.compaction_idle_s
            try:
                changed = self._core.streams.revision != seen
                if changed or self._maintenance.owes_collection or self._is_owed:
                    seen, changed_at = self._core.streams.revision, now
                    await self._round()
                elif now - changed_at > idle_s and self._maintenance.garbage.owes_collection:
                    await self._maintenance.collect()
            except Fenced as error:
                shard = self._core.shard
                extra = {"shard": shard.known_as}
                log.info("%s is no longer maintained here: %s", shard.label, error, extra=extra)
                return
            except Exception as error:
                self._is_owed = True
                await backoff.failed(error)
            else:
                backoff.succeeded()

    async def _round(self) -> None:
        """One round; begins the compactions that it requests, and raises the first failure."""
        self._is_owed = False
        requests, failure = await self._maintenance.round()
        for request in requests:
            self._begin(self._compact(request), f"compact {request.stream}")
        if failure is not None:
            raise failure

    async def _compact(self, request: CompactionRequest) -> None:
        stream = request.stream
        response: CompactionResponse | Exception
        if stream in self._failing:  # its request stays in flight: no step requests another one
            await self._failing[stream].pause()
        try:
            async with self._at_once:
                response = await self._maintenance.compact(request)
        except Exception as error:
            response = error
            self._failed(stream, error)
        try:
            await self._maintenance.apply(stream, response)
        except Exception as error:
            self._failed(stream, error)
        else:
            # A round between the commit and the answer requested nothing, since the request was in flight.
            self._is_owed = True
            if not isinstance(response, Exception):
                self._failing.pop(stream, None)

    def _failed(self, stream: str, error: Exception) -> None:
        failures = self._stack.supervisor.failures
        work = f"a compaction of stream {stream!r} of {self._core.shard.label}, which is repeated,"
        failures.report(work, error)
        self._failing.setdefault(stream, Backoff(failures, work))
        self._is_owed = True

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._stack.supervisor.background(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
