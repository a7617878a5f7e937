"""The background task of an `Indexed`: a step now and then, while anything changes, and the compactions that
it asks for. What fails is logged, and tried again after a while."""

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from typing import Any

from aiopersist.errors import Error
from aiopersist.indexed.core import Core
from aiopersist.indexed.errors import Fenced
from aiopersist.indexed.upkeep import CompactionRequest, CompactionResponse, Upkeep

log = logging.getLogger("aiopersist")


class Background:
    """See the header."""

    def __init__(self, core: Core, upkeep: Upkeep) -> None:
        self._core = core
        self._stack = core.stack
        self._upkeep = upkeep
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_once = asyncio.Semaphore(core.stack.settings.compactions_max)
        self._is_owed = False  # a round, though nothing has changed: something failed
        self._delays: dict[str, Iterator[float]] = {}  # of streams whose compactions fail

    def start(self) -> None:
        """Begin; `stop` ends it."""
        self._begin(self._run(), "steps of an Indexed")

    def stop(self) -> None:
        """Cut off what is under way."""
        for task in self._tasks:
            task.cancel()

    async def _run(self) -> None:
        settings, runtime = self._stack.settings, self._stack.runtime
        seen, changed_at, delays = -1, runtime.monotonic(), runtime.delays()
        while self._core.fenced is None:
            await runtime.sleep(settings.indexed_step_s)
            now = runtime.monotonic()
            try:
                changed = self._core.streams.revision != seen
                if changed or self._upkeep.owes_collection or self._is_owed:
                    seen, changed_at = self._core.streams.revision, now
                    self._is_owed = False
                    requests, failure = await self._upkeep.round()
                    for request in requests:
                        self._begin(self._compact(request), f"compact {request.stream}")
                    if failure is not None:
                        raise failure
                elif now - changed_at > settings.compaction_idle_s and self._upkeep.garbage.owes_collection:
                    await self._upkeep.collect()
            except Fenced as error:
                log.info("an Indexed is no longer maintained here: %s", error)
                return
            except Exception as error:
                _log_failure(error, "a step of an Indexed failed and is repeated")
                self._is_owed = True
                await runtime.sleep(next(delays))
            else:
                delays = runtime.delays()

    async def _compact(self, request: CompactionRequest) -> None:
        stream, runtime = request.stream, self._stack.runtime
        response: CompactionResponse | Exception
        async with self._at_once:
            try:
                response = await self._upkeep.compact(request)
                self._delays.pop(stream, None)
            except Exception as error:
                response = error
        if isinstance(response, Exception):
            _log_failure(response, f"a compaction of stream {stream!r} failed and is repeated")
            await runtime.sleep(next(self._delays.setdefault(stream, runtime.delays())))
            self._is_owed = True
        try:
            await self._upkeep.apply(stream, response)
        except Exception as error:
            _log_failure(error, f"a compaction of stream {stream!r} was not applied and is repeated")
            self._is_owed = True

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._stack.supervisor.background(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _log_failure(error: Exception, what: str) -> None:
    """What a store does is expected; anything else is a bug, and shows where."""
    log.warning("%s: %s", what, error, exc_info=None if isinstance(error, Error) else error)
