"""Sends the changes of a feed to one client, at the client's speed.

Memory holds a step of the feed as columns (`STEP_BYTES`, or the changes of one commit) and one chunk of
events. If the client is slow, the feed drops what it read ahead (`patience.py`). If the client takes nothing
for too long, the stream ends.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import anyio
from starlette.types import Message, Send

from aiopersist.base.errors import Error
from aiopersist.fastapi.ending import LAST_WORDS_S
from aiopersist.fastapi.events import (
    COME_BACK,
    HEARTBEAT,
    EventPlace,
    StepPlaces,
    change_events,
    event,
    only_id,
)
from aiopersist.fastapi.ids import EventIds
from aiopersist.fastapi.patience import Patience
from aiopersist.fastapi.problems import problem_of
from aiopersist.table.feed import ColumnsStep, Feed, bound_feed, next_columns, updates_of

STEP_BYTES = 1024 * 1024
CHUNK_BYTES = 64 * 1024  # of the columns of the events in one chunk of the response
CHUNK_EVENTS = 256
CHANGES, CONTENTS, CUT_OFF, PROBLEM = "change", "contents", "cut-off", "problem"


class _TooSlow(Exception):
    """The feed was closed, because the client took its events too slowly."""


class _TakesNothing(Exception):
    """The client took nothing for too long."""


class StreamSender:
    """See the header."""

    def __init__(self, send: Send, heartbeat_s: float, send_timeout_s: float) -> None:
        self._send = send
        self._heartbeat_s = heartbeat_s
        self._send_timeout_s = send_timeout_s
        self.has_begun = self._has_finished = False
        self._feed: Feed[Any, Any] | None = None

    async def open(self, feed: Feed[Any, Any], ids: EventIds, place: EventPlace | None) -> None:
        """Open the feed at the place."""
        bound_feed(feed, STEP_BYTES)
        self._feed, self._ids = feed, ids
        await feed.__aenter__()
        self._place = EventPlace(feed.cursor)
        self._to_skip = 0 if place is None else place.past
        """The number of first changes that were sent before."""
        self._patience = Patience(feed)

    async def aclose(self) -> None:
        """Close the feed."""
        if self._feed is not None:
            await self._feed.aclose()

    async def run(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, an id to come back with, and steps until the feed ends or the client is too slow.
        Then send the end, unless the client takes nothing."""
        try:
            await self._begin(status, headers)
            await self._send_bytes(b"" if self._to_skip else only_id(self._ids.text(self._place)))
            await self._send_steps()
            await self._finish()
        except _TakesNothing:
            return
        finally:
            self._patience.end()

    async def begin_and_end(self, headers: list[tuple[bytes, bytes]], data: bytes) -> None:
        """Send the head, the delay until the client comes back, and the end."""
        await self._begin(HTTPStatus.OK, headers)
        await self._send_bytes(COME_BACK + data)
        await self._finish()

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        await self._send_message({"type": "http.response.start", "status": int(status), "headers": headers})

    async def _send_steps(self) -> None:
        try:
            while (step := await self._next()) is not None:
                await self._send_step(step)
        except _TooSlow:
            await self._send_bytes(event(CUT_OFF, self._cut_off()))
        except Error as error:
            problem = problem_of(error)
            if problem is None:
                raise
            await self._send_bytes(event(PROBLEM, problem.body()))

    async def _finish(self) -> None:
        self._has_finished = True
        await self._send_message({"type": "http.response.body", "body": b"", "more_body": False})

    async def finish_soon(self) -> None:
        """Send the end, if the client takes it."""
        if not self._has_finished:
            with anyio.move_on_after(LAST_WORDS_S):
                await self._finish()

    async def _next(self) -> ColumnsStep[Any, Any] | None:
        """The next step, with heartbeats until it comes; `None` at the end."""
        assert self._feed is not None
        supervisor = updates_of(self._feed).stack.supervisor
        step = supervisor.spawn(_next_of(self._feed), "wait for the next step of a stream", abandon=True)
        try:
            while not (await asyncio.wait({step}, timeout=self._heartbeat_s))[0]:
                self._patience.begin()
                await self._send_in_time(HEARTBEAT)
                self._patience.end()
            result: ColumnsStep[Any, Any] | None = step.result()
            return result
        finally:
            step.cancel()

    async def _send_step(self, step: ColumnsStep[Any, Any]) -> None:
        assert self._feed is not None
        runtime = updates_of(self._feed).stack.runtime
        places = StepPlaces(self._place, self._to_skip, step.cursor)
        name = CONTENTS if step.contents else CHANGES
        self._patience.begin()
        for changes, is_last in step.slices(CHUNK_BYTES, CHUNK_EVENTS):
            sent, behind = places.take(changes, is_last=is_last)
            await self._send_in_time(change_events(sent, name, map(self._ids.text, behind)))
            if step.contents:  # all have one time, so later commits do not count yet
                self._patience.begin()
            await runtime.sleep(0)  # a send may return at once, even if the client has gone
        self._place, self._to_skip = places.behind, places.to_skip
        if not places.ends_with_id and not places.to_skip:
            await self._send_in_time(only_id(self._ids.text(places.behind)))
        self._patience.end()

    async def _send_in_time(self, data: bytes) -> None:
        """Send events; `_TooSlow` if the client was too slow."""
        await self._send_bytes(data)
        if self._patience.is_over:
            raise _TooSlow

    def _cut_off(self) -> dict[str, Any]:
        most = self._patience.commits_max
        text = f"more than {most} commits came before the client took these events: connect again to continue"
        return {"detail": text, "commits": most}

    async def _send_bytes(self, data: bytes) -> None:
        if data:
            await self._send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def _send_message(self, message: Message) -> None:
        with anyio.move_on_after(self._send_timeout_s) as waiting:
            await self._send(message)
        if waiting.cancelled_caught:
            raise _TakesNothing


async def _next_of(feed: Feed[Any, Any]) -> ColumnsStep[Any, Any] | None:
    try:
        return await next_columns(feed)
    except StopAsyncIteration:
        return None
