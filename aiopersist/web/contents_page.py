"""Responses with contents: a page of rows, one value in full, live changes."""

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
from aiopersist.web.cache import ClientCache
from aiopersist.web.contents import HOWS, RowsQuery, chosen_columns
from aiopersist.web.readable import Readable, readable, readable_stream, time_lengths
from aiopersist.web.reading import Question
from aiopersist.web.reads import read_rows
from aiopersist.web.render import rendered
from aiopersist.web.rows import cells, columns_of, values, whole
from aiopersist.web.streams import arrangement_of
from aiopersist.web.words import frontier_text, time_text, visible

LIVE_MAX = 50  # streams at once: each holds history and listens
LIVE_SEND_S = 30.0  # to send an event: after this the visitor is taken for gone
LIVE_ROWS = 100  # of an event; of more rows it has the number only
LIVE_EVERY_S = 0.1  # so that a browser has time to draw; later updates are in the next event


async def contents(request: Request, client: Client, cache: ClientCache) -> Response:
    """A page of rows."""
    params = request.query_params
    shard = await cache.shard_soon(client, params.get("name", ""))
    state, times = shard.state, _times(shard, params.get("stream", ""))
    scale = None if times is None else times.scale
    query = RowsQuery.of(params, scale, state.clock)
    page_values: dict[str, Any] = {
        "name": query.name,
        "query": query,
        "scale": scale,
        "state": state,
        "has_products": bool(time_lengths(state) - {None}),
        "sealed": arrangement_of(shard, query.stream).seal if times is not None and query.stream else None,
        "hows": HOWS,
        "read": None,
        "chosen": (),
    }
    if query.tag or times is not None:
        question, is_at_rest = await _question(client, query, shard, times)
        read = await cache.reads.of(client, shard.id, question)
        page_values |= {"question": question, "read": read, "is_at_rest": is_at_rest}
        if read.page is not None:
            page_values["chosen"] = chosen_columns(read.page.columns, query.columns)
    return HTMLResponse(await client._stack.compute(rendered, "contents.html", page_values))


async def value(request: Request, client: Client, cache: ClientCache) -> Response:
    """One value in full, as text or as bytes; never as HTML."""
    params = request.query_params
    shard = await cache.shard(client, params.get("name", ""))
    query, times = RowsQuery.of(params, None, shard.state.clock), _times(shard, params.get("stream", ""))
    row, column = params.get("row", ""), params.get("of", "")
    number = int(row) if row.isascii() and row.isdigit() and len(row) < 6 else -1
    question, _ = await _question(client, query, shard, times)
    rows = await read_rows(client, shard.id, question)
    by_name = {each.name: each for each in columns_of(rows.schema)}
    if column not in by_name or not 0 <= number < rows.table.num_rows:
        text = f"row={shown(row)}, of={shown(column)}: this page has no such value"
        raise InvalidUsage(UsageKind.INVALID_COLUMN, text)
    data = await client._stack.compute(whole, values(rows.table, by_name[column])[number])
    if isinstance(data, str):
        return Response(data.encode("utf-8", "replace"), media_type="text/plain; charset=utf-8")
    headers = {"Content-Disposition": 'attachment; filename="value.bin"'}
    return Response(data, media_type="application/octet-stream", headers=headers)


def _times(shard: Shard, stream: str) -> Readable | None:
    """The readable times; `None` if nothing was appended yet. `InvalidUsage` for an `Indexed` without the
    name of a stream, and for a stream of a shard."""
    state = shard.state
    if stream or state.streams is not None:
        return readable_stream(arrangement_of(shard, stream))
    return readable(state)


async def _question(
    client: Client, query: RowsQuery, shard: Shard, times: Readable | None
) -> tuple[Question, bool]:
    """The requested rows, and whether nobody wrote since their time. `NotReadable` if `times` is `None`."""
    if query.tag:
        return query.question_of_tag(shard.state), False
    if times is None:
        raise NotReadable(None, shard.state.upper)
    now = await _now(client, query, times)
    return query.question(times, now), query.is_at_rest(times, now)


async def _now(client: Client, query: RowsQuery, times: Readable) -> float:
    """The clock of the store, at least as new as the times in the address."""
    clock = client._stack.clock
    written = query.times(times, await clock.now())
    return await now_for(clock, max((time for time in written if isinstance(time, int)), default=0))


# --- live --------------------------------------------------------------------------------------------------


async def live(request: Request, client: Client, cache: ClientCache) -> Response:
    """New updates as server-sent events. The stream and its hold end when the visitor leaves."""
    shard = await cache.shard(client, request.query_params.get("name", ""))
    if shard.state.streams is not None:
        text = f"{shard.label} is an Indexed: follow its streams with Indexed.listen"
        raise InvalidUsage(UsageKind.INVALID_NAME, text)
    if time_lengths(shard.state) - {None}:
        text = f"{shard.label} has product times: live changes need int times"
        raise InvalidUsage(UsageKind.INVALID_TIME, text)
    if cache.live_streams >= LIVE_MAX:
        raise HTTPException(503, f"{LIVE_MAX} visitors already follow live changes: close one of their pages")
    return _LiveStream(client, shard, cache)


class _LiveStream(StreamingResponse):
    """The events, until the visitor stops taking them."""

    def __init__(self, client: Client, shard: Shard, cache: ClientCache) -> None:
        headers = {"X-Accel-Buffering": "no"}  # proxies pass on events at once
        self._events = _events(client, shard)
        super().__init__(self._events, media_type="text/event-stream", headers=headers)
        self._cache = cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as unless_stuck:

            async def send_in_time(message: Message) -> None:
                with anyio.move_on_after(LIVE_SEND_S) as waiting:
                    await send(message)
                if waiting.cancelled_caught:
                    unless_stuck.cancel()
                    await anyio.sleep_forever()

            self._cache.live_streams += 1
            try:
                await super().__call__(scope, receive, send_in_time)
            finally:
                self._cache.live_streams -= 1
                with anyio.CancelScope(shield=True):
                    await self._events.aclose()


async def _events(client: Client, shard: Shard) -> AsyncGenerator[bytes, None]:
    schema, clock = shard.schema(shard.state.schema_id), shard.state.clock
    try:
        async with client.reader(shard.id) as reader, reader.listen() as listen:
            yield _event({"upper": frontier_text(listen.frontier, clock), "rows": [], "more": 0})
            async for step in listen:
                if isinstance(step, Updates):
                    yield await client._stack.compute(_updates_event, step, schema, clock)
                    await client._stack.runtime.sleep(LIVE_EVERY_S)
                else:
                    yield _event({"upper": frontier_text(step.upper, clock), "rows": [], "more": 0})
    except Error as error:
        yield _event({"end": str(error)})


def _updates_event(updates: Updates[Any, Any, Any], schema: Any, clock: Clock) -> bytes:
    table = updates.to_arrow()
    shown_rows = table.slice(0, LIVE_ROWS)
    times, diffs = (shown_rows.column(name).to_pylist() for name in ("time", "diff"))
    rows = [
        {"cells": [visible(cell.text) for cell in row], "time": time_text(time, clock), "diff": diff}
        for row, time, diff in zip(cells(shown_rows, columns_of(schema)), times, diffs, strict=True)
    ]
    return _event({"rows": rows, "more": table.num_rows - shown_rows.num_rows})


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + pydantic_core.to_json(message) + b"\n\n"
