"""Cursors: where a listen stands, as a short string that is safe in a header.

A cursor names the shard, the frontier delivered so far, and the version of the state it was taken
at (its seqno and commit id): where that version is another one by now, or lies beyond the head,
the store was restored from a backup, and resuming would skip or repeat updates unnoticed. It
holds nothing; history is kept by a hold.
"""

import base64
import binascii
import json
import zlib
from typing import Any, NamedTuple

from aiopersist.errors import InvalidUsage, UsageKind, shown
from aiopersist.frontier import Antichain, Time

VERSION = 1


class Cursor(NamedTuple):
    """What a cursor says."""

    shard: str
    frontier: Antichain
    as_of: Time | None
    """Of product times, to which updates are advanced; or of a snapshot yet to be handed over."""
    snapshot: bool
    """Whether it starts with the snapshot at `as_of`."""
    seqno: int
    commit: str


def encode(cursor: Cursor) -> str:
    """Its text: URL-safe base64 of JSON and its CRC."""
    body = json.dumps(
        [
            VERSION,
            cursor.shard,
            cursor.frontier.elements,
            cursor.as_of,
            int(cursor.snapshot),
            cursor.seqno,
            cursor.commit,
        ],
        separators=(",", ":"),
    ).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")


def decode(text: object, shard: str) -> Cursor:
    """What `text` says; `InvalidUsage` of kind `INVALID_CURSOR` for garbage or another shard's."""
    if not isinstance(text, str):
        raise _invalid(f"{shown(text, 40)} is no cursor")
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        body = data[4:]
        if zlib.crc32(body) != int.from_bytes(data[:4], "big"):
            raise ValueError("checksum")
        version, found, elements, as_of, snapshot, seqno, commit = json.loads(body)
        if version != VERSION:
            raise ValueError("version")
        cursor = Cursor(
            found, Antichain(*map(_time, elements)), _time(as_of), bool(snapshot), int(seqno), str(commit)
        )
    except (ValueError, TypeError, binascii.Error) as e:
        raise _invalid(f"{shown(text, 40)} is no cursor of this version") from e
    if cursor.shard != shard:
        raise _invalid(f"the cursor is of shard {cursor.shard}, not of {shard}")
    return cursor


def _time(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _invalid(message: str) -> InvalidUsage:
    return InvalidUsage(UsageKind.INVALID_CURSOR, message)
