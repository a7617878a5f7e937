"""Cursors: the position of a listen as a short string that is safe in a header.

A cursor names the shard, the delivered frontier, and the version of the state at that moment, by seqno and
commit id. If that version is later not in the log, the store was restored from a backup: to resume would skip
or repeat updates unnoticed. A cursor keeps no history; a hold does.
"""

import base64
import json
import re
import zlib
from typing import Any, NamedTuple, TypeVar

from aiopersist.base.errors import Corruption, InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, Time, check_time

T = TypeVar("T")

VERSION = 1
SEQNO_MAX = 2**63 - 1
_FLAGS = {0: False, 1: True}
_COMMIT = re.compile(r"[0-9A-Za-z-]{1,36}(\.[0-9a-f]{8})?", re.ASCII)  # with its checksum (`state/seal.py`)


class OfAnotherHistory(Corruption):
    """A cursor from before the store was restored from a backup."""


class Cursor(NamedTuple):
    """A decoded cursor."""

    shard: str
    frontier: Antichain
    as_of: Time | None
    """The time to which product times are advanced, or of a snapshot that was not delivered yet."""
    snapshot: bool
    """Whether the listen starts with the snapshot at `as_of`."""
    seqno: int
    commit: str


def encode(cursor: Cursor) -> str:
    """The cursor as text."""
    as_of, snapshot = cursor.as_of, int(cursor.snapshot)
    place = cursor.frontier.elements, as_of, snapshot, cursor.seqno, cursor.commit
    return text_of([VERSION, cursor.shard, *place])


def text_of(values: list[Any]) -> str:
    """The text of a position: URL-safe base64 of JSON and its CRC."""
    body = json.dumps(values, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4, "big") + body).decode().rstrip("=")


def values_of(text: str) -> Any:
    """The values of `text_of`; `ValueError` (`binascii.Error` is one) or `TypeError` for garbage."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if zlib.crc32(data[4:]) != int.from_bytes(data[:4], "big"):
        raise ValueError("checksum")
    try:
        return json.loads(data[4:])
    except RecursionError as error:
        raise ValueError("depth") from error


def decode(text: object, shard: str) -> Cursor:
    """The cursor of `text`; `InvalidUsage` of kind `INVALID_CURSOR` for garbage or for another shard."""
    if not isinstance(text, str):
        raise _invalid(f"{shown(text, 40)} is no cursor")
    try:
        version, shard_id, elements, as_of, snapshot, seqno, commit = values_of(text)
        if (version, type(version)) != (VERSION, int):
            raise ValueError("version")
        cursor = Cursor(
            checked(shard_id, str),
            Antichain(*map(_time, checked(elements, list))),
            None if as_of is None else check_time(_time(as_of)),
            _FLAGS[checked(snapshot, int)],
            checked(seqno, int),
            checked(commit, str),
        )
        if not 0 <= cursor.seqno <= SEQNO_MAX or not _COMMIT.fullmatch(cursor.commit):
            raise ValueError("version of the state")
        if cursor.snapshot and cursor.as_of is None:
            raise ValueError("snapshot without a time")
    except (ValueError, TypeError, KeyError) as e:
        raise _invalid(f"{shown(text, 40)} is no cursor of this version") from e
    if cursor.shard != shard:
        raise _invalid(f"the cursor is of shard {cursor.shard}, not of {shard}")
    return cursor


def check_shape(cursor: Cursor, time_length: int | None) -> None:
    """`InvalidUsage` of kind `INVALID_CURSOR` unless its times have `time_length` (`None`: ints)."""
    times = (*cursor.frontier.elements, *(() if cursor.as_of is None else (cursor.as_of,)))
    lengths = {len(time) if isinstance(time, tuple) else None for time in times}
    if lengths - {time_length} or (time_length is not None and cursor.as_of is None):
        raise _invalid("the times of the cursor do not have the shape of the shard's times")


def checked(value: Any, kind: type[T]) -> T:
    """A value of JSON; `TypeError` unless it is of exactly this type: a bool is no int."""
    if type(value) is not kind:
        raise TypeError(kind.__name__)
    return value


def _time(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _invalid(message: str) -> InvalidUsage:
    return InvalidUsage(UsageKind.INVALID_CURSOR, message)
