"""A feed of a table as server-sent events.

1. The id that the client came back with (`Last-Event-ID`) is checked (`ids.py`), and the feed opens after
   that event. A wrong id is refused: 400 if no such stream issued it, 410 if its history is gone. Temporary
   problems (an outage, the end of this server, too many streams) are a stream that ends at once, since a
   browser never comes back after any status but 200.
2. Each step of the feed becomes events (`events.py`), which are sent in chunks (`sender.py`). Without events,
   a comment is sent from time to time, so that no proxy closes the connection.
3. The stream ends when the client leaves, when the server ends, when the client is too slow (`patience.py`)
   or takes nothing for too long, or when the feed fails. In any case the feed is closed, which ends its hold.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from aiopersist.base.errors import (
    Error,
    Indeterminate,
    InvalidUsage,
    SinceViolation,
    StorageUnavailable,
    UsageKind,
)
from aiopersist.fastapi.attached import find_attached
from aiopersist.fastapi.ending import LAST_WORDS_S, Ending
from aiopersist.fastapi.events import EventPlace, event
from aiopersist.fastapi.ids import EventIds
from aiopersist.fastapi.problems import RETRY_AFTER_S, Problem, problem_of, problem_response
from aiopersist.fastapi.sender import PROBLEM, StreamSender
from aiopersist.read.cursor import OfAnotherHistory
from aiopersist.table.feed import Feed, choice_of, stack_of

HEARTBEAT_S = 15.0  # proxies close connections that are silent for 30 s or 60 s
SEND_TIMEOUT_S = 30.0  # for a chunk of some 64 KiB
STREAMS_MAX = 500  # half of the files that a process may have open on most systems
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the latter for nginx

ENDS = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "this server is ending: connect again")
FULL = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "this server has too many streams: connect again later")


def event_stream(
    request: Request,
    changes: Callable[..., Feed[Any, Any]],
    *,
    start: str | None = None,
    cursor: str | None = None,
    heartbeat_s: float = HEARTBEAT_S,
    bound_to: str = "",
    send_timeout_s: float = SEND_TIMEOUT_S,
    streams_max: int = STREAMS_MAX,
) -> "EventStream":
    """The changes of a table as server-sent events: `return apf.event_stream(request, table.changes)`, or
    `partial(table.changes, keys=[...])` for some keys.

    The first connection begins with the contents, or as `start` and `cursor` of `Table.changes` say. A client
    that comes back with `Last-Event-ID` continues after that event, in any process, and gets each change
    once. 400 for an id that was issued for another table, `start`, keys or `bound_to`; 410 if its history is
    gone, also because the location was restored from a backup. Ids are signed, so nobody can forge one.
    `cursor` is not signed and decides where reading begins, so it must not come from the client.

    `bound_to`: a text that ids are bound to, like the id of a user (then other users cannot use the ids), or
    a secret of the application (a new secret invalidates all ids).

    Each event has an id, a name and one line of JSON:

    - `contents` and `change`: `{"key": ..., "old": ..., "new": ..., "time": ...}`, an entry of the first
      contents, or a later change; null stands for absent;
    - `cut-off`: more than `settings.listen_queue_max` commits came while the client took its events. The
      stream ends; the client may come back, and continues where it was;
    - `problem`: the feed failed, or could not begin because a store does not answer. The stream ends; the
      client may come back. The data is a problem as in `add_exception_handlers`.

    A client that does not accept `text/event-stream`, as browsers do, gets 503 while a store does not answer,
    while the server ends, or while the process has `streams_max` streams of any kind.

    After `heartbeat_s` without an event a comment is sent. The stream and its hold on history end when the
    client leaves, when it takes nothing for `send_timeout_s`, and when a signal ends the server.
    """
    attached = find_attached(request)
    return EventStream(
        changes,
        request.headers.get("last-event-id") or None,
        start,
        attached.ending if attached else None,
        heartbeat_s,
        comes_back=EventStream.media_type in request.headers.get("accept", ""),
        cursor=cursor,
        bound_to=bound_to,
        send_timeout_s=send_timeout_s,
        streams_max=streams_max,
    )


class EventStream(StreamingResponse):
    """The response of `event_stream`. As a route's response class it puts its type into the API's schema."""

    media_type = "text/event-stream"

    def __init__(
        self,
        changes: Callable[..., Feed[Any, Any]],
        given: str | None,
        start: str | None,
        ending: Ending | None,
        heartbeat_s: float,
        status_code: int = 200,
        *,
        comes_back: bool = False,
        cursor: str | None = None,
        bound_to: str = "",
        send_timeout_s: float = SEND_TIMEOUT_S,
        streams_max: int = STREAMS_MAX,
    ) -> None:
        super().__init__((), status_code, HEADERS)
        self._comes_back = comes_back
        self._changes = changes
        self._last_id = given
        self._cursor = cursor
        self._start = start
        self._ending = ending
        self._heartbeat_s = heartbeat_s
        self._bound_to = bound_to
        self._send_timeout_s = send_timeout_s
        self._streams_max = streams_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the feed, and send it until it ends."""
        sender = StreamSender(send, self._heartbeat_s, self._send_timeout_s)
        if self._server_ends():
            await self._put_off(ENDS, sender, scope, receive, send)
            return
        with _counted(self._streams_max) as has_room:
            if not has_room:
                await self._put_off(FULL, sender, scope, receive, send)
                return
            try:
                with anyio.CancelScope() as unless_ended:
                    ends = asyncio.create_task(self._ends(receive, unless_ended))
                    try:
                        await self._opened_and_sent(sender, scope, receive, send)
                    finally:
                        ends.cancel()
            finally:
                await sender.aclose()
        if self._server_ends():
            if sender.has_begun:
                await sender.finish_soon()
            else:
                await self._put_off(ENDS, sender, scope, receive, send)

    def _server_ends(self) -> bool:
        return self._ending is not None and self._ending.has_begun

    async def _opened_and_sent(
        self, sender: StreamSender, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            refusal = await self._opened(sender)
        except (StorageUnavailable, Indeterminate) as error:
            if (problem := problem_of(error)) is None or not self._comes_back:
                raise
            await self._put_off(problem, sender, scope, receive, send)
            return
        if refusal is not None:
            await problem_response(refusal)(scope, receive, send)
            return
        await sender.run(self.status_code, self.raw_headers)

    async def _opened(self, sender: StreamSender) -> Problem | None:
        """Open the feed; returns the problem if its place is refused."""
        feed = self._first_feed()
        begins = "cursor" if self._cursor is not None else self._start or "contents"
        blob = (await stack_of(feed)).blob
        ids = await EventIds.of(blob, self._bound_to, begins, choice_of(feed))
        place = None if self._cursor is None else EventPlace(self._cursor)
        try:
            if self._last_id is not None:
                place = ids.place(self._last_id)
                feed = self._changes(cursor=place.cursor)
            await sender.open(feed, ids, place)
        except (InvalidUsage, SinceViolation, OfAnotherHistory) as error:
            is_of_place = not isinstance(error, InvalidUsage) or error.kind is UsageKind.INVALID_CURSOR
            if not is_of_place or (self._last_id is None and self._cursor is None):
                raise
            return self._refusal(error)
        return None

    def _first_feed(self) -> Feed[Any, Any]:
        """The feed for a new client."""
        if self._cursor is not None:
            return self._changes(cursor=self._cursor)
        return self._changes() if self._start is None else self._changes(start=self._start)

    def _refusal(self, error: Error) -> Problem:
        """The problem of the id or the cursor."""
        source = "the cursor" if self._last_id is None else "Last-Event-ID"
        status, name = HTTPStatus.GONE, type(error).__name__
        detail = "the history after that event is gone"
        if isinstance(error, InvalidUsage):
            status, detail = HTTPStatus.BAD_REQUEST, "it was not issued by a stream like this one"
        elif isinstance(error, OfAnotherHistory):  # the location was restored from a backup
            name = SinceViolation.__name__
        return Problem(status, f"{source}: {detail}: start again", name)

    async def _put_off(
        self, problem: Problem, sender: StreamSender, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let the client come back later; a browser does so only after a stream."""
        if not self._comes_back:
            await problem_response(problem, {"Retry-After": str(RETRY_AFTER_S)})(scope, receive, send)
            return
        with anyio.move_on_after(LAST_WORDS_S):
            await sender.begin_and_end(self.raw_headers, event(PROBLEM, problem.body()))

    async def _ends(self, receive: Receive, unless_ended: anyio.CancelScope) -> None:
        """Cancel the scope when the client leaves or the server ends."""
        waits = [asyncio.create_task(_client_left(receive))]
        if self._ending is not None:
            waits.append(asyncio.create_task(self._ending.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            unless_ended.cancel()
        finally:
            for wait in waits:
                wait.cancel()


_streams = 0  # of this process


@contextmanager
def _counted(most: int) -> Iterator[bool]:
    """Count a stream, if the process may have one more."""
    global _streams
    has_room = _streams < most
    _streams += has_room
    try:
        yield has_room
    finally:
        _streams -= has_room


async def _client_left(receive: Callable[[], Any]) -> None:
    message: Message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
