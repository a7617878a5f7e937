"""Cursors: the position of a listen as a short string that is safe in a header.

A cursor names the shard, the frontier delivered so far, and the version of the state at which it was taken,
by seqno and commit id. If another version has that seqno by now, or it lies beyond the head, the store was
restored from a backup, and resuming would skip or repeat updates unnoticed. A cursor keeps no history; a hold
does.
"""

import base64
import json
import zlib
from typing import Any, NamedTuple

from aiopersist.errors import InvalidUsage, UsageKind, shown
from aiopersist.frontier import Antichain, Time

VERSION = 1


class Cursor(NamedTuple):
    """A decoded cursor."""

    shard: str
    frontier: Antichain
    as_of: Time | None
    """The time to which product times are advanced, or that of a snapshot that was not delivered yet."""
    snapshot: bool
    """Whether the listen starts with the snapshot at `as_of`."""
    seqno: int
    commit: str


def encode(cursor: Cursor) -> str:
    """The cursor as text."""
    return text_of(
        [
            VERSION,
            cursor.shard,
            cursor.frontier.elements,
            cursor.as_of,
            int(cursor.snapshot),
            cursor.seqno,
            cursor.commit,
        ]
    )


def text_of(values: list[Any]) -> str:
    """The text of a position: URL-safe base64 of JSON and its CRC."""
    body = json.dumps(values, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")


def values_of(text: str) -> Any:
    """The values again; `ValueError` (of which `binascii.Error` is one) or `TypeError` for garbage."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise ValueError("checksum")
    try:
        return json.loads(data[4:])
    except RecursionError as error:
        raise ValueError("depth") from error


def decode(text: object, shard: str) -> Cursor:
    """The cursor of `text`; `InvalidUsage` of kind `INVALID_CURSOR` for garbage or another shard's."""
    if not isinstance(text, str):
        raise _invalid(f"{shown(text, 40)} is no cursor")
    try:
        version, found, elements, as_of, snapshot, seqno, commit = values_of(text)
        if version != VERSION:
            raise ValueError("version")
        cursor = Cursor(
            found, Antichain(*map(_time, elements)), _time(as_of), bool(snapshot), int(seqno), str(commit)
        )
    except (ValueError, TypeError) as e:
        raise _invalid(f"{shown(text, 40)} is no cursor of this version") from e
    if cursor.shard != shard:
        raise _invalid(f"the cursor is of shard {cursor.shard}, not of {shard}")
    return cursor


def _time(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _invalid(message: str) -> InvalidUsage:
    return InvalidUsage(UsageKind.INVALID_CURSOR, message)
