"""Which keys are legal, checked before anything is sent: every store refuses the same keys."""

from collections.abc import Sequence

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.storage.consensus import Entry

CONSENSUS_KEY_BYTES_MAX = 2048  # a Postgres index entry holds at most a third of a page


def check_blob_key(key: str) -> None:
    """Raise `InvalidUsage` unless `key` is a relative path of printable ASCII without empty, `.` or
    `..` components, so that none escapes the root of a file system."""
    if not (key.isascii() and key.isprintable()) or any(part in ("", ".", "..") for part in key.split("/")):
        raise InvalidUsage(UsageKind.INVALID_NAME, f"not a key of a blob store: {key!r}", key=key)


def check_consensus_key(key: str) -> None:
    """Raise `InvalidUsage` unless `key` is non-empty text without NUL that fits as UTF-8."""
    try:
        fits = 0 < len(key.encode()) <= CONSENSUS_KEY_BYTES_MAX and "\0" not in key
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise InvalidUsage(UsageKind.INVALID_NAME, f"not a key of a consensus store: {key[:80]!r}", key=key)


def check_entries(entries: Sequence[Entry]) -> None:
    """Raise `InvalidUsage` unless the keys of these compare-and-sets are legal and differ."""
    for key, _, _ in entries:
        check_consensus_key(key)
    if len({key for key, _, _ in entries}) != len(entries):
        raise InvalidUsage(UsageKind.INVALID_APPEND, "a key is named twice in one compare-and-set")


def closed(what: str) -> InvalidUsage:
    """The error of every call on a closed handle."""
    return InvalidUsage(UsageKind.CLOSED, f"this {what} was closed")
