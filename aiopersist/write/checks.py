"""The checks of a call that need no I/O: frontiers, bounds, tables, transactions."""

from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import Antichain, Time, shaped
from aiopersist.base.settings import Settings
from aiopersist.data.types.schema import Schema
from aiopersist.shard.catalog import is_text
from aiopersist.shard.shard import Shard
from aiopersist.state.once import UNMARKED, Once, hash_of

Txn = tuple[str, int]
ONCE_BYTES_MAX = 256


def check_frontier(value: Antichain | Time, schema: Schema[Any, Any, Any]) -> Antichain:
    """`value` as a frontier of the schema's times; `INVALID_TIME` for another shape."""
    return shaped(value, schema.time_length)


def check_bounds(
    lower: Antichain | Time, upper: Antichain | Time, schema: Schema[Any, Any, Any]
) -> tuple[Antichain, Antichain]:
    """Both as frontiers; `INVALID_BOUNDS` unless `lower <= upper`."""
    bounds = check_frontier(lower, schema), check_frontier(upper, schema)
    if not bounds[0] <= bounds[1]:
        message = f"upper {bounds[1]} is not at or beyond lower {bounds[0]}"
        raise InvalidUsage(UsageKind.INVALID_BOUNDS, message, lower=bounds[0], upper=bounds[1])
    return bounds


def check_no_table(shard: Shard) -> None:
    """`InvalidUsage` of kind `NOT_A_TABLE` if the shard, whose state this process has, is a table: only table
    handles write to it, since they keep one value per key."""
    if shard.state.table:
        text = f"{shard.label} is a table: open it with client.table, which keeps one val per key"
        raise InvalidUsage(UsageKind.NOT_A_TABLE, text, shard_id=shard.id)


def check_marks(
    txn: Txn | None, once: str | None, settings: Settings, time_length: int | None = None
) -> tuple[dict[str, int], Once]:
    """The marks by which a commit recognizes a repeated call. Errors of `check_txn` and `check_once`."""
    if txn is None and once is None:
        return {}, UNMARKED
    return check_txn(txn), check_once(once, txn, settings, time_length)


def check_txn(txn: Txn | None) -> dict[str, int]:
    """`txn` as a mapping; `InvalidUsage` of kind `INVALID_TXN` if it is no `(app_id, number)`."""
    if txn is None:
        return {}
    if isinstance(txn, tuple) and len(txn) == 2:
        app, number = txn
        if is_text(app) and type(number) is int and 0 <= number < 2**63:
            return {app: number}
    text = f"{txn!r} is not (app_id, number): text and an int in [0, 2**63)"
    raise InvalidUsage(UsageKind.INVALID_TXN, text, txn=txn)


def check_once(once: str | None, txn: Txn | None, settings: Settings, time_length: int | None = None) -> Once:
    """`once` as appends record it; `InvalidUsage` of kind `INVALID_TXN` unless it is text of 1 to 256 bytes,
    without a `txn`, and times are ints."""
    if once is None:
        return UNMARKED
    if not is_text(once) or len(once.encode()) > ONCE_BYTES_MAX:
        text = f"once={shown(once)} is not text of 1 to {ONCE_BYTES_MAX} bytes"
    elif txn is not None:
        text = f"once={shown(once)} and txn={txn!r}: give one of them"
    elif time_length is not None:
        text = f"once={shown(once)} needs int times, since a repeat returns a time; these are product times"
    else:
        return Once((hash_of(once),), settings.once_keep_s)
    raise InvalidUsage(UsageKind.INVALID_TXN, text, once=once)
