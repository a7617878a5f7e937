"""Cursors of places within the contents, beside those of a listen: each is a text without a secret."""

from typing import Any

from aiopersist.errors import InvalidUsage, UsageKind, shown
from aiopersist.frontier import Antichain
from aiopersist.read import cursor as cursors
from aiopersist.read.cursor import text_of, values_of
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
    """The place within the contents that `cursor` says; `None` for a cursor of a listen. `InvalidUsage` of
    kind `INVALID_CURSOR` for garbage, and for another shard's."""
    if not cursor.startswith(FORM):
        return None
    try:
        version, found, as_of, *place = values_of(cursor.removeprefix(FORM))
        if version != VERSION:
            raise ValueError("version")
        names = ("key", "is_key_done", "past", "rows", "schema_id", "chosen")
        within = WithinContents(as_of=as_of, **dict(zip(names, place, strict=True)))
    except (ValueError, TypeError) as error:
        text = f"{shown(cursor, 40)} is no cursor of this version"
        raise InvalidUsage(UsageKind.INVALID_CURSOR, text) from error
    if found != shard:
        text = f"the cursor is of shard {found}, not of {shard}"
        raise InvalidUsage(UsageKind.INVALID_CURSOR, text)
    return within


async def position_of(cursor: str, session: ReadSession[Any, Any]) -> Position:
    """The position behind the step of that cursor. One request."""
    within = within_of(cursor, session.shard.id)
    if within is not None:
        return Position(frontier=Antichain(within.as_of), contents=within)
    found = cursors.decode(cursor, session.shard.id)
    await session.check_cursor(found)
    if found.snapshot:
        as_of = as_int(found.as_of)
        return Position(frontier=Antichain(as_of), contents=WithinContents(as_of=as_of))
    return Position(frontier=found.frontier)
