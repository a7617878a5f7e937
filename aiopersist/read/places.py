"""Cursors of places within the contents, beside those of a listen. They are text and contain no secret."""

from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, check_time
from aiopersist.data.jsonable import scalar_from_text
from aiopersist.read import cursor as cursors
from aiopersist.read.cursor import checked, text_of, values_of
from aiopersist.read.session import ReadSession
from aiopersist.shard.instant import as_int
from aiopersist.state.position import Position, WithinContents

FORM = "contents."  # the beginning of cursors within the contents; no other cursor has a dot
VERSION = 3


def cursor_of(shard: str, within: WithinContents) -> str:
    """The text of a place within the contents."""
    place = within.key, within.is_key_done, within.past, within.rows, within.schema_id, within.chosen
    return FORM + text_of([VERSION, shard, within.as_of, *place])


def within_of(cursor: str, shard: str) -> WithinContents | None:
    """The place of `cursor` within the contents; `None` for a cursor of a listen. `InvalidUsage` of kind
    `INVALID_CURSOR` for garbage or for another shard."""
    if not cursor.startswith(FORM):
        return None
    try:
        version, shard_id, *place = values_of(cursor.removeprefix(FORM))
        as_of, key, is_key_done, past, rows, schema_id, chosen = place
        if (version, type(version)) != (VERSION, int):
            raise ValueError("version")
        within = WithinContents(
            as_of=as_int(check_time(checked(as_of, int))),
            key=None if key is None else checked(key, str),
            is_key_done=checked(is_key_done, bool),
            past=as_int(check_time(checked(past, int))),
            rows=as_int(check_time(checked(rows, int))),
            schema_id=None if schema_id is None else checked(schema_id, int),
            chosen=checked(chosen, str),
        )
    except (ValueError, TypeError) as error:
        raise _invalid(f"{shown(cursor, 40)} is no cursor of this version") from error
    if shard_id != shard:
        raise _invalid(f"the cursor is of shard {shown(shard_id)}, not of {shard}")
    return within


def within_of_session(cursor: str, session: ReadSession[Any, Any]) -> WithinContents | None:
    """As `within_of`, for the shard of the session. Also checks the type of the key."""
    within = within_of(cursor, session.shard.id)
    if within is not None and within.key is not None:
        try:
            scalar_from_text(within.key, session.schema.key.codec.arrow_type)
        except ValueError as error:
            text = f"{shown(cursor, 40)}: its key does not have the type of this shard's keys"
            raise _invalid(text) from error
    return within


async def position_of(cursor: str, session: ReadSession[Any, Any]) -> Position:
    """The position after the step of that cursor. One request."""
    within = within_of_session(cursor, session)
    if within is not None:
        return Position(frontier=Antichain(within.as_of), contents=within)
    decoded = cursors.decode(cursor, session.shard.id)
    await session.check_cursor(decoded)
    if decoded.snapshot:
        as_of = as_int(decoded.as_of)
        return Position(frontier=Antichain(as_of), contents=WithinContents(as_of=as_of))
    return Position(frontier=decoded.frontier)


def _invalid(text: str) -> InvalidUsage:
    return InvalidUsage(UsageKind.INVALID_CURSOR, text)
