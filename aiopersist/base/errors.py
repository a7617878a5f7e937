"""The errors. The type of an error says what the caller should do, and whether the operation happened.

- The program is wrong; fix it: `InvalidUsage`, `InvalidUpdate`, `CodecMismatch`, `IncompatibleSchema`,
  `InvalidLocation`, `Unsupported`.
- An expected race; look at the state and continue: `UpperMismatch`, `SinceViolation`, `NotReadable`,
  `OpaqueMismatch`, `SchemaMismatch`, `LeaseExpired`, `BatchExpired`, `AlreadyAppended`,
  `UnknownShard`, `ShardFinalized`, `SubscriptionExpired`, `KeyExists`, `Conflict`.
- The store failed: `StorageUnavailable` is *determinate* (the operation surely did not happen),
  `Indeterminate` is not (it may have happened, or may still happen). There is no third kind: a backend maps
  each error of its driver to one of the two.
- The data is wrong: `Corruption` is never served as data; `DiffOverflow` names a sum beyond 64 bits,
  `NegativeMultiplicity` a row with fewer than zero copies.

Messages write frontiers as `{3}`, `{(0, 11), (10, 1)}`, `{}`.
"""

from enum import StrEnum
from typing import Any


class Error(Exception):
    """The base of all errors of this library. `shard_id` is the id of the shard, if the error is about one;
    the text has the name by which the caller opened it."""

    def __init__(self, message: str, *, shard_id: str | None = None) -> None:
        super().__init__(message)
        self.shard_id = shard_id
        self.label: str | None = None
        """The label of the shard: `shard 'orders'`. Set when the error leaves the library."""

    def __str__(self) -> str:
        text = super().__str__()
        label = self.label or (self.shard_id and f"shard {self.shard_id}")
        return text if not label or label in text else f"{label}: {text}"

    def __reduce__(self) -> tuple[Any, ...]:  # the arguments of subclasses are not their message
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[Error], args: tuple[Any, ...], attributes: dict[str, Any]) -> Error:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def shown(value: object, limit: int = 80) -> str:
    """The repr of a value for a message. A long repr is cut, and keeps its last bracket or quote."""
    text = repr(value)
    if len(text) <= limit:
        return text
    last = text[-1] if text[-1] in "'\")]}>" else ""
    return f"{text[: limit - 4]}...{last}"


def to_install(extra: str) -> str:
    """How to install a missing extra of the library, which is not on PyPI."""
    return f"pip install '.[{extra}]' in a clone of aiopersist"


class UsageKind(StrEnum):
    """The caller's mistake: `InvalidUsage.kind`."""

    INVALID_BOUNDS = "INVALID_BOUNDS"
    INVALID_EMPTY_TIME_INTERVAL = "INVALID_EMPTY_TIME_INTERVAL"
    INVALID_BATCH_BOUNDS = "INVALID_BATCH_BOUNDS"
    UPDATE_NOT_BEYOND_LOWER = "UPDATE_NOT_BEYOND_LOWER"
    UPDATE_BEYOND_UPPER = "UPDATE_BEYOND_UPPER"
    BATCH_NOT_FROM_THIS_SHARD = "BATCH_NOT_FROM_THIS_SHARD"
    INVALID_REWRITE = "INVALID_REWRITE"
    CONSUMED = "CONSUMED"
    SKIPPED = "SKIPPED"
    WOULD_SKIP = "WOULD_SKIP"
    OUTCOME_PENDING = "OUTCOME_PENDING"
    FINALIZATION_ERROR = "FINALIZATION_ERROR"
    INVALID_TIME = "INVALID_TIME"
    INVALID_NAME = "INVALID_NAME"
    INVALID_COLUMN = "INVALID_COLUMN"
    INVALID_CURSOR = "INVALID_CURSOR"
    INVALID_TXN = "INVALID_TXN"
    INVALID_APPEND = "INVALID_APPEND"
    INVALID_TYPE = "INVALID_TYPE"
    INVALID_MODE = "INVALID_MODE"
    INVALID_SHARE = "INVALID_SHARE"
    INVALID_SETTING = "INVALID_SETTING"
    INVALID_CLOCK = "INVALID_CLOCK"
    INVALID_COPY = "INVALID_COPY"
    NOT_A_TABLE = "NOT_A_TABLE"
    WRONG_LOOP = "WRONG_LOOP"
    CLOSED = "CLOSED"


