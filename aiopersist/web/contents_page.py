"""Answers the addresses of contents: a page of rows, a value whole, live changes."""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pydantic_core
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from aiopersist.base.errors import Error, InvalidUsage, NotReadable, UsageKind, shown
from aiopersist.client.client import Client
from aiopersist.data.updates.updates import Updates
from aiopersist.shard.instant import now_for
from aiopersist.shard.shard import Shard
from aiopersist.state.model import Clock
from aiopersist.web.contents import HOWS, WantedRows, chosen_columns
from aiopersist.web.known import Known
from aiopersist.web.readable import Readable, readable, readable_stream, time_lengths
from aiopersist.web.reads import read_rows
from aiopersist.web.render import rendered
from aiopersist.web.rows import cells, columns_of, values, whole
from aiopersist.web.streams import arrangement_of
from aiopersist.web.words import frontier_text, time_text, visible

LIVE_MAX = 50  # streams at once: each holds history, and listens
LIVE_SEND_S = 30.0  # for an event: then its visitor takes nothing
LIVE_ROWS = 100  # of an event; of the others it has the number
LIVE_EVERY_S = 0.1  # so that a browser has time to draw: what comes meanwhile is in the next event


async def contents(request: Request, client: Client, known: Known) -> Response:
    """A page of rows."""
    query = request.query_params
    shard = await known.shard_soon(client, query.get("name", ""))
    state, times = shard.state, _times(shard, query.get("stream", ""))
    scale = None if times is None else times.scale
    wanted = WantedRows.of(query, scale, state.clock)
    values: dict[str, Any] = {
        "name": wanted.name,
        "wanted": wanted,
        "scale": scale,
        "state": state,
        "has_products": bool(time_lengths(state) - {None}),
        "sealed": arrangement_of(shard, wanted.stream).seal if times is not None and wanted.stream else None,
        "hows": HOWS,
        "read": None,
        "chosen": (),
    }
    if times is not None:
        now = await _now(client, wanted, times)
        question = wanted.question(times, now)
        read = await known.reads.of(client, shard.id, question)
        values |= {"question": question, "read": read, "is_at_rest": wanted.is_at_rest(times, now)}
        if read.page is not None:
            values["chosen"] = chosen_columns(read.page.columns, wanted.columns)
    return HTMLResponse(await client._stack.compute(rendered, "contents.html", values))


async def value(request: Request, client: Client, known: Known) -> Response:
    """A value whole, as text or as bytes: never as a page, whatever it has."""
    query = request.query_params
    shard = await known.shard(client, query.get("name", ""))
    wanted, times = WantedRows.of(query, None, shard.state.clock), _times(shard, query.get("stream", ""))
    if times is None:
        raise NotReadable(None, shard.state.upper)
    row, column = query.get("row", ""), query.get("of", "")
    number = int(row) if row.isascii() and row.isdigit() and len(row) < 6 else -1
    question = wanted.question(times, await _now(client, wanted, times))
    found = await read_rows(client, shard.id, question)
    by_name = {known.name: known for known in columns_of(found.schema)}
    if column not in by_name or not 0 <= number < found.table.num_rows:
        text = f"row={shown(row)}, of={shown(column)}: the page has no such value"
        raise InvalidUsage(UsageKind.INVALID_COLUMN, text)
    data = await client._stack.compute(whole, values(found.table, by_name[column])[number])
    if isinstance(data, str):
        return Response(data.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8")
    headers = {"Content-Disposition": 'attachment; filename="value.bin"'}
    return Response(data, media_type="application/octet-stream", headers=headers)


def _times(shard: Shard, stream: str) -> Readable | None:
    """The times that can be read; `None` where nothing was appended yet. `InvalidUsage` for an `Indexed`
    without a stream of it, and for a stream of a shard."""
    state = shard.state
    if stream or state.streams is not None:
        return readable_stream(arrangement_of(shard, stream))
    return readable(state)


async def _now(client: Client, wanted: WantedRows, times: Readable) -> float:
    """The clock, to be compared with the times that are wanted."""
    clock = client._stack.clock
    written = wanted.times(times, await clock.now())
    return await now_for(clock, max((time for time in written if isinstance(time, int)), default=0))


# --- live --------------------------------------------------------------------------------------------------


async def live(request: Request, client: Client, known: Known) -> Response:
    """The updates that come from now on, as server-sent events. The stream ends with its visitor, and what it
    holds, too."""
    shard = await known.shard(client, request.query_params.get("name", ""))
    if shard.state.streams is not None:
        text = f"{shard.label} has streams: Indexed.listen follows them"
        raise InvalidUsage(UsageKind.INVALID_NAME, text)
    if time_lengths(shard.state) - {None}:
        raise InvalidUsage(UsageKind.INVALID_TIME, f"{shard.label} has product times: it has no live changes")
    if known.live_streams >= LIVE_MAX:
        raise HTTPException(503, f"{LIVE_MAX} visitors follow live changes: close one of their pages")
    return _LiveStream(client, shard, known)


class _LiveStream(StreamingResponse):
    """The events, as long as the visitor takes them."""

    def __init__(self, client: Client, shard: Shard, known: Known) -> None:
        headers = {"X-Accel-Buffering": "no"}  # proxies hand events on as they come
        self._events = _events(client, shard)
        super().__init__(self._events, media_type="text/event-stream", headers=headers)
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as unless_stuck:

            async def send_in_time(message: Message) -> None:
                with anyio.move_on_after(LIVE_SEND_S) as waiting:
                    await send(message)
                if waiting.cancelled_caught:
                    unless_stuck.cancel()
                    await anyio.sleep_forever()

            self._known.live_streams += 1
            try:
                await super().__call__(scope, receive, send_in_time)
            finally:
                self._known.live_streams -= 1
                with anyio.CancelScope(shield=True):
                    await self._events.aclose()


async def _events(client: Client, shard: Shard) -> AsyncGenerator[bytes, None]:
    schema, clock = shard.schema(shard.state.schema_id), shard.state.clock
    try:
        async with client.reader(shard.id) as reader, reader.listen() as listen:
            yield _event({"upper": frontier_text(listen.frontier, clock), "rows": [], "more": 0})
            async for found in listen:
                if isinstance(found, Updates):
                    yield await client._stack.compute(_updates_event, found, schema, clock)
                    await client._stack.runtime.sleep(LIVE_EVERY_S)
                else:
                    yield _event({"upper": frontier_text(found.upper, clock), "rows": [], "more": 0})
    except Error as error:
        yield _event({"end": str(error)})


def _updates_event(updates: Updates[Any, Any, Any], schema: Any, clock: Clock) -> bytes:
    table = updates.to_arrow()
    some = table.slice(0, LIVE_ROWS)
    times, diffs = (some.column(name).to_pylist() for name in ("time", "diff"))
    rows = [
        {"cells": [visible(cell.text) for cell in row], "time": time_text(time, clock), "diff": diff}
        for row, time, diff in zip(cells(some, columns_of(schema)), times, diffs, strict=True)
    ]
    return _event({"rows": rows, "more": table.num_rows - some.num_rows})


def _event(said: dict[str, Any]) -> bytes:
    return b"data: " + pydantic_core.to_json(said) + b"\n\n"
