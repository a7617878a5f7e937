"""A feed of a table as server-sent events.

1. The feed opens, at the id that the client came back with (`Last-Event-ID`). A refusal is a response of its
   own: 400 for what is no id, 410 if the history is gone. What passes is none to a browser, which would never
   come back after a status but 200: an outage, and the end of this server, are a stream that ends at once.
2. Each step of the feed becomes events (`events.py`), which are sent some at once. While nothing comes, a
   comment is sent now and then, so that nobody on the way takes the connection for dead.
3. It ends when the client goes, when the server ends, when the client is too slow (`patience.py`), or when
   the feed fails. Whatever ends it, the feed is closed, and its hold ends with it.

Only a step of the feed is in memory (`settings.row_group_bytes`): a client that does not take it is not asked
for more.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import anyio
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from aiopersist.errors import Error, Indeterminate, InvalidUsage, SinceViolation, StorageUnavailable
from aiopersist.fastapi.attached import find_attached
from aiopersist.fastapi.ending import LAST_WORDS_S, Ending
from aiopersist.fastapi.events import (
    COME_BACK,
    HEARTBEAT,
    EventPlace,
    change_events,
    event,
    only_place,
    place_of,
    step_events,
)
from aiopersist.fastapi.patience import Patience
from aiopersist.fastapi.problems import RETRY_AFTER_S, Problem, problem_of, problem_response
from aiopersist.table.feed import Feed, FeedStep, updates_of

HEARTBEAT_S = 15.0  # proxies close connections that are silent for 30 s or 60 s
EVENTS_AT_ONCE = 256  # in one chunk of the response
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the latter for nginx

ENDS = Problem(HTTPStatus.SERVICE_UNAVAILABLE, "this server is ending: connect again")
CHANGES, CONTENTS, CUT_OFF, PROBLEM = "change", "contents", "cut-off", "problem"


def event_stream(
    request: Request,
    changes: Callable[..., Feed[Any, Any]],
    *,
    start: str | None = None,
    cursor: str | None = None,
    heartbeat_s: float = HEARTBEAT_S,
) -> "EventStream":
    """The changes of a table as server-sent events: `return apf.event_stream(request, table.changes)`;
    `partial(table.changes, keys=[...])` for those of some keys.

    The first connection begins with the contents, or as `start` and `cursor` of `Table.changes` say. A client
    that comes back with `Last-Event-ID` goes on behind that event, in any process: it gets each change once.
    400 for an id that is none of this table, 410 if its history is gone.

    Each event has an id, a name and one line of JSON:

    - `contents` and `change`: `{"key": ..., "old": ..., "new": ..., "time": ...}`, an entry that was there at
      the beginning, or a later change; null stands for absent;
    - `cut-off`: more than `settings.listen_queue_max` commits came while the client did not take what it was
      sent. The stream ends; the client may come back, and goes on where it was;
    - `problem`: the feed failed, or could not begin while a store does not answer. The stream ends, and the
      client may come back; the data is a problem as `add_exception_handlers` has it.

    A client that does not accept `text/event-stream`, as browsers do, gets 503 while a store does not
    answer, or the server ends.

    After `heartbeat_s` without an event a comment is sent. The stream ends, and its hold on history with it,
    when the client goes and when the server is told to end by a signal."""
    given = request.headers.get("last-event-id") or cursor
    attached = find_attached(request)
    ending = attached.ending if attached else None
    comes_back = EventStream.media_type in request.headers.get("accept", "")
    return EventStream(changes, given, start, ending, heartbeat_s, comes_back=comes_back)


class EventStream(StreamingResponse):
    """What `event_stream` returns. As the response class of a route it lets the schema of the API say
    `text/event-stream`."""

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
    ) -> None:
        super().__init__((), status_code, HEADERS)
        self._comes_back = comes_back
        self._changes = changes
        self._given = given
        self._start = start
        self._ending = ending
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the feed and send it, until it ends."""
        try:
            place = None if self._given is None else place_of(self._given)
            feed = self._feed(place)
        except InvalidUsage as error:
            await self._refuse(error, scope, receive, send)
            return
        sending = _StreamSender(feed, send, self._heartbeat_s)
        if self._server_ends():
            await self._put_off(ENDS, sending, scope, receive, send)
            return
        try:
            with anyio.CancelScope() as unless_ended:
                ends = asyncio.create_task(self._ends(receive, unless_ended))
                try:
                    await self._opened_and_sent(sending, place, scope, receive, send)
                finally:
                    ends.cancel()
        finally:
            await feed.aclose()
        if self._server_ends():
            if sending.has_begun:
                await sending.finish_soon()
            else:
                await self._put_off(ENDS, sending, scope, receive, send)

    def _server_ends(self) -> bool:
        return self._ending is not None and self._ending.has_begun

    async def _opened_and_sent(
        self, sending: "_StreamSender", place: EventPlace | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            await sending.open(place)
        except (InvalidUsage, SinceViolation) as error:
            if place is None:
                raise
            await self._refuse(error, scope, receive, send)
            return
        except (StorageUnavailable, Indeterminate) as error:
            if (problem := problem_of(error)) is None or not self._comes_back:
                raise
            await self._put_off(problem, sending, scope, receive, send)
            return
        await sending.begin(self.status_code, self.raw_headers)
        await sending.run()
        await sending.finish()

    def _feed(self, place: EventPlace | None) -> Feed[Any, Any]:
        if place is not None:
            return self._changes(cursor=place.cursor)
        return self._changes() if self._start is None else self._changes(start=self._start)

    async def _refuse(self, error: Error, scope: Scope, receive: Receive, send: Send) -> None:
        """Say what is wrong with the id."""
        gone = isinstance(error, SinceViolation)
        status = HTTPStatus.GONE if gone else HTTPStatus.BAD_REQUEST
        detail = "the history behind that event is gone: begin anew" if gone else "it is no id of this stream"
        problem = Problem(status, f"Last-Event-ID: {detail}", type(error).__name__)
        await problem_response(problem)(scope, receive, send)

    async def _put_off(
        self, problem: Problem, sending: "_StreamSender", scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Have the client come back: a browser does so after a stream alone."""
        if not self._comes_back:
            await problem_response(problem, {"Retry-After": str(RETRY_AFTER_S)})(scope, receive, send)
            return
        with anyio.move_on_after(LAST_WORDS_S):
            await sending.begin_and_end(self.raw_headers, event(PROBLEM, problem.body()))

    async def _ends(self, receive: Receive, unless_ended: anyio.CancelScope) -> None:
        """Cancel the scope when the client goes, or the server ends."""
        waits = [asyncio.create_task(_gone(receive))]
        if self._ending is not None:
            waits.append(asyncio.create_task(self._ending.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            unless_ended.cancel()
        finally:
            for wait in waits:
                wait.cancel()


class _TooSlow(Exception):
    """The feed was closed while the client took what it was sent."""


class _StreamSender:
    """Sends one feed to one client."""

    def __init__(self, feed: Feed[Any, Any], send: Send, heartbeat_s: float) -> None:
        self._feed = feed
        self._send = send
        self._heartbeat_s = heartbeat_s
        self.has_begun = self._has_finished = False
        self._place = EventPlace("")
        self._left = 0
        """Changes that come first, and were sent before."""

    async def open(self, place: EventPlace | None) -> None:
        """Open the feed."""
        await self._feed.__aenter__()
        self._place = EventPlace(self._feed.cursor)
        self._left = 0 if place is None else place.past
        self._patience = Patience(self._feed)

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the head, and an id to come back with."""
        await self._begin(status, headers)
        await self._send_bytes(b"" if self._left else only_place(self._place))

    async def begin_and_end(self, headers: list[tuple[bytes, bytes]], data: bytes) -> None:
        """Send the head, when to come back, and the end."""
        await self._begin(HTTPStatus.OK, headers)
        await self._send_bytes(COME_BACK + data)
        await self.finish()

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": int(status), "headers": headers})

    async def run(self) -> None:
        """Send steps until the feed ends, or the client was too slow."""
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
        finally:
            self._patience.end()

    async def finish(self) -> None:
        """Send the end."""
        self._has_finished = True
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def finish_soon(self) -> None:
        """Send the end, unless the client does not take it."""
        if not self._has_finished:
            with anyio.move_on_after(LAST_WORDS_S):
                await self.finish()

    async def _next(self) -> FeedStep[Any, Any] | None:
        """The next step, with heartbeats until it comes; `None` behind the last one."""
        supervisor = updates_of(self._feed).stack.supervisor
        step = supervisor.spawn(_next_of(self._feed), "wait for the next step of a stream", abandon=True)
        try:
            while not (await asyncio.wait({step}, timeout=self._heartbeat_s))[0]:
                self._patience.begin()
                await self._send_in_time(HEARTBEAT)
                self._patience.end()
            found: FeedStep[Any, Any] | None = step.result()
            return found
        finally:
            step.cancel()

    async def _send_step(self, step: FeedStep[Any, Any]) -> None:
        events = step_events(self._place, self._left, step.changes, step.cursor)
        name = CONTENTS if step.contents else CHANGES
        self._patience.begin()
        for changes, places in events.slices(EVENTS_AT_ONCE):
            await self._send_in_time(change_events(changes, name, places))
            if step.contents:  # they are all of one time: what comes meanwhile is not behind them
                self._patience.begin()
        self._place, self._left = events.behind, events.left
        if not events.changes and not events.left:
            await self._send_in_time(only_place(events.behind))
        self._patience.end()

    async def _send_in_time(self, data: bytes) -> None:
        """`_TooSlow` if the client did not take it in time."""
        await self._send_bytes(data)
        if self._patience.is_over:
            raise _TooSlow

    def _cut_off(self) -> dict[str, Any]:
        most = self._patience.commits_max
        text = f"more than {most} commits came before these events were taken: connect again to go on"
        return {"detail": text, "commits": most}

    async def _send_bytes(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


async def _next_of(feed: Feed[Any, Any]) -> FeedStep[Any, Any] | None:
    try:
        return await anext(feed)
    except StopAsyncIteration:
        return None


async def _gone(receive: Callable[[], Any]) -> None:
    message: Message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