class InvalidUsage(Error, ValueError):
    """A bug of the caller: fix the program. `kind` tells the kind of bug. Depending on it, there are
    attributes with the wrong values (`lower`, `upper`, `time`, ...)."""

    def __init__(self, kind: UsageKind, message: str, *, shard_id: str | None = None, **values: Any) -> None:
        super().__init__(f"{kind}: {message}", shard_id=shard_id)
        self.kind = kind
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} of kind {self.__dict__.get('kind')} has no {name!r}")


class InvalidUpdate(Error, ValueError):
    """Data that cannot be stored. `row` counts from 0 over the whole input; `None` means the whole
    table (a missing or unknown column). Nothing was written."""

    def __init__(self, message: str, *, row: int | None = None, shard_id: str | None = None) -> None:
        super().__init__(message if row is None else f"row {row}: {message}", shard_id=shard_id)
        self.row = row


class CodecMismatch(Error):
    """The shard has another schema than the requested one. Request the stored schema (a reader without a
    schema does that), or evolve it: `client.compare_and_evolve_schema`."""

    def __init__(
        self, requested: object, actual: object, *, differences: str = "", shard_id: str | None = None
    ) -> None:
        text = differences or f"stored as {actual}, asked for as {requested}"
        super().__init__(text, shard_id=shard_id)
        self.requested = requested
        self.actual = actual


class IncompatibleSchema(Error):
    """The new schema does more than add optional fields, which is the only allowed change."""


class InvalidLocation(Error, ValueError):
    """A URL that cannot be used; the message names the scheme or the option at fault."""


class Unsupported(Error):
    """This backend does not support the operation, and nothing was written. Or Python cannot represent a
    value: read it as Arrow data."""


class UnknownShard(Error, LookupError):
    """The location has no shard of that name or id. A writer creates it, or a reader with `create=True`."""


class ShardFinalized(Error):
    """The shard was dropped or finalized. It cannot be read or written."""


class SchemaMismatch(Error):
    """The current schema id is not the expected one: look at the current schema and try again."""

    def __init__(self, expected: object, actual: object, *, shard_id: str | None = None) -> None:
        super().__init__(f"schema id is {actual}, expected {expected}", shard_id=shard_id)
        self.expected = expected
        self.actual = actual


class UpperMismatch(Error):
    """The shard's upper is not the expected one: another append came first. Nothing was written."""

    def __init__(self, expected: object, current: object, *, shard_id: str | None = None) -> None:
        is_finished = getattr(current, "elements", None) == ()
        why = ": the shard is finished, for ever" if is_finished else f", expected {expected}"
        super().__init__(f"upper is {current}{why}", shard_id=shard_id)
        self.expected = expected
        self.current = current


class SinceViolation(Error):
    """History at `as_of` is no longer held: read at or after `since`."""

    def __init__(self, as_of: object, since: object, *, shard_id: str | None = None) -> None:
        text = f"as_of {as_of} is not at or beyond since {since}: its history is gone"
        super().__init__(text, shard_id=shard_id)
        self.as_of = as_of
        self.since = since


class NotReadable(Error):
    """Time `as_of` is not complete: wait until `upper` has passed it. `as_of=None`: without any append."""

    def __init__(self, as_of: object, upper: object, *, shard_id: str | None = None) -> None:
        what = "nothing was appended yet" if as_of is None else f"as_of {as_of} is not complete"
        super().__init__(f"{what}: upper is {upper}", shard_id=shard_id)
        self.as_of = as_of
        self.upper = upper


class OpaqueMismatch(Error):
    """Another owner has taken over: stop. `actual` is `None` if the hold was released."""

    def __init__(
        self, expected: object, actual: object, *, text: str | None = None, shard_id: str | None = None
    ) -> None:
        actual_text = "the hold was released" if actual is None else f"opaque is {actual}"
        super().__init__(text or f"{actual_text}, expected {expected}", shard_id=shard_id)
        self.expected = expected
        self.actual = actual


class LeaseExpired(Error):
    """The handle sent no heartbeat for longer than its lease: open a new one."""


class SubscriptionExpired(Error):
    """The subscription had updates, acknowledged none for longer than it may, and gave up its position. Open
    it with `start=`, which says where it begins again."""


class BatchExpired(Error):
    """The writer that built the batch is no longer registered: build the batch again. An append of rows
    registers and uploads again by itself. It raises this only if the rows came from an iterator and the sweep
    has deleted their parts, or if it loses its registration several times in a row."""


class AlreadyAppended(Error):
    """This batch was appended before, perhaps by another process. Nothing was written."""


class KeyExists(Error):
    """The table has a value of this key. Nothing was written."""

    def __init__(self, key: object, *, table: str, shard_id: str | None = None) -> None:
        super().__init__(f"table {table!r} has key {shown(key)}", shard_id=shard_id)
        self.key = key
        self.table = table


class Conflict(Error):
    """The reads of a transaction had changed at each of its attempts (`max_attempts=`). `keys` are pairs of
    the name of a table and a key, or a `ReadRange`. Nothing was written."""

    def __init__(self, keys: object, *, shard_id: str | None = None) -> None:
        super().__init__(f"other writes came first: {shown(keys, 200)}", shard_id=shard_id)
        self.keys = keys


class TagExists(Error):
    """`tag` with a `name` that another tag of the shard has. Nothing was written."""

    def __init__(self, name: str, *, shard_id: str | None = None) -> None:
        super().__init__(
            f"there is a tag {name!r}: drop it with untag, or choose another name", shard_id=shard_id
        )
        self.name = name


class UnknownTag(Error, LookupError):
    """The shard has no tag of that `name`: it was never added, or was dropped, or has expired."""

    def __init__(self, name: str, *, shard_id: str | None = None) -> None:
        super().__init__(f"there is no tag {name!r}", shard_id=shard_id)
        self.name = name


class StorageUnavailable(Error):
    """Determinate: the operation surely did not happen. The library retries it unless `retry` is false (a
    full disk, a read-only or forbidden store: waiting does not help)."""

    def __init__(self, message: str, *, retry: bool = True, shard_id: str | None = None) -> None:
        super().__init__(message, shard_id=shard_id)
        self.retry = retry


class Indeterminate(Error):
    """The operation may have happened, or may still happen. The message says what to check."""


class Corruption(Error):
    """The store has other bytes than were written. They are never served as data."""


class MissingPart(Corruption):
    """A part that the newest state names is not in the blob store: it was deleted, or the store was restored.
    `fsck` reports which parts are missing."""


class DiffOverflow(Error):
    """The sum of the diffs of `(key, val)` does not fit in a signed 64-bit integer."""

    def __init__(self, key: object, val: object, *, shard_id: str | None = None) -> None:
        super().__init__(f"diffs of key {key!r}, val {val!r} sum beyond 64 bits", shard_id=shard_id)
        self.key = key
        self.val = val


class NegativeMultiplicity(Error):
    """`(key, val)` has fewer than zero copies at the time of a publication: a table of rows cannot show that.
    Nothing was published."""

    def __init__(self, key: object, val: object, *, shard_id: str | None = None) -> None:
        super().__init__(f"key {shown(key)}, val {shown(val)} has fewer than zero copies", shard_id=shard_id)
        self.key = key
        self.val = val
